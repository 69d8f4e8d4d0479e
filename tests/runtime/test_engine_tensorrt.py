"""The TensorRT backend without a GPU: its orchestration on stand-ins that check every pass, and its messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engines.engine_manifest import ENGINES_NAME
from engines.errors import EngineError, NextnError, NumericError, ResourceError, UsageError
from runtime import cuda
from runtime.controller import FixedDraft
from runtime.engine import Sampler
from runtime.engine_tensorrt import open_engines
from runtime.sampling import ParamsSampler, SamplingParams
from runtime.speculative import SpecStats, generate
from runtime.tensorrt_draft import TensorrtDraft
from runtime.tensorrt_trunk import TensorrtTrunk
from tests.runtime.fake_cuda import FakeCuda
from tests.runtime.fake_engines import START_STATE, ToyHead, ToyTrunk, logits_of, next_state, plain_decode
from tests.runtime.fake_tensorrt import CHUNK, CONTEXT, MAX_ROWS, FakeGpu, install, toy_manifest, twisted, write_engines

PROMPT = [5, 3, 8, 1, 9, 2, 7, 7, 4, 0, 11, 6, 2, 2, 12, 3, 1, 10, 5, 5, 4]
GREEDY = ParamsSampler(SamplingParams())
SAMPLERS: dict[str, Sampler] = {
    "greedy": GREEDY,
    "temperature": ParamsSampler(SamplingParams(2.0, seed=77)),
    "min-p": ParamsSampler(SamplingParams(2.0, min_p=0.2, seed=78)),
    "top-k, on the host": ParamsSampler(SamplingParams(2.0, top_k=4, seed=79)),
    "unknown to the device": lambda logits, positions: logits.argmin(axis=1),
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return install(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_engines(tmp_path, toy_manifest())
    return tmp_path


Engines = tuple[TensorrtTrunk, TensorrtDraft]


@pytest.fixture
def engines(gpu: FakeGpu, folder: Path) -> Engines:
    trunk, draft = open_engines(folder, toy_manifest(), context_size=CONTEXT, max_rows=MAX_ROWS)
    assert draft is not None
    return trunk, draft


class ToyTwistedHead(ToyHead):
    """The toy head that is wrong where the stand-in's is."""

    def draft(self, tokens, hidden, n):  # type: ignore[no-untyped-def]
        self._take(tokens, hidden)
        token, state = self.rows[-1]
        drafts: list[int] = []
        for position in range(len(self.rows), len(self.rows) + n):
            state = next_state(state or START_STATE, token)
            token = int(self._sampler(twisted(state)[None], np.array([position]))[0])
            drafts.append(token)
        return np.array(drafts)


def run(trunk, draft, sampler: Sampler, n: int, **kwargs) -> tuple[list[int], SpecStats]:  # type: ignore[no-untyped-def]
    stats = SpecStats()
    given = {"max_tokens": -1, "end_token_ids": (), "prompt": PROMPT, "controller": FixedDraft(n), **kwargs}
    prompt = given.pop("prompt")
    text = list(generate(trunk, draft, prompt, sampler=sampler, context_size=CONTEXT, stats=stats, **given))
    return text, stats


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("n", range(MAX_ROWS))
def test_text_and_counts_are_the_toy_loops(engines: Engines, name: str, n: int) -> None:
    """Text as the toy's definition has it, and accepted counts as the same head has them in host memory."""
    text, stats = run(*engines, SAMPLERS[name], n)
    assert (text, stats.finish_reason) == plain_decode(PROMPT, SAMPLERS[name], -1, (), CONTEXT)
    same, wanted = run(ToyTrunk(CONTEXT, prefill_chunk=CHUNK), ToyTwistedHead(prefill_chunk=CHUNK), SAMPLERS[name], n)
    assert same == text
    assert (stats.draft_n, stats.draft_n_accepted) == (wanted.draft_n, wanted.draft_n_accepted)
    assert n == 0 or 0 < stats.draft_n_accepted < stats.draft_n


class Pattern(FixedDraft):
    """Drafts by turns, so that rows pile up, ride along, and are fed in chunks."""

    def __init__(self, pattern: list[int]) -> None:
        self._pattern, self._round = pattern, 0

    def draft_n(self, limit: int) -> int:
        self._round += 1
        return min(limit, self._pattern[self._round % len(self._pattern)])


@pytest.mark.parametrize("pattern", [[0, 3], [0, 0, 0, 0, 0, 0, 0, 0, 5], [5, 1, 2, 0, 0, 4], [1], [0] * 14 + [2]])
@pytest.mark.parametrize("prompt_n", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 21])
def test_any_order_of_draft_numbers(engines: Engines, pattern: list[int], prompt_n: int) -> None:
    prompt = PROMPT[:prompt_n]
    text, _ = run(*engines, GREEDY, 0, controller=Pattern(pattern), prompt=prompt)
    assert text == plain_decode(prompt, GREEDY, -1, (), CONTEXT)[0]


