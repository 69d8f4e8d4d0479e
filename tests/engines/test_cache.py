"""The cache of exports: what is listed, what pruning takes and what it leaves alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.cache import (
    CACHE_VARIABLE,
    Entry,
    default_cache_dir,
    entries,
    entry_name,
    main,
    to_remove,
)
from engines.draft_head import DraftHeadOptions
from engines.work_folders import this_node, work_name
from export.version import exporter_version
from runtime.model_cache import exported_folder

KEY = "0123456789abcdef" * 2 + "01234567"
OTHER_VERSION = f"{KEY}-{'0' * 12}"
DAY = 86400.0
Tiny = Callable[[str], Path]


def folder_of(cache: Path, name: str, age_days: float = 0.0, nbytes: int = 10) -> Path:
    folder = cache / name
    folder.mkdir()
    (folder / "weights.bin").write_bytes(bytes(nbytes))
    then = folder.stat().st_mtime - age_days * DAY
    os.utime(folder, (then, then))
    return folder


@pytest.fixture(scope="module")
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def leftover(node: str, pid: int) -> str:
    return f".{OTHER_VERSION}.{node}.{pid}"


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (CACHE_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/a-home")
    assert default_cache_dir() == Path("/a-home/.cache/nextn-trt")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert default_cache_dir() == Path("/caches/nextn-trt")
    monkeypatch.setenv(CACHE_VARIABLE, "~/models")
    assert default_cache_dir() == Path("/a-home/models")


def test_an_export_is_listed_and_kept(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = exported_folder(tiny("f32"), draft=True, cache_dir=tmp_path)
    (entry,) = entries(tmp_path)
    assert (entry.path, entry.useless) == (folder, "") and entry.nbytes > 1e6
    assert main(["--cache-dir", str(tmp_path), "--prune"]) == 0
    assert folder.is_dir() and "in 1 exports" in capsys.readouterr().out
    assert main(["--cache-dir", str(tmp_path), "--max-gb", "0"]) == 0
    out = capsys.readouterr().out
    assert not folder.exists() and f"removed {entry.nbytes / 1e9:8.3f} GB" in out and "in 0 exports" in out


def test_draft_heads_are_entries_of_their_own(tiny: Tiny, tmp_path: Path) -> None:
    whole = exported_folder(tiny("f32"), draft=True, cache_dir=tmp_path)
    cut = exported_folder(tiny("f32"), draft=True, cache_dir=tmp_path, draft_head=DraftHeadOptions(300))
    assert cut.name.startswith(f"{whole.name}-")
    assert {(entry.path, entry.useless) for entry in entries(tmp_path)} == {(whole, ""), (cut, "")}


def test_use_is_remembered(tiny: Tiny, tmp_path: Path) -> None:
    folder = exported_folder(tiny("f32"), draft=True, cache_dir=tmp_path)
    os.utime(folder, (1.0, 1.0))
    assert exported_folder(tiny("f32"), draft=True, cache_dir=tmp_path) == folder
    assert folder.stat().st_mtime > DAY


def test_prune_takes_what_is_of_no_use(tmp_path: Path, dead_pid: int, capsys: pytest.CaptureFixture[str]) -> None:
    here = this_node()
    gone = [
        folder_of(tmp_path, name, age)
        for name, age in [
            (OTHER_VERSION, 0),
            (entry_name(KEY, with_draft=False), 0),  # without a manifest
            (leftover(here, dead_pid), 0),
            (leftover("elsewhere", os.getpid()), 2),
            (leftover(here, os.getpid()), 0),  # of a process whose number is now ours
            (leftover(here, 1), 2),  # a number that went to another process since
        ]
    ]
    kept = [
        folder_of(tmp_path, name, age)
        for name, age in [
            (leftover(here, os.getppid()), 0),
            (leftover("elsewhere", dead_pid), 0.5),
            ("documents", 900),
            (".git", 900),
            (f".config.{here}.{dead_pid}", 900),
        ]
    ]
    assert {entry.path for entry in entries(tmp_path)} == set(gone)
    assert main(["--cache-dir", str(tmp_path)]) == 0
    assert all(path.is_dir() for path in gone)
    assert main(["--cache-dir", str(tmp_path), "--prune"]) == 0
    assert sorted(tmp_path.iterdir()) == sorted(kept)
    assert capsys.readouterr().out.count("removed") == len(gone)


def test_the_next_export_clears_up_after_one_that_was_killed(tiny: Tiny, tmp_path: Path, dead_pid: int) -> None:
    folder_of(tmp_path, leftover(this_node(), dead_pid))
    alive = folder_of(tmp_path, leftover(this_node(), os.getppid()))
    folder = exported_folder(tiny("f32"), draft=True, cache_dir=tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([folder, alive])


def test_what_pruning_chooses() -> None:
    now = 100 * DAY

    def entry(name: str, age_days: float, nbytes: int, useless: str = "") -> Entry:
        return Entry(Path(name), "m", nbytes, now - age_days * DAY, useless)

    found = [entry("new", 1, 40), entry("useless", 2, 40, "x"), entry("used", 10, 50), entry("old", 40, 20)]

    def chosen(days: float | None = None, most: float | None = None) -> list[str]:
        return [each.path.name for each in to_remove(found, days, most, now)]

    assert chosen() == ["useless"]
    assert chosen(days=30) == ["useless", "old"]
    assert chosen(most=110) == ["useless"]
    assert chosen(most=90) == ["useless", "old"]
    assert chosen(most=70) == ["useless", "used"], "what still fits stays"
    assert chosen(days=0, most=0) == ["new", "useless", "used", "old"]


def test_wrong_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--older-than", "-1"], ["--max-gb", "nan"]):
        assert main(flags) == 2
        assert f"error: {flags[0]} {float(flags[1])}: wanted" in capsys.readouterr().err


def test_no_cache_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cache-dir", str(tmp_path / "none")]) == 0
    assert "in 0 exports" in capsys.readouterr().out


def test_names_hold_the_exporters_version() -> None:
    assert entry_name(KEY, with_draft=True) == f"{KEY}-{exporter_version()}"
    assert work_name("x").endswith(f".{os.getpid()}")
