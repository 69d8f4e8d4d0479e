"""`runtime.generate`: model files, the export cache, backends; and as a process: Ctrl-C, pipes, locale."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engines.manifest import load_manifest
from runtime.generate import main
from runtime.model_cache import exported_folder
from tests.known_text import ENDLESS, RING
from tests.runtime.command import run_main
from tests.runtime.conftest import Generate

ROOT = Path(__file__).parents[2]


# ---------------------------------------------------------------- models
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("array_bomb", "array_bomb"),
        ("trunc_data_mid", "trunc_data_mid"),
        ("html_page", "HTML"),
        ("lfs_pointer", "LFS"),
        ("big_endian", "big-endian"),
        ("mmproj", "projector"),
        ("nextn_only", "nextn_only"),
        ("nextn_promised", "--spec-type none"),
    ],
)
def test_bad_files_are_refused_and_leave_nothing(
    tiny: Callable[[str], Path], tmp_path: Path, name: str, says: str
) -> None:
    path = tiny(name)
    run_main(main, path, "--cache-dir", tmp_path / "cache", "-p", "a").refused(3, says)
    assert not list((tmp_path / "cache").glob("*"))


def test_missing_files_and_folders_that_are_no_export(tmp_path: Path) -> None:
    run_main(main, tmp_path / "none.gguf", "-p", "a").refused(2, "none.gguf")
    run_main(main, tmp_path, "-p", "a").refused(4, str(tmp_path), "manifest.json")


def test_a_stripped_head_can_be_done_without(generate: Generate) -> None:
    flags = ("--prompt-ids", "40,41,42", "-n", 20, "--spec-type", "none", "--json")
    assert generate("nextn_promised", *flags).json["tokens"] == generate("f32", *flags).json["tokens"]


def test_a_model_without_head(generate: Generate) -> None:
    flags = ("--prompt-ids", "40,41,42", "-n", 10, "--json")
    assert generate("nextn_absent", *flags).json["spec_type"] == "none"
    generate("nextn_absent", *flags, "--spec-type", "draft-mtp").refused(2, "no NextN draft head")


@pytest.mark.parametrize("name", ["nan_norm", "inf_block"])
def test_numbers_that_are_none_are_never_text(generate: Generate, name: str) -> None:
    outcome = generate(name, "--prompt-ids", "40,41,42", "-n", 20)
    assert outcome.code in (3, 5)  # refused when the file is read, or at the first position
    outcome.refused(outcome.code)


def test_exports_are_kept_by_content(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    cache, copy = tmp_path / "cache", tmp_path / "other name.gguf"
    shutil.copy(tiny("draft_perfect"), copy)
    flags = ("--cache-dir", cache, "--prompt-ids", "40", "-n", 5)
    assert run_main(main, tiny("draft_perfect"), *flags).code == 0
    [folder] = cache.iterdir()
    made = (folder / "manifest.json").stat().st_mtime_ns
    assert run_main(main, copy, *flags).code == 0
    assert run_main(main, folder, "--prompt-ids", "40", "-n", 5).code == 0  # the exported folder itself
    assert (folder / "manifest.json").stat().st_mtime_ns == made
    (folder / "weights.bin").write_bytes(b"cut")
    run_main(main, folder, *flags).refused(4, "weights.bin")
    assert run_main(main, copy, *flags).code == 0  # a damaged one is made anew
    assert list(cache.iterdir()) == [folder]


def test_a_cache_that_was_moved(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Nothing in it names the place where it was made."""
    flags = ("--prompt-ids", "40", "-n", 5, "--json")
    first = run_main(main, tiny("draft_perfect"), "--cache-dir", tmp_path / "old", *flags).json
    [folder] = (tmp_path / "old").iterdir()
    made = (folder / "manifest.json").stat().st_mtime_ns
    (tmp_path / "old").rename(tmp_path / "new")
    again = run_main(main, tiny("draft_perfect"), "--cache-dir", tmp_path / "new", *flags).json
    assert again["tokens"] == first["tokens"]
    assert (tmp_path / "new" / folder.name / "manifest.json").stat().st_mtime_ns == made
    assert not (tmp_path / "old").exists()


