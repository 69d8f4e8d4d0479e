"""The TensorRT backend without a GPU: its orchestration on stand-ins that check every pass, and its messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engines.errors import EngineError
from engines.manifest import Manifest
from runtime.controller import FixedDraft, Round
from runtime.engine import Sampler
from runtime.engine_tensorrt import open_engines
from runtime.pass_costs import measure_pass_costs
from runtime.sampling import ParamsSampler, SamplingParams
from runtime.speculative import SpecStats, generate
from runtime.tensorrt_draft import TensorrtDraft
from runtime.tensorrt_trunk import TensorrtTrunk
from tests.runtime import fake_tensorrt
from tests.runtime.fake_engines import START_STATE, VOCAB, ToyHead, ToyTrunk, logits_of, next_state, plain_decode
from tests.runtime.fake_passes import CHUNK, CONTEXT, MAX_ROWS, twisted
from tests.runtime.fake_tensorrt import ALL_TOKENS, FakeGpu, FakeModule, toy_manifest, write_engines

PROMPT = [5, 3, 8, 1, 9, 2, 7, 7, 4, 0, 11, 6, 2, 2, 12, 3, 1, 10, 5, 5, 4]
GREEDY = ParamsSampler(SamplingParams())
SAMPLERS: dict[str, Sampler] = {
    "greedy": GREEDY,
    "temperature": ParamsSampler(SamplingParams(2.0, seed=77)),
    "min-p": ParamsSampler(SamplingParams(2.0, min_p=0.2, seed=78)),
    "top-k": ParamsSampler(SamplingParams(2.0, top_k=4, seed=79)),
    "all filters": ParamsSampler(SamplingParams(2.0, top_k=8, top_p=0.9, min_p=0.05, seed=80)),
    "unknown to the device": lambda logits, positions: logits.argmin(axis=1),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_engines(tmp_path, toy_manifest())
    return tmp_path


Engines = tuple[TensorrtTrunk, TensorrtDraft]


class ToyTwistedHead(ToyHead):
    """The toy head that is wrong where the stand-in's is, and cannot name tokens outside ``ids``."""

    ids = ALL_TOKENS

    def draft(self, tokens, hidden, n):  # type: ignore[no-untyped-def]
        self._take(tokens, hidden)
        token, state = self.rows[-1]
        drafts: list[int] = []
        for position in range(len(self.rows), len(self.rows) + n):
            state = next_state(state or START_STATE, token)
            logits = np.full((1, VOCAB), -np.inf, np.float32)
            logits[:, self.ids] = twisted(state)[self.ids]
            token = int(self._sampler(logits, np.array([position]))[0])
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


FEW_TOKENS = np.array([0, 2, 3, 5, 7, 8, 11], np.int32)


def cut_head(gpu: FakeGpu, folder: Path) -> Manifest:
    """Engines in ``folder`` whose draft head knows FEW_TOKENS alone; the export's manifest."""
    path = folder / "draft_ids.bin"
    path.write_bytes(FEW_TOKENS.tobytes())
    manifest = replace(toy_manifest(), files={"draft_ids": (path.name, FEW_TOKENS.nbytes)})
    gpu.module.draft_ids = FEW_TOKENS
    write_engines(folder, manifest, FEW_TOKENS)
    return manifest


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("n", [1, 3, 5])
def test_a_head_that_knows_few_tokens(gpu: FakeGpu, tmp_path: Path, name: str, n: int) -> None:
    """Drafts by true ids, noise included: accepted counts are those of the toy head that masks the other tokens."""
    engines = open_engines(tmp_path, cut_head(gpu, tmp_path), context_size=CONTEXT, max_rows=MAX_ROWS)
    text, stats = run(*engines, SAMPLERS[name], n)
    assert text == plain_decode(PROMPT, SAMPLERS[name], -1, (), CONTEXT)[0]
    head = ToyTwistedHead(prefill_chunk=CHUNK)
    head.ids = FEW_TOKENS
    _, wanted = run(ToyTrunk(CONTEXT, prefill_chunk=CHUNK), head, SAMPLERS[name], n)
    assert (stats.draft_n, stats.draft_n_accepted) == (wanted.draft_n, wanted.draft_n_accepted)
    if name != "unknown to the device":  # its least logit is one of the masked
        assert 0 < stats.draft_n_accepted < stats.draft_n
    draft = engines[1]
    assert draft is not None and draft.logits.shape == (1, VOCAB)
    assert (np.isfinite(draft.logits[0]) == np.isin(ALL_TOKENS, FEW_TOKENS)).all()


