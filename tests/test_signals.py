"""Ctrl-C, SIGTERM and SIGHUP wherever they come: the exit code of each, no traceback, nothing left on the disk."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.manifest import load_manifest
from export.exporter import export_model

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
SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]


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


@pytest.mark.parametrize("command", ["export.__main__", "runtime.generate"])
def test_killed_in_an_export(tiny: Tiny, tmp_path: Path, command: str) -> None:
    """The next one clears up."""
    flags = (
        ("-o", tmp_path / "out")
        if command == "export.__main__"
        else ("--cache-dir", tmp_path, "--prompt-ids", 40, "-n", 1)
    )
    where = ("export.exporter", "write_tokenizer")
    assert interrupted(signal.SIGKILL, where, command, tiny("bigram_ring"), *flags).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".")
    main = importlib.import_module(command).main
    assert main([*map(str, (tiny("bigram_ring"), *flags))]) == 0
    (made,) = tmp_path.iterdir()
    assert not made.name.startswith(".") and load_manifest(made)


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_in_the_export_of_a_first_use(tiny: Tiny, tmp_path: Path, number: int, code: int) -> None:
    where = ("export.exporter", "write_tokenizer")
    flags = ("--cache-dir", tmp_path / "cache", "-p", "a")
    assert interrupted(number, where, "runtime.generate", tiny("bigram_ring"), *flags).returncode == code
    assert list(tmp_path.iterdir()) == []


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
    """TensorRT is told to stop; its own frames see no exception. The export made on the way goes, too."""
    where, folder = ("engines.network", "_serialize"), tmp_path / "x"
    process = interrupted(number, where, "engines.build", tiny("q4_k_m"), "-o", folder, "--context", 512)
    assert process.returncode == code
    assert list(tmp_path.iterdir()) == []


@pytest.mark.trt
@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_in_a_build_of_an_export(tiny: Tiny, tmp_path: Path, number: int, code: int) -> None:
    """What was there before stays as it was."""
    export_model(tiny("q4_k_m"), tmp_path / "x", target="tensorrt")
    before = sorted(path.name for path in (tmp_path / "x").iterdir())
    where = ("engines.network", "_serialize")
    assert interrupted(number, where, "engines.build", tmp_path / "x", "--context", 512).returncode == code
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == before


@pytest.mark.trt
@pytest.mark.parametrize("flags", [(), ("--embed-weights",)])
def test_killed_in_a_build(tiny: Tiny, tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Nothing can be cleared up then; the next build does it."""
    export_model(tiny("q4_k_m"), tmp_path / "x", target="tensorrt")
    before = {path.name for path in (tmp_path / "x").iterdir()}
    where, command = ("engines.network", "_serialize"), ("engines.build", tmp_path / "x", "--context", 512, *flags)
    assert interrupted(signal.SIGKILL, where, *command).returncode == -signal.SIGKILL
    (left,) = {path.name for path in (tmp_path / "x").iterdir()} - before
    assert left.startswith(".engines.")
    done = subprocess.run([sys.executable, "-m", *map(str, command)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    after = {path.name for path in (tmp_path / "x").iterdir()} - before
    assert after == {"trunk.engine", "draft.engine", "engines.json"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


# ---------------------------------------------------------------- while modules are being loaded
# What libraries make of an exception in the middle of their loading.
LOADING = """
import time
print("reached", flush=True)
try:
    deadline = time.monotonic() + {seconds}
    while time.monotonic() < deadline:
        time.sleep(0.01)
except BaseException as error:
    {then}
__version__ = "99.0"
"""
THEN = {
    "another error": "raise ImportError('initialization failed')",
    "nothing": "pass",
    "the end": "__import__('os').abort()",
}
LOADS = """
from engines.command import run_command
from plugins.load import tensorrt
run_command(lambda: [tensorrt(), __import__("time").sleep(60)] and 0)
"""


def signalled(number: int, folder: Path, *command: str) -> tuple[int, str]:
    """Exit code and stderr of a command that prints "reached" when the signal is to come."""
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "reached\n"
    process.send_signal(number)
    said = process.communicate(timeout=WAIT_S)[1]
    return process.returncode, said


@pytest.mark.parametrize(("number", "code"), SIGNALS)
@pytest.mark.parametrize("then", THEN)
def test_while_a_library_is_being_loaded(tmp_path: Path, then: str, number: int, code: int) -> None:
    (tmp_path / "tensorrt_rtx.py").write_text(LOADING.format(seconds=0.5, then=THEN[then]))
    assert signalled(number, tmp_path, "-c", LOADS) == (code, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    ("command", "library"), [("runtime.generate", "tokenizers"), ("export", "tqdm"), ("engines.build", "tqdm")]
)
def test_at_the_start(tmp_path: Path, command: str, library: str, number: int) -> None:
    """Nothing is open yet: the signal ends the process as it would any other, and without a word."""
    (tmp_path / f"{library}.py").write_text(LOADING.format(seconds=60, then="raise"))
    assert signalled(number, tmp_path, "-m", command, "absent.gguf") == (-number, "")


def test_a_signal_that_is_ignored_stays_so(tiny: Tiny, tmp_path: Path) -> None:
    """As for what a shell started with nohup, or in the background."""
    where = ("export.exporter", "write_tokenizer")
    script = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{SLOWED.replace('+ 60', '+ 0.3')}"
    model, out = tiny("bigram_ring"), tmp_path / "out"
    assert (
        signalled(signal.SIGINT, tmp_path, "-c", script, *where, "export.__main__", str(model), "-o", str(out))[0] == 0
    )
    assert (out / "manifest.json").exists()
