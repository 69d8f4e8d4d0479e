"""Ctrl-C and SIGTERM wherever they come: the exit code of the signal, no traceback, nothing left on the disk."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
Tiny = Callable[[str], Path]
WAIT_S = 120

# Runs a command line in which one function says that it is reached, then takes a while.
SLOWED = """
import importlib, sys, time
module, name, command = sys.argv[1:4]
owner = importlib.import_module(module)
*path, last = name.split(".")
for each in path:
    owner = getattr(owner, each)
real = getattr(owner, last)
def slowed(*given, **named):
    print("reached", flush=True)
    deadline = time.monotonic() + 60
    while command != "engines.build" and time.monotonic() < deadline:
        time.sleep(0.01)
    return real(*given, **named)
setattr(owner, last, slowed)
from engines.command import run_command
main = importlib.import_module(command).main
run_command(lambda: main(sys.argv[4:]))
"""
SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]


def interrupted(number: int, where: tuple[str, str], command: str, *flags: object) -> subprocess.Popen[str]:
    """The command line, once the signal that came when it reached ``where`` has ended it."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLOWED, *where, command, *map(str, flags)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    with process.stdout, process.stderr:
        reached = process.stdout.readline()
        if not reached.endswith("reached\n"):  # text may stand before it
            process.kill()
            raise AssertionError(process.stderr.read())
        process.send_signal(number)
        assert process.wait(WAIT_S) is not None
        said = process.stderr.read()
    assert "Traceback" not in said and "terminate called" not in said, said
    return process


@pytest.mark.parametrize(("number", "code"), SIGNALS)
@pytest.mark.parametrize(
    "where",
    [("export.exporter", "write_tokenizer"), ("export.exporter", "_sync"), ("export.weights", "WeightStore.matrix")],
)
def test_in_an_export(tiny: Tiny, tmp_path: Path, where: tuple[str, str], number: int, code: int) -> None:
    process = interrupted(number, where, "export.__main__", tiny("bigram_ring"), "-o", tmp_path / "out")
    assert process.returncode == code
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_in_the_export_of_a_first_use(tiny: Tiny, tmp_path: Path, number: int, code: int) -> None:
    where = ("export.exporter", "write_tokenizer")
    flags = ("--cache-dir", tmp_path / "cache", "-p", "a")
    assert interrupted(number, where, "runtime.generate", tiny("bigram_ring"), *flags).returncode == code
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("where", ["prefill", "verify", "commit"])
def test_in_a_pass(tiny: Tiny, cache: Path, where: str) -> None:
    """Ctrl-C lets a text end where it is, SIGTERM ends the process in any state it is in."""
    name = ("runtime.engine_onnxruntime", f"OnnxTrunkEngine.{where}")
    flags = (tiny("bigram_ring"), "--cache-dir", cache, "--prompt-ids", 40, "-n", 20, "--spec-type", "draft-mtp")
    assert interrupted(signal.SIGTERM, name, "runtime.generate", *flags).returncode == 143


def test_in_a_draft(tiny: Tiny, cache: Path) -> None:
    name = ("runtime.onnx_draft", "OnnxDraftEngine.draft")
    flags = (tiny("bigram_ring"), "--cache-dir", cache, "--prompt-ids", 40, "-n", 20, "--spec-type", "draft-mtp")
    assert interrupted(signal.SIGTERM, name, "runtime.generate", *flags).returncode == 143


@pytest.mark.trt
@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_in_a_build(tiny: Tiny, tmp_path: Path, number: int, code: int) -> None:
    """TensorRT is told to stop; its own frames see no exception. The export made on the way is whole and stays."""
    where, folder = ("engines.network", "_serialize"), tmp_path / "x"
    process = interrupted(number, where, "engines.build", tiny("q4_k_m"), "-o", folder, "--context", 512)
    assert process.returncode == code
    assert not [path for path in folder.iterdir() if path.suffix in (".part", ".engine")]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")