def test_a_cache_that_cannot_be_written(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run_main(main, tiny("bigram_ring"), "--cache-dir", tmp_path / "file", "-p", "a").refused(6, "--cache-dir")


def test_backends(generate: Generate) -> None:
    assert generate("bigram_ring", "--prompt-ids", 40, "-n", 3, "--backend", "onnxruntime").code == 0
    generate("bigram_ring", "--prompt-ids", 40, "--backend", "tensorrt").refused(4, "tensorrt", "onnxruntime")


def test_an_export_for_another_backend(tiny: Callable[[str], Path], cache: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(exported_folder(tiny("bigram_ring"), draft=True, cache_dir=cache), tmp_path / "other")
    replace(load_manifest(folder), target="tensorrt").save(folder)
    run_main(main, folder, "--prompt-ids", 40, "--backend", "onnxruntime").refused(4, "--target onnxruntime")


# ---------------------------------------------------------------- as a process
def test_ctrl_c_ends_with_what_was_generated(command: list[str]) -> None:
    process = subprocess.Popen(
        [*command, "--prompt-ids", str(RING[0])], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    )
    assert process.stdout is not None
    start = b""
    while len(start) < 20:
        start += process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert start + rest == bytes(ENDLESS.greedy(RING[0], len(start + rest)))
    assert b"(cancelled)" in err and b"Traceback" not in err


def test_a_reader_that_goes_away(command: list[str]) -> None:
    process = subprocess.Popen(
        [*command, "--prompt-ids", str(RING[0])], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    assert len(process.stdout.read(20)) == 20
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_an_output_that_is_full(command: list[str]) -> None:
    for flags in ([], ["--json"]):
        asked = [*command, "--prompt-ids", str(RING[0]), "-n", "5", *flags]
        with open("/dev/full", "wb") as full:
            process = subprocess.run(asked, cwd=ROOT, stdout=full, stderr=subprocess.PIPE)
        assert process.returncode == 6
        assert process.stderr.startswith(b"error: the output cannot be written"), process.stderr
        assert process.stderr.count(b"\n") == 1


def test_closed_streams(command: list[str]) -> None:
    """What has no stream to go to goes nowhere: no statistics on stdout, no traceback."""
    shell = ["sh", "-c", 'exec "$@" 2>&-', "sh", *command, "--prompt-ids", str(RING[0]), "-n", "5", "--json"]
    closed = subprocess.run(shell, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert closed.returncode == 0
    assert json.loads(closed.stdout)["tokens"] == ENDLESS.greedy(RING[0], 5)
    shell[2] = 'exec "$@" >&-'
    assert subprocess.run(shell, cwd=ROOT, stderr=subprocess.PIPE).returncode == 0
    shell = ["sh", "-c", 'exec "$@" <&-', "sh", *command]
    closed = subprocess.run(shell, cwd=ROOT, capture_output=True)
    assert (closed.returncode, closed.stdout, closed.stderr.count(b"\n")) == (2, b"", 1)
    assert b"the prompt is empty" in closed.stderr


def test_an_exported_folder_needs_no_exporter(tiny: Callable[[str], Path], cache: Path) -> None:
    """Without export, onnx and gguf, in a locale that knows no UTF-8."""
    folder = exported_folder(tiny("bigram_ring"), draft=True, cache_dir=cache)
    code = (
        "import sys\nfor name in ('export', 'onnx', 'gguf'): sys.modules[name] = None\n"
        "from runtime.command_line import run_command\nfrom runtime.generate import main\nrun_command(main)"
    )
    flags = [str(folder), "-p", "w é", "--raw", "-n", "5", "--json"]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code, *flags], cwd=ROOT, capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["timings"]["predicted_n"] == 5


def test_the_default_cache(command: list[str], tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    flags = [*command[:4], "--prompt-ids", "40", "-n", "1"]
    done = subprocess.run(flags, cwd=ROOT, capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "nextn-trt").iterdir())) == 1