def test_engines_of_another_draft_head(gpu: FakeGpu, folder: Path) -> None:
    manifest = cut_head(gpu, folder)
    write_engines(folder, toy_manifest())
    with pytest.raises(EngineError, match=r"logits of 13 tokens, the export's draft head knows 7; .*engines.build"):
        open_engines(folder, manifest, context_size=CONTEXT, max_rows=MAX_ROWS)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_rows_of_the_last_round_ride_along_with_the_first_draft(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    """Catching up is no pass of its own: a round of n drafts is n draft passes, the first over the tokens that the
    round before yielded, and one verify pass."""
    passes: list[tuple[str, int]] = []

    def recorded(role: str, compute: Callable[..., None]) -> Callable[..., None]:
        def run_pass(at: dict[str, int], count: int, *rest: object) -> None:
            passes.append((role, count))
            compute(at, count, *rest)

        return run_pass

    monkeypatch.setattr(fake_tensorrt, "trunk_pass", recorded("trunk", fake_tensorrt.trunk_pass))
    monkeypatch.setattr(fake_tensorrt, "draft_pass", recorded("draft", fake_tensorrt.draft_pass))
    rounds = Watched(n)
    run(*engines, GREEDY, n, controller=rounds, prompt=PROMPT[:CHUNK])
    want, waiting = [("trunk", CHUNK), ("draft", CHUNK)], 1  # the row of the token after the prompt waits, too
    for done in rounds.seen:
        if done.draft_n:
            want += [("draft", waiting), *[("draft", 1)] * (done.draft_n - 1)]
            waiting = 0
        want.append(("trunk", done.draft_n + 1))
        waiting += done.n_accept + 1
    assert passes == want


class Watched(FixedDraft):
    """Remembers its rounds."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.seen: list[Round] = []

    def observe(self, done: Round) -> None:
        self.seen.append(done)


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


def test_settings_are_read_from_memory(engines: Engines, gpu: FakeGpu) -> None:
    """What was recorded with one sampler serves every other that the device can stand in for."""
    for name, sampler in SAMPLERS.items():
        run(*engines, sampler, 3)
        captures = gpu.cuda.calls["cudaStreamBeginCapture"]
        if name == "greedy":
            recorded = captures
    assert "unknown" in name and captures > recorded  # of verify passes alone
    for name, sampler in list(SAMPLERS.items())[:-1]:
        run(*engines, sampler, 3)
        assert gpu.cuda.calls["cudaStreamBeginCapture"] == captures, name


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


def test_rows_put_aside_outlive_the_next_passes(engines: Engines) -> None:
    trunk, draft = engines
    trunk.start(GREEDY)
    kept, wanted = None, []
    for i in range(CHUNK):
        hidden = trunk.verify([PROMPT[i]]).hidden
        wanted.append(hidden.read(trunk._shared.stream))
        kept = draft.put_aside(kept, hidden)
        trunk.commit(1)
    again = draft.put_aside(None, draft.zero_hidden())
    assert np.array_equal(kept.read(trunk._shared.stream), np.concatenate(wanted))
    assert not again.read(trunk._shared.stream).any()


def test_a_round_without_drafts_costs_the_head_one_copy(engines: Engines, gpu: FakeGpu) -> None:
    run(*engines, GREEDY, 0)
    copies, rounds = [], []
    for n_tokens in (2, 2 + CHUNK // 2):
        before = gpu.cuda.calls["cudaMemcpyAsync"]
        _, stats = run(*engines, GREEDY, 0, max_tokens=n_tokens)
        copies.append(gpu.cuda.calls["cudaMemcpyAsync"] - before)
        rounds.append(stats.verify_steps)
    assert copies[1] - copies[0] == rounds[1] - rounds[0]


def test_passes_timed_beforehand(engines: Engines) -> None:
    """Every size, and nothing stays behind."""
    trunk, draft = engines
    trunk.start(SAMPLERS["temperature"])
    trunk.prefill(PROMPT[:5])
    costs = measure_pass_costs(trunk, draft, MAX_ROWS - 1)
    assert costs is not None
    assert len(costs.verify_ms) == len(costs.draft_ms) == MAX_ROWS
    assert min(costs.verify_ms) > 0 and costs.draft_ms[0] == 0 and min(costs.draft_ms[1:]) > 0
    assert trunk.position == draft.position == 0
    assert len(trunk.time_verify(2, 5)) == len(draft.time_draft(2, 5)) == 5
    assert run(*engines, GREEDY, 2)[0] == plain_decode(PROMPT, GREEDY, -1, (), CONTEXT)[0]


def test_engines_that_cannot_be_timed_have_no_costs_beforehand() -> None:
    assert measure_pass_costs(ToyTrunk(), ToyHead(), 3) is None


def test_without_a_draft_engine(gpu: FakeGpu, folder: Path) -> None:
    trunk, draft = open_engines(folder, toy_manifest(), context_size=CONTEXT, max_rows=1, draft=False)
    assert draft is None and trunk.max_rows == 1
    assert run(trunk, None, GREEDY, 0)[0] == plain_decode(PROMPT, GREEDY, -1, (), CONTEXT)[0]


def test_on_full_tensorrt(gpu: FakeGpu, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which compiles no kernels at run time, and so has no configuration for that."""
    monkeypatch.delattr(FakeModule, "DynamicShapesKernelSpecializationStrategy")
    engines = open_engines(folder, toy_manifest(), context_size=CONTEXT, max_rows=MAX_ROWS)
    assert run(*engines, GREEDY, 2)[0] == plain_decode(PROMPT, GREEDY, -1, (), CONTEXT)[0]


def test_memory_goes_back(gpu: FakeGpu, folder: Path) -> None:
    engines = open_engines(folder, toy_manifest(), context_size=CONTEXT, max_rows=MAX_ROWS)
    run(*engines, GREEDY, 2)
    del engines
    assert not gpu.cuda.allocated
