"""Engines of several builds that end in one folder at once: files and manifest always belong to one of them."""

from __future__ import annotations

import threading
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import pytest

from engines import engine_files
from engines.engine_files import kept_engines, part_of, put_in_place
from engines.engine_manifest import ENGINES_NAME, load_engine_manifest
from engines.errors import EngineError
from tests.engines.test_engine_manifest import manifest

BUILDS = 6


def test_two_builds_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = threading.local()
    monkeypatch.setattr(engine_files, "part_of", lambda path: path.with_name(f"{path.name}.{mine.number}.part"))

    def build(number: int) -> None:
        mine.number = number
        for _ in range(20):
            content = f"build {number}".encode() * number
            engine_files.part_of(tmp_path / "trunk.engine").write_bytes(content)
            digest = blake2b(content, digest_size=20).hexdigest()
            engine = replace(manifest().engines["trunk"], nbytes=len(content), digest=digest)
            put_in_place(tmp_path, replace(manifest(), build_key=str(number), engines={"trunk": engine}))

    threads = [threading.Thread(target=build, args=(number,)) for number in range(1, BUILDS)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    left = load_engine_manifest(tmp_path)
    content = left.file(tmp_path, "trunk").read_bytes()
    assert blake2b(content, digest_size=20).hexdigest() == left.engines["trunk"].digest
    assert sorted(path.name for path in tmp_path.iterdir()) == [ENGINES_NAME, "trunk.engine"]


def test_a_build_that_fails_here_is_none(tmp_path: Path) -> None:
    """An engine is missing: nothing describes what lies there."""
    manifest().save(tmp_path)
    with pytest.raises(FileNotFoundError):
        put_in_place(tmp_path, manifest())
    with pytest.raises(EngineError, match=r"no engines\.json"):
        load_engine_manifest(tmp_path)


def test_processes_write_their_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = part_of(tmp_path / "trunk.engine")
    monkeypatch.setattr("os.getpid", lambda: 1)
    assert part_of(tmp_path / "trunk.engine") != first


def test_only_whole_engines_of_the_same_things_are_kept(tmp_path: Path) -> None:
    content = bytes(1000)
    engine = replace(manifest().engines["trunk"], nbytes=1000, digest=blake2b(content, digest_size=20).hexdigest())
    made = replace(manifest(), build_key="key", engines={"trunk": engine})
    file = tmp_path / "trunk.engine"
    file.write_bytes(content)
    assert kept_engines(tmp_path, "key") is None  # not described
    made.save(tmp_path)
    assert kept_engines(tmp_path, "key") == made and kept_engines(tmp_path, "other") is None
    file.write_bytes(content[:500] + b"\1" + content[501:])
    assert kept_engines(tmp_path, "key") is None
    file.unlink()
    assert kept_engines(tmp_path, "key") is None
