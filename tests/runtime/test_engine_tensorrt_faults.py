"""Faults of the GPU, on stand-ins: one clear error, no use of a device that is lost, and interruptions anywhere."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.errors import DeviceLostError, EngineError
from engines.signals import Terminated
from runtime import tensorrt_session
from runtime.controller import FixedDraft
from runtime.engine_tensorrt import open_engines
from runtime.sampling import ParamsSampler, SamplingParams
from runtime.speculative import SpecStats, generate
from runtime.tensorrt_draft import TensorrtDraft
from runtime.tensorrt_trunk import TensorrtTrunk
from tests.runtime.command import run_main
from tests.runtime.fake_cuda import FakeCuda
from tests.runtime.fake_engines import plain_decode
from tests.runtime.fake_passes import CONTEXT, MAX_ROWS
from tests.runtime.fake_tensorrt import FakeContext, FakeGpu, install, toy_manifest, write_engines

Engines = tuple[TensorrtTrunk, TensorrtDraft]
PROMPT = [5, 3, 8, 1, 9, 2, 7, 7, 4, 0, 11, 6, 2, 2, 12]
GREEDY = ParamsSampler(SamplingParams())
ILLEGAL_ADDRESS, ASSERT, NOT_LASTING = 700, 710, 1


def text_of(engines: Engines, n: int = 2) -> list[int]:
    return list(
        generate(
            *engines,
            PROMPT,
            sampler=GREEDY,
            controller=FixedDraft(n),
            max_tokens=-1,
            end_token_ids=(),
            context_size=CONTEXT,
            stats=SpecStats(),
        )
    )


def test_a_failing_call_names_itself(engines: Engines, gpu: FakeGpu) -> None:
    """And is over when it is over: the next text is whole."""
    gpu.cuda.errors["cudaStreamSynchronize"] = NOT_LASTING
    with pytest.raises(EngineError, match=r"cudaStreamSynchronize failed: fault 1 \(CUDA error 1\)") as caught:
        text_of(engines)
    assert not isinstance(caught.value, DeviceLostError)
    gpu.cuda.errors.clear()
    assert text_of(engines) == plain_decode(PROMPT, GREEDY, -1, (), CONTEXT)[0]


@pytest.mark.parametrize("status", [ILLEGAL_ADDRESS, ASSERT, 719])
@pytest.mark.parametrize("where", ["cudaStreamSynchronize", "cudaGraphLaunch", "cudaMemcpyAsync"])
def test_a_lost_device_is_used_no_more(engines: Engines, gpu: FakeGpu, where: str, status: int) -> None:
    gpu.cuda.errors[where] = status
    says = rf"the GPU failed at {where}: fault {status} \(CUDA error {status}\); this process can use it no more: start"
    with pytest.raises(DeviceLostError, match=says):
        text_of(engines)
    gpu.cuda.errors.clear()
    before = dict(gpu.cuda.calls)
    for _ in range(2):
        with pytest.raises(DeviceLostError, match=says):
            text_of(engines)
    assert gpu.cuda.calls == before, "not one call more"


def test_errors_that_come_of_a_lost_device(engines: Engines, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass and a launch of our own report something else, or only a number: what is said is that the GPU is lost."""
    gpu.kernels.status = ILLEGAL_ADDRESS
    with pytest.raises(DeviceLostError, match="token choice"):
        text_of(engines)


def test_a_pass_on_a_lost_device(engines: Engines, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeContext, "execute_async_v3", lambda self, stream: False)
    with pytest.raises(EngineError, match=r"a prefill pass of 9 tokens failed: .* no reason given"):
        text_of(engines)
    gpu.cuda.errors["cudaMemGetInfo"] = ILLEGAL_ADDRESS
    with pytest.raises(DeviceLostError, match="the GPU failed at the pass"):
        text_of(engines)


def test_a_launch_of_a_plugin(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own line, which knows op and layer, and not to build anew."""
    line = "nextn plugin GatedDeltaNetLayer: blk.3/layer: launch failed: CUDA error 701 (too many resources)"

    def fails(self: FakeContext, stream: int) -> bool:
        tensorrt_session.logger().log(line)
        tensorrt_session.logger().log("Assertion failed. In execute at pluginV3Runner.cpp")
        return False

    monkeypatch.setattr(FakeContext, "execute_async_v3", fails)
    with pytest.raises(EngineError) as caught:
        text_of(engines)
    assert f"trunk.engine: a prefill pass of 9 tokens failed: {line}; start it again" in str(caught.value)


def test_the_command_line_ends(engines: Engines, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.command.end_now", sys.exit)  # not this process
    gpu.cuda.errors["cudaStreamSynchronize"] = ILLEGAL_ADDRESS
    outcome = run_main(lambda arguments: len(text_of(engines)))
    outcome.refused(EngineError.exit_code, "the GPU failed", "start it again")


class Interrupting(FakeCuda):
    """Raises ``error`` at the call of number ``at``, before or after it is made."""

    at, after, made = -1, False, 0
    error: type[BaseException] = KeyboardInterrupt

    def __getattr__(self, name: str) -> Any:
        call = super().__getattr__(name)
        if "Free" in name or "Destroy" in name:  # made when objects are collected, where Python lets nothing out
            return call

        def counted(*arguments: Any) -> Any:
            self.made += 1
            interrupted = self.made == self.at
            if interrupted and not self.after:
                raise self.error
            result = call(*arguments)
            if interrupted:
                raise self.error
            return result

        return counted


@pytest.mark.parametrize(("after", "error"), [(False, KeyboardInterrupt), (True, Terminated)])
def test_interrupted_at_every_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, after: bool, error: type[BaseException]
) -> None:
    """In a prefill, a draft, a round, its recording: the same engines then give the next text whole."""
    gpu, want = install(monkeypatch), plain_decode(PROMPT, GREEDY, -1, (), CONTEXT)[0]
    fake = Interrupting()
    fake.after, fake.error = after, error
    monkeypatch.setattr("runtime.cuda._api", lambda: fake)
    gpu.module.fake = gpu.kernels.fake = fake
    write_engines(tmp_path, toy_manifest())

    def opened() -> Engines:
        trunk, draft = open_engines(tmp_path, toy_manifest(), context_size=CONTEXT, max_rows=MAX_ROWS)
        assert draft is not None
        return trunk, draft

    engines = opened()
    fake.made = 0
    assert text_of(engines) == want
    calls = fake.made
    assert calls > 60
    for at in range(1, calls, 9):
        engines = opened()  # so that rounds are recorded anew
        fake.made, fake.at = 0, at
        with pytest.raises(error):
            text_of(engines)
        fake.at = -1
        assert text_of(engines) == want, f"after an interruption at call {at}"
    del engines
    gc.collect()
    assert len(fake.allocated) <= after, "one call's memory was not anybody's yet"


def test_interrupted_while_it_is_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Memory goes back, wherever opening ends."""
    gpu, fake = install(monkeypatch), Interrupting()
    monkeypatch.setattr("runtime.cuda._api", lambda: fake)
    gpu.module.fake = gpu.kernels.fake = fake
    write_engines(tmp_path, toy_manifest())
    open_all: Callable[[], object] = lambda: open_engines(  # noqa: E731
        tmp_path, toy_manifest(), context_size=CONTEXT, max_rows=MAX_ROWS
    )
    open_all()
    calls, fake.after = fake.made, False
    assert not fake.allocated
    for at in range(1, calls, 19):
        fake.made, fake.at = 0, at
        with pytest.raises(KeyboardInterrupt):
            open_all()
        gc.collect()
        assert not fake.allocated, f"after an interruption at call {at}"