def test_one_copy_to_the_host_and_one_launch_a_round(engines: Engines, gpu: FakeGpu) -> None:
    _, stats = run(*engines, GREEDY, 3)
    copies, launches, captures = (
        gpu.cuda.copies_to_host,
        gpu.cuda.calls["cudaGraphLaunch"],
        gpu.cuda.calls["cudaStreamBeginCapture"],
    )
    _, more = run(*engines, GREEDY, 3)
    prefills = -(-len(PROMPT) // CHUNK)
    assert gpu.cuda.copies_to_host - copies == prefills  # recorded copies are not queued again
    assert gpu.cuda.calls["cudaGraphLaunch"] - launches == more.verify_steps == stats.verify_steps
    assert gpu.cuda.calls["cudaStreamBeginCapture"] == captures


def test_a_second_sequence_forgets_the_first(engines: Engines) -> None:
    run(*engines, SAMPLERS["temperature"], 4, max_tokens=9)
    assert run(*engines, GREEDY, 2)[0] == plain_decode(PROMPT, GREEDY, -1, (), CONTEXT)[0]


@pytest.mark.parametrize("keep", range(1, MAX_ROWS + 1))
def test_rollback_leaves_the_state_of_the_tokens_kept(engines: Engines, keep: int) -> None:
    trunk, _ = engines
    state = START_STATE
    trunk.start(GREEDY)
    trunk.prefill(PROMPT[:7])
    trunk.verify(PROMPT[7 : 7 + MAX_ROWS])
    trunk.commit(keep)
    for token in PROMPT[: 7 + keep]:
        state = next_state(state, token)
    copies = trunk.state()
    assert copies["blk.0.state"].ravel()[:2].view(np.int64)[0] == state
    assert copies["blk.1.key_cache"][0, 0, :, 0].tolist() == PROMPT[: 7 + keep]
    trunk.verify([3])
    assert np.array_equal(trunk.logits, logits_of(next_state(state, 3)))


def test_joined_rows_outlive_the_next_pass(engines: Engines) -> None:
    trunk, draft = engines
    trunk.start(GREEDY)
    hidden = draft.join([draft.zero_hidden(), trunk.verify(PROMPT[:3]).hidden])
    before = hidden.read(trunk._shared.stream)
    trunk.commit(1)
    trunk.verify(PROMPT[1:4])
    assert np.array_equal(hidden.read(trunk._shared.stream), before)


def test_without_a_draft_engine(gpu: FakeGpu, folder: Path) -> None:
    trunk, draft = open_engines(folder, toy_manifest(), context_size=CONTEXT, max_rows=1, draft=False)
    assert draft is None and trunk.max_rows == 1
    assert run(trunk, None, GREEDY, 0)[0] == plain_decode(PROMPT, GREEDY, -1, (), CONTEXT)[0]


def test_memory_goes_back(gpu: FakeGpu, folder: Path) -> None:
    engines = open_engines(folder, toy_manifest(), context_size=CONTEXT, max_rows=MAX_ROWS)
    run(*engines, GREEDY, 2)
    del engines
    assert not gpu.cuda.allocated


def refused(folder: Path, kind: type[NextnError], *words: str, **sizes: int) -> str:
    """The one-line message of opening ``folder``."""
    given = {"context_size": CONTEXT, "max_rows": MAX_ROWS, **sizes}
    with pytest.raises(kind) as caught:
        open_engines(folder, toy_manifest(), **given)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    return message


class DynamicLibNotFoundError(RuntimeError):
    """Named as the one that the CUDA bindings raise."""


def test_no_driver(gpu: FakeGpu, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.cuda.errors["cudaGetDeviceCount"] = 35
    refused(folder, EngineError, "no NVIDIA driver", "onnxruntime")

    def missing(self: FakeCuda) -> int:
        raise DynamicLibNotFoundError("libcuda.so.1")

    gpu.cuda.errors.clear()
    monkeypatch.setattr(FakeCuda, "_cudaGetDeviceCount", missing)
    refused(folder, EngineError, "no NVIDIA driver", "onnxruntime")


def test_no_cuda_package(gpu: FakeGpu, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", None)
    with pytest.raises(EngineError, match=r"pip install 'nextn-trt\[tensorrt\]'"):
        cuda.open_device()


@pytest.mark.parametrize("how", ["count", "status"])
def test_no_gpu(gpu: FakeGpu, folder: Path, how: str) -> None:
    gpu.cuda.devices = 0
    if how == "status":
        gpu.cuda.errors["cudaGetDeviceCount"] = 100
    refused(folder, EngineError, "no NVIDIA GPU", "CUDA_VISIBLE_DEVICES")


def test_gpu_that_tensorrt_does_not_support(gpu: FakeGpu, folder: Path) -> None:
    gpu.module.reason = "Current device has compute capability 9.0 which is not supported"
    refused(folder, EngineError, "Fake GPU, compute capability 9.0", "tensorrt_rtx 1.6.1.120 does not support this GPU")


def test_gpu_that_the_plugins_were_not_compiled_for(gpu: FakeGpu, folder: Path) -> None:
    gpu.cuda.capability, gpu.kernels.status = (12, 1), 209
    refused(folder, EngineError, "libnextn_kernels.so", "12.1", "-DNEXTN_ARCHITECTURES=121-real")


def test_engine_that_does_not_load(gpu: FakeGpu, folder: Path) -> None:
    gpu.module.reason = "Serialization assertion failed"
    refused(folder, EngineError, "trunk.engine", "Serialization assertion failed", "engines.build")


@pytest.mark.parametrize("damage", ["content", "size", "missing"])
def test_damaged_engine(gpu: FakeGpu, folder: Path, damage: str) -> None:
    path = folder / "draft.engine"
    path.unlink() if damage == "missing" else path.write_bytes(b"dra" if damage == "size" else b"drafT")
    refused(folder, EngineError, "draft.engine", "engines.build")


def test_no_engines(gpu: FakeGpu, folder: Path) -> None:
    (folder / ENGINES_NAME).unlink()
    refused(folder, EngineError, ENGINES_NAME, "engines.build")


def test_engines_of_another_model(gpu: FakeGpu, folder: Path) -> None:
    write_engines(folder, replace(toy_manifest(), content_key="another"))
    refused(folder, EngineError, "another model", "engines.build")


def test_engines_of_another_version(gpu: FakeGpu, folder: Path) -> None:
    gpu.version = "1.7.1.116"
    refused(folder, EngineError, "tensorrt_rtx 1.6.1.120", "tensorrt_rtx 1.7.1.116", "engines.build")


def test_engines_of_another_plugin_library(gpu: FakeGpu, folder: Path) -> None:
    gpu.digest = "new"
    refused(folder, EngineError, "libnextn_plugins.so", "engines.build")


def test_plugin_library_missing(gpu: FakeGpu, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("plugins.load.LIBRARY_PLACES", (folder / "libnextn_plugins.so",))
    monkeypatch.setattr("runtime.engine_tensorrt.tensorrt", lambda: _trt())
    refused(folder, EngineError, "libnextn_plugins.so", "cmake")


def _trt() -> object:
    from plugins.load import TensorRT

    return TensorRT(None, "tensorrt_rtx", "1.6.1.120")


def test_too_little_memory_is_said_before_any_is_taken(gpu: FakeGpu, folder: Path) -> None:
    gpu.cuda.free = 1 << 20
    message = refused(folder, ResourceError, "weights", "KV caches", "recurrent states", "activations", "--context")
    assert "1.0 MB of 17.18 GB are free" in message
    assert sum(gpu.cuda.allocated.values()) < 4096


def test_memory_runs_out_all_the_same(gpu: FakeGpu, folder: Path) -> None:
    gpu.cuda.errors["cudaHostAlloc"] = 2
    refused(folder, ResourceError, "out of GPU memory")


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"context_size": CONTEXT + 1}, (f"--ctx-size {CONTEXT + 1}", f"{CONTEXT} tokens", "--context")),
        ({"max_rows": MAX_ROWS + 1}, (f"--spec-draft-n-max {MAX_ROWS}", f"{MAX_ROWS - 1} drafts", "--max-draft")),
    ],
)
def test_more_than_the_engines_take(gpu: FakeGpu, folder: Path, sizes: dict[str, int], words: tuple[str, ...]) -> None:
    refused(folder, UsageError, *words, **sizes)


