"""`runtime.profile` where a call of TensorRT fails, on stand-ins: the engine's fault, or the GPU's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engines.errors import EngineError
from runtime.profile import main
from runtime.profiling import passes
from tests.runtime.command import run_main
from tests.runtime.fake_tensorrt import FakeContext, FakeGpu, FakeLog, toy_manifest, write_engines

ILLEGAL_ADDRESS = 700
CALLS = {
    "set_optimization_profile_async": "profile decode cannot be chosen",
    "set_tensor_address": "takes no memory for shared.weight",
    "set_input_shape": r"takes no tokens of shape [1]",
    "execute_async_v3": "a pass of 1 tokens failed",
    "report_to_profiler": "no times of layers",
}


@pytest.fixture(autouse=True)
def stood_in(gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = FakeLog()
    monkeypatch.setattr(passes, "messages", lambda: log)
    monkeypatch.setattr(passes, "find_library", lambda: Path("/library/libnextn_plugins.so"))
    monkeypatch.setattr(passes, "load_plugins", lambda library: library)
    monkeypatch.setattr(passes, "_profiler", object)
    monkeypatch.setattr(FakeContext, "execute_async_v3", lambda self, stream: True)  # on a state that is no text's
    monkeypatch.setattr(FakeContext, "report_to_profiler", lambda self: True, raising=False)
    monkeypatch.setattr("engines.command.end_now", sys.exit)  # not this process
    toy_manifest().save(tmp_path)
    write_engines(tmp_path, toy_manifest())


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("lost", [False, True], ids=["engine", "gpu"])
def test_a_failing_call(gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, lost: bool) -> None:
    def fails(self: FakeContext, *_: object) -> bool:
        if lost:
            gpu.cuda.errors["cudaMemGetInfo"] = ILLEGAL_ADDRESS
        return False

    monkeypatch.setattr(FakeContext, call, fails)
    outcome = run_main(main, tmp_path, "--rows", 1, "--repeats", 2, "--bandwidth", 100)
    if lost:
        outcome.refused(EngineError.exit_code, "the GPU failed at the pass", "start it again")
    else:
        outcome.refused(EngineError.exit_code, f"trunk.engine: {CALLS[call]}", "run `python -m engines.build` again")
