"""Command lines where streams, folders and links are not as they should be: a line, an exit code, no traceback."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import export.__main__
from engines import cache
from engines.errors import UsageError
from engines.given_files import home_path, real_path, write_text
from runtime import chat, eval, generate
from tests.runtime.command import run_main

ROOT = Path(__file__).parents[1]
Tiny = Callable[[str], Path]


def shell(line: str, folder: Path, model: Path) -> tuple[int, str]:
    """Exit code and what was said of a line, which finds the model in $M and Python in $P."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "M": str(model), "P": sys.executable}
    environment["NEXTN_CACHE"] = str(folder / "cache")
    done = subprocess.run(
        ["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert "Traceback" not in done.stdout + done.stderr and "Exception ignored" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


GENERATE = '"$P" -m runtime.generate "$M" --prompt-ids 40 -n 3'


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        (f"{GENERATE} >&-", 0, "prompt:"),
        (f"{GENERATE} 2>&-", 0, ""),
        (f"{GENERATE} <&- >&- 2>&-", 0, ""),
        (f"{GENERATE} >/dev/full", 6, "error: the output cannot be written (No space left on device)"),
        (f"{GENERATE} 2>/dev/full", 6, ""),
        (f"{GENERATE} >/dev/full 2>/dev/full", 6, ""),
        (f"{GENERATE} --frob 2>/dev/full", 2, ""),
        (f"{GENERATE} | true; exit ${{PIPESTATUS[0]}}", 141, ""),
        (f"{GENERATE} --frob 2>&1 >/dev/null | true; exit ${{PIPESTATUS[0]}}", 2, ""),
        ('"$P" -m export "$M" -o loop', 2, "error: loop: is a link that leads to itself"),
        ('"$P" -m export "$M" -o loop/x', 2, "is a link that leads to itself"),
        ('"$P" -m engines.cache --cache-dir loop', 2, "error: loop: is no folder"),
        ('"$P" -m engines.cache --cache-dir "$M"', 2, "is no folder"),
        (f"{GENERATE} --cache-dir loop", 6, "error: loop: cannot hold the export"),
        ("NEXTN_CACHE='~nobody-of-this-name/x' \"$P\" -m engines.cache", 2, "there is no such home folder"),
        ('mkdir gone; cd gone; rmdir ../gone; "$P" -m export "$M" -o x', 2, "the current folder is there no more"),
    ],
)
def test_streams_and_folders(tiny: Tiny, tmp_path: Path, line: str, code: int, says: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    found, said = shell(line, tmp_path, tiny("bigram_ring"))
    assert found == code and says in said, (found, said)


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (
            ImportError("/x/onnx.so: failed to map segment from shared object", name="onnx"),
            6,
            "not enough memory to load",
        ),
        (
            ImportError("/x/onnx.so: undefined symbol: f\nand more", name="onnx"),
            4,
            "onnx does not load (/x/onnx.so: unde",
        ),
        (ImportError("No module named 'x'"), 4, "a library does not load"),
        (
            OSError(errno.EMFILE, "Too many open files"),
            6,
            "the system gives this process no more (Too many open files)",
        ),
        (OSError(errno.EAGAIN, "No more processes"), 6, "the system gives this process no more (No more processes)"),
        (MemoryError(), 6, "out of memory"),
    ],
)
def test_what_the_system_does_not_give(error: Exception, code: int, says: str) -> None:
    def main(_: list[str]) -> int:
        raise error

    run_main(main).refused(code, says)


def test_links_to_a_folder_are_followed(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert run_main(export.__main__.main, tiny("bigram_ring"), "-o", tmp_path / "link").code == 0
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "manifest.json").exists()


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for path in (tmp_path / "a", tmp_path / "a" / "c"):
        with pytest.raises(UsageError, match="is a link that leads to itself"):
            real_path(path)
    assert real_path(tmp_path / "none" / ".." / "x") == tmp_path.resolve() / "x"
    with pytest.raises(UsageError, match="there is no such home folder"):
        home_path(Path("~nobody-of-this-name/x"))


@pytest.mark.parametrize(
    "path", ["~nobody-of-this-name/x", "a\0b", "none/x", "\udcff/x", "x" * 300, "loop", "/dev/full"]
)
def test_where_a_chat_is_saved(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    before = sorted(tmp_path.iterdir())
    text = f"/save {path}\n/load {path}\n".encode("utf-8", "surrogateescape")
    flags = ("--cache-dir", tmp_path.parent / "cache", "--spec-type", "none")
    outcome = run_main(chat.main, tiny("bigram_ring"), *flags, stdin=text)
    assert outcome.code in (2, 6) and outcome.out == "", outcome
    assert outcome.err.count("error: ") >= 1 and "Traceback" not in outcome.err, outcome
    left = [each for each in tmp_path.iterdir() if each.name != "loop"]
    assert left == [each for each in before if each.name != "loop"], left


def test_a_cache_that_others_change(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that go away while the cache is being listed."""
    run_main(generate.main, tiny("bigram_ring"), "--cache-dir", tmp_path, "--prompt-ids", 40, "-n", 1)
    (folder,) = tmp_path.iterdir()
    (folder / "gone").symlink_to("nowhere")
    assert run_main(cache.main, "--cache-dir", tmp_path).code == 0


ADDRESSES = (
    "http://[::1", "http://a b/", "http://x/\r\nHost: y", "http://" + "x" * 300, "http://x:99999", "http://x:0", "http://",
    "file:///etc/passwd", "http://u@h", "http://x/é", "http://x?y", "http://x:y", "\x1b[2J",
)  # fmt: skip


@pytest.mark.parametrize("address", ADDRESSES)
def test_addresses_that_are_none(address: str) -> None:
    for run in (run_main(chat.main, "--url", address, stdin=b"hi"), run_main(eval.main, "--server", address)):
        run.refused(2, "wanted the address of a server")
        assert "\x1b" not in run.err


@pytest.mark.parametrize(
    "address", ["127.0.0.1:9", "http://127.0.0.1:9/", "http://127.0.0.1:9/v1", "http://[::1]:9/a/v1"]
)
def test_addresses_where_nobody_answers(address: str) -> None:
    run_main(chat.main, "--url", address, stdin=b"hi").refused(6, ":9")
    if "://" in address:
        run_main(eval.main, "--server", address).refused(4, ":9/")


def test_what_is_written_to(tmp_path: Path) -> None:
    """A file whole or not at all; a pipe or a device is written to, not replaced; links stay."""
    (tmp_path / "file").write_text("before")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "loop").symlink_to("loop")
    write_text(tmp_path / "link", "after")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "after"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_text(tmp_path / "pipe", "through")
    assert os.read(reader, 100) == b"through" and (tmp_path / "pipe").is_fifo()
    os.close(reader)
    for path in (Path("/dev/full"), tmp_path / "loop", tmp_path / "none" / "x", tmp_path):
        with pytest.raises(OSError, match=r"No space|Too many levels|No such file|Is a directory"):
            write_text(path, "x" * 100_000)
    assert Path("/dev/full").is_char_device()
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "file", "\ud800")
    assert (tmp_path / "file").read_text() == "after"
    assert {each.name for each in tmp_path.iterdir()} == {"file", "link", "loop", "pipe"}
