"""Engines of several builds that end in one folder at once: files and manifest always belong to one of them."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import pytest

from engines import engine_files
from engines.engine_files import Undone, kept_engines, put_in_place, work_folder
from engines.engine_manifest import ENGINES_NAME, load_engine_manifest
from engines.errors import EngineError
from engines.manifest import MANIFEST_NAME
from engines.signals import HungUp, Terminated
from engines.work_folders import this_node
from tests.engines.test_engine_manifest import manifest

BUILDS = 6


def test_two_builds_do_not_mix(tmp_path: Path) -> None:
    def build(number: int) -> None:
        work = tmp_path / f"work {number}"
        for _ in range(20):
            work.mkdir()
            content = f"build {number}".encode() * number
            (work / "trunk.engine").write_bytes(content)
            digest = blake2b(content, digest_size=20).hexdigest()
            engine = replace(manifest().engines["trunk"], nbytes=len(content), digest=digest)
            put_in_place(tmp_path, work, replace(manifest(), build_key=str(number), engines={"trunk": engine}))
            work.rmdir()

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
        put_in_place(tmp_path, tmp_path / "work", manifest())
    with pytest.raises(EngineError, match=r"no engines\.json"):
        load_engine_manifest(tmp_path)


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


@pytest.mark.parametrize("busy", [errno.EBADF, errno.EIO])
def test_a_file_system_that_locks_no_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: int) -> None:
    """NFS: the manifest, which can be opened for writing, is held instead."""
    (tmp_path / MANIFEST_NAME).write_text("{}")
    held, real = [], engine_files.fcntl.flock

    def flock(handle: int, how: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(busy, os.strerror(busy))
        held.append(os.readlink(f"/proc/self/fd/{handle}"))
        real(handle, how)

    monkeypatch.setattr(engine_files.fcntl, "flock", flock)
    with work_folder(tmp_path) as work:
        (work / "trunk.engine").write_bytes(b"12345")
        engine = replace(manifest().engines["trunk"], nbytes=5)
        if busy == errno.EBADF:
            put_in_place(tmp_path, work, replace(manifest(), engines={"trunk": engine}))
        else:
            with pytest.raises(OSError, match=os.strerror(busy)):
                put_in_place(tmp_path, work, replace(manifest(), engines={"trunk": engine}))
    assert held == ([str(tmp_path / MANIFEST_NAME)] if busy == errno.EBADF else [])


def work_of(folder: Path, node: str, pid: int, age_s: float = 0.0) -> Path:
    path = folder / f".engines.{node}.{pid}"
    path.mkdir()
    (path / "trunk.engine").write_bytes(b"half")
    then = path.stat().st_mtime - age_s
    os.utime(path, (then, then))
    return path


def test_the_next_build_clears_up_after_killed_ones(tmp_path: Path) -> None:
    """Those of processes that run, here or elsewhere, are left alone."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    gone = [
        work_of(tmp_path, this_node(), ended.pid),
        work_of(tmp_path, this_node(), os.getpid()),  # of a process whose number is now ours
        work_of(tmp_path, "elsewhere", 5, age_s=2 * 86400),
    ]
    kept = [work_of(tmp_path, this_node(), os.getppid()), work_of(tmp_path, "elsewhere", 6), tmp_path / ".engines.x"]
    kept[-1].write_text("a file of somebody's")
    (tmp_path / f".engines.{this_node()}.{ended.pid}0").symlink_to("/")
    with work_folder(tmp_path) as work:
        assert work.is_dir() and not any(work.iterdir())
        assert not gone[0].exists() and not gone[2].exists() and all(path.exists() for path in kept)
    assert not work.exists() and all(path.exists() for path in kept)


def test_processes_work_in_their_own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with work_folder(tmp_path) as first:
        monkeypatch.setattr("os.getpid", os.getppid)
        with work_folder(tmp_path) as second:
            assert first != second and first.is_dir() and second.is_dir()


@pytest.mark.parametrize("error", [KeyboardInterrupt, Terminated, HungUp, EngineError])
@pytest.mark.parametrize("theirs", ["", "begun", "finished", "replaced"])
def test_an_export_for_a_build_that_is_interrupted(tmp_path: Path, error: type[BaseException], theirs: str) -> None:
    """It goes, unless others use it; one whose build failed stays for the next try."""
    folder = tmp_path / "x"
    with pytest.raises(error), Undone() as undone:
        folder.mkdir()
        undone.made(folder)
        (folder / MANIFEST_NAME).write_text("{}")
        if theirs == "begun":
            work_of(folder, this_node(), os.getppid())
        elif theirs == "finished":
            manifest().save(folder)
        elif theirs == "replaced":
            folder.rename(tmp_path / "old")
            folder.mkdir()
        raise error("x")
    assert folder.exists() == (bool(theirs) or error is EngineError)


def test_an_export_that_was_there_before_stays(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Undone():
        raise KeyboardInterrupt
    assert tmp_path.exists()
