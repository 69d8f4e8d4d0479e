"""Files that flags name: whatever lies there, it is read within bounds or refused in a line."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import export.__main__
from engines import given_files
from engines.errors import EngineError, UsageError
from engines.given_files import given_text, read_bytes
from engines.manifest import MANIFEST_NAME, load_manifest
from runtime import bench, check, eval, generate
from runtime.chat import main as chat
from runtime.profiling.trtexec import read_profile
from tests.runtime.command import Outcome, run_main

Tiny = Callable[[str], Path]
EXPORT = ("MODEL", "-o", "out", "--draft-head-rows", "300")
REASONS = (
    "cannot be read",
    "is empty",
    "holds 0 prompts",
    "is no table",
    "no prompt in there",
    "JSON",
    "no text to count",
)
FLAGS: dict[str, tuple[Callable[[list[str]], int], tuple[str, ...]]] = {
    "generate -f": (generate.main, ("MODEL", "-f")),
    "check --prompts": (check.main, ("MODEL", "--prompts")),
    "eval --prompts": (eval.main, ("MODEL", "--prompts")),
    "bench -f": (bench.main, ("MODEL", "-f")),
    "bench --expect": (bench.main, ("MODEL", "--expect")),
    "chat --api-key-file": (chat, ("--url", "http://127.0.0.1:1", "--api-key-file")),
    "profile --trtexec": (lambda given: len(read_profile(Path(given[-1]))), ()),
    "export --draft-head-text": (export.__main__.main, (*EXPORT, "--draft-head-text")),
    "export --draft-head-table": (export.__main__.main, (*EXPORT, "--draft-head-table")),
}  # fmt: skip


@pytest.fixture
def strange(tmp_path: Path) -> dict[str, Path]:
    """Files that are none, or too large ones."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 40)
    (tmp_path / "to zero").symlink_to("/dev/zero")
    names = ("pipe", "loop", "sparse", "to zero", "absent", "x" * 300)
    found = {name: tmp_path / name for name in names}
    return {**found, "folder": tmp_path, "zero": Path("/dev/zero"), "random": Path("/dev/urandom")}


@pytest.mark.parametrize("name", FLAGS)
def test_flags(
    name: str, tiny: Tiny, strange: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEXTN_CACHE", str(tmp_path / "cache"))
    main, given = FLAGS[name]
    flags = [str(tiny("bigram_ring")) if each == "MODEL" else each for each in given]
    for path in strange.values():
        if path.name == "sparse" and "text" in name:  # texts for counting are read in pieces, however long they are
            continue
        outcome = run_main(main, *flags, path)
        outcome.refused(2)
        assert str(path)[-50:] in outcome.err or "the prompt is empty" in outcome.err, outcome
        assert any(reason in outcome.err for reason in REASONS), outcome
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("source", ["/dev/zero", "/dev/urandom"])
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_stdin_without_end(source: str, command: str, tiny: Tiny, tmp_path: Path) -> None:
    with open(source, "rb") as endless:
        done = subprocess.run(
            [sys.executable, "-m", f"runtime.{command}", tiny("bigram_ring"), "--cache-dir", tmp_path / "cache"],
            stdin=endless, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    outcome = Outcome(done.returncode, done.stdout, done.stderr.replace("note: ", ""))
    outcome.refused(2, "error: stdin: ")


def test_a_pipe_that_is_written_to(tmp_path: Path) -> None:
    """As of `<(command)`: slowly, in pieces."""
    os.mkfifo(tmp_path / "pipe")
    keep = os.open(tmp_path / "pipe", os.O_RDWR)

    def write() -> None:
        for piece in (b"one ", b"two ", "drei ß".encode()):
            time.sleep(0.05)
            os.write(keep, piece)
        os.close(keep)

    writer = threading.Thread(target=write)
    writer.start()
    assert given_text("--file", tmp_path / "pipe", "") == "one two drei ß"
    writer.join()


def test_a_pipe_that_is_written_to_without_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["sh", "-c", f"exec cat /dev/zero > '{tmp_path / 'pipe'}'"]) as writer:
        with pytest.raises(UsageError, match=r"--file .*pipe: cannot be read \(it has more than 2 MiB\); shorten it"):
            while not given_text("--file", tmp_path / "pipe", "shorten it", 2 << 20):
                time.sleep(0.02)  # the writer has not come yet
        assert writer.wait(60) != 0


def test_bounds(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_bytes(tmp_path / "file", 5) == b"12345"
    for most in (4, 0):
        with pytest.raises(OSError, match=f"it has more than {most} bytes"):
            read_bytes(tmp_path / "file", most)
    with pytest.raises(OSError, match="Invalid argument"):
        read_bytes(Path("a\0b"))


def test_a_file_that_grows_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1")

    def pieces(file: object) -> Iterator[bytes]:
        yield from (b"12", b"34", b"56")

    monkeypatch.setattr(given_files, "_pieces", pieces)
    with pytest.raises(OSError, match="more than 5 bytes"):
        read_bytes(path, 5)


@pytest.mark.parametrize("name", ["pipe", "loop", "sparse", "to zero", "folder"])
def test_files_of_a_folder(name: str, strange: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / MANIFEST_NAME).symlink_to(strange[name])
    with pytest.raises(EngineError, match=r"manifest\.json: unreadable manifest"):
        load_manifest(folder)