def test_weights_file_too_short(gpu: FakeGpu, folder: Path) -> None:
    (folder / "model.gguf").write_bytes(b"short")
    refused(folder, EngineError, "model.gguf", "5 bytes", "204")
    (folder / "model.gguf").unlink()
    refused(folder, EngineError, "model.gguf", "No such file")


def test_shapes_outside_the_profile(engines: Engines) -> None:
    trunk, _ = engines
    with pytest.raises(
        EngineError, match="7 tokens with 1 rows of logits is outside profile decode, which takes 1 to 6 tokens"
    ):
        trunk._session.enqueue("decode", MAX_ROWS + 1, 1, {})


@pytest.mark.parametrize("fault", ["trunk", "draft"])
def test_logits_that_are_none(engines: Engines, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Named with the place they would have chosen a token for; the device only says that there are some."""
    name = {"trunk": "logits_of", "draft": "twisted"}[fault]
    poisoned: Callable[[int], np.ndarray] = lambda state: np.full_like(logits_of(state), np.nan)  # noqa: E731
    monkeypatch.setattr(f"tests.runtime.fake_tensorrt.{name}", poisoned)
    with pytest.raises(NumericError, match=f"position {CHUNK if fault == 'trunk' else len(PROMPT) + 1}"):
        run(*engines, GREEDY, 2)


def test_a_failing_cuda_call_names_itself(engines: Engines, gpu: FakeGpu) -> None:
    gpu.cuda.errors["cudaStreamSynchronize"] = 700
    with pytest.raises(EngineError, match=r"cudaStreamSynchronize failed: fault 700 \(CUDA error 700\)"):
        run(*engines, GREEDY, 2)
    gpu.cuda.errors.clear()
