"""Faults of the GPU itself, each in a process of its own, which they end: what is said, the exit code, and signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.tensorrt_draft import TensorrtDraft
from runtime.tensorrt_trunk import TensorrtTrunk
from tests.gpu.prepare import WIDE

pytestmark = [pytest.mark.gpu, pytest.mark.trt]

ROOT = Path(__file__).parents[2]
WAIT_S = 120
SAYS = "error: the GPU failed at "
FAILING = 60  # launches, of some hundreds of a text
_STATUS = r"CUDA error 701 \(too many resources requested for launch\)"
FAILED = re.compile(
    r".*/(?P<role>trunk|draft)\.engine: a (prefill|decode) pass of \d+ tokens failed: "
    rf"nextn plugin \w+: (?P<layer>[\w+/.]+): launch failed: {_STATUS}; start it again, .*"
    r"|token choice could not be started: too many resources requested for launch \(CUDA error 701\)"
)

# A kernel is made to read where nothing is: from a slot of the state far outside the pool.
LOST = """
import sys
from pathlib import Path
from engines.command import run_command
from engines.errors import DeviceLostError
from engines.manifest import load_manifest
from runtime import generate
from runtime.engine_tensorrt import open_engines
from runtime.tensorrt_trunk import GREEDY, TensorrtTrunk
folder, how = Path(sys.argv[1]), sys.argv[2]
far = 1 << 28
if how == "command":
    real = TensorrtTrunk.start
    def start(self, sampler):
        real(self, sampler)
        self._slot = far
    TensorrtTrunk.warm_up = lambda self: None
    TensorrtTrunk.start = start
    run_command(lambda: generate.main([str(folder), "--prompt-ids", "1,2,3", "-n", "8"]))
trunk, _ = open_engines(folder, load_manifest(folder), context_size=64)
trunk.start(GREEDY)
trunk.prefill([1, 2, 3])
trunk._slot = far
said = []
for _ in range(3):
    try:
        trunk.verify([1])
    except DeviceLostError as error:
        said.append(str(error))
try:  # TensorRT's own call, which knows no more than that something failed
    trunk._session.enqueue("decode", 1, 1, {})
except DeviceLostError as error:
    said.append(str(error))
assert len(said) == 4 and len(set(said)) == 1, said
print("error: " + said[0])
from engines.command import end_now
end_now(0)
"""

# The device fails while nobody looks; a call that comes later, TensorRT's or a plugin's, meets it.
UNSEEN = """
import sys, time
from pathlib import Path
from engines.command import end_now
from engines.errors import DeviceLostError
from engines.manifest import load_manifest
from runtime.engine_tensorrt import open_engines
from runtime.tensorrt_trunk import GREEDY
folder = Path(sys.argv[1])
trunk, _ = open_engines(folder, load_manifest(folder), context_size=64)
trunk.start(GREEDY)
trunk.prefill([1, 2, 3])
trunk._slot = 1 << 28
trunk.prepare_verify([1])
trunk._shared.control.send()
trunk.enqueue_verify(trunk._rows_of(1))
time.sleep(1)
try:
    trunk._session.enqueue("decode", 1, 1, {})
except DeviceLostError as error:
    print("error: " + str(error))
end_now(0)
"""

SLOWED = """
import importlib, sys, time
owner = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])
real = getattr(owner, sys.argv[3])
count = 0
def slowed(*given, **named):
    global count
    count += 1
    if count == int(sys.argv[4]):
        print("reached", flush=True)
        time.sleep(60)
    return real(*given, **named)
setattr(owner, sys.argv[3], slowed)
from engines.command import run_command
from runtime.generate import main
run_command(lambda: main([sys.argv[5], "--prompt-ids", "1,2,3", "-n", "40", "--spec-type", "draft-mtp"]))
"""


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)


def test_a_lost_device_is_said_once_and_for_all(prepared: Path) -> None:
    done = run(LOST, prepared / "trained", "calls")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(SAYS) and "start it again" in done.stdout, done.stdout


def test_a_command_line_ends_with_a_lost_device(prepared: Path) -> None:
    """Exit code 4 and a line, though everything that is cleared up meets the same fault."""
    done = run(LOST, prepared / "trained", "command")
    assert (done.returncode, done.stdout) == (4, ""), done
    assert done.stderr.startswith(SAYS) and done.stderr.count("\n") == 1, done.stderr


def test_a_device_that_fails_unseen(prepared: Path) -> None:
    done = run(UNSEEN, prepared / "trained")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(SAYS) and "start it again" in done.stdout, done.stdout


@pytest.fixture(scope="module")
def failing_launches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Preloaded, it makes a launch of choice fail."""
    library = tmp_path_factory.mktemp("preloaded") / "failing_launches.so"
    source = Path(__file__).with_name("failing_launches.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.mark.parametrize("name", ["trained", "q4_k_m.ops", WIDE])
def test_any_launch_that_fails(prepared: Path, failing_launches: Path, name: str) -> None:
    """One of the launches of a text's passes, queued or recorded: op and layer are named, and the same sequence then
    gives the text whole."""
    command = [sys.executable, "-m", "tests.gpu.launch_errors", str(prepared / name), str(FAILING)]
    preloaded = {**os.environ, "LD_PRELOAD": str(failing_launches)}
    done = subprocess.run(command, cwd=ROOT, env=preloaded, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    said = [json.loads(line)["said"] for line in done.stdout.splitlines()[1:]]
    found = [FAILED.fullmatch(each) for each in said]
    assert len(said) == FAILING and all(found), [each for each, match in zip(said, found, strict=True) if not match]
    layers = {str(match["layer"]) for match in found if match}
    assert sum(each.startswith("blk.") for each in layers) > 3, layers
    assert {match["role"] for match in found if match} == {"trunk", "draft", None}


# Functions themselves, not their names: a build that lacks one is noticed without a GPU.
PLACES: tuple[tuple[Callable[..., object], int], ...] = (
    (TensorrtTrunk.prefill, 2),  # the first one warms up
    (TensorrtTrunk.commit, 1),
    (TensorrtDraft.begin_round, 2),
    (TensorrtDraft._whole_round, 1),  # while it is being recorded
)


@pytest.mark.parametrize(("function", "count"), PLACES, ids=lambda each: getattr(each, "__name__", str(each)))
def test_sigterm(prepared: Path, function: Callable[..., object], count: int) -> None:
    where = (function.__module__, *function.__qualname__.split("."), count)
    process = subprocess.Popen(
        [sys.executable, "-c", SLOWED, *map(str, where), str(prepared / "trained")],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    with process.stdout, process.stderr:
        reached = process.stdout.readline()
        process.send_signal(signal.SIGTERM if reached.endswith("reached\n") else signal.SIGKILL)
        said = process.stderr.read()
        assert process.wait(WAIT_S) == 143, said
    assert "Traceback" not in said and "terminate called" not in said, said
