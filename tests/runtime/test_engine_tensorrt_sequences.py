"""Several sequences and kept prompts on the TensorRT backend, on stand-ins that check the state at every pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from engines.errors import EngineError, ResourceError, UsageError
from runtime.controller import FixedDraft
from runtime.engine import Sampler, SharedDraft, SharedTrunk
from runtime.engine_tensorrt import open_engines
from runtime.prefix_cache import PrefixCache
from runtime.sampling import ParamsSampler, SamplingParams
from runtime.speculative import Generation, SpecStats
from runtime.tensorrt_draft import TensorrtDraft
from runtime.tensorrt_trunk import TensorrtTrunk
from tests.runtime import fake_tensorrt
from tests.runtime.fake_engines import VOCAB, plain_decode
from tests.runtime.fake_passes import CHUNK, CONTEXT, MAX_ROWS
from tests.runtime.fake_tensorrt import FakeGpu, toy_manifest, write_engines

END = 12
PROMPT = [5, 3, 8, 1, 9, 2, 7, 7, 4, 0, 11, 6, 2, 2, END, 3, 1, 10, 5, 5, 4]
SAMPLERS: list[Sampler] = [
    ParamsSampler(SamplingParams()),
    ParamsSampler(SamplingParams(2.0, seed=77)),
    lambda logits, positions: logits.argmin(axis=1),
    ParamsSampler(SamplingParams(2.0, top_k=4, top_p=0.9, seed=79)),
]
Pair = tuple[TensorrtTrunk, TensorrtDraft]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_engines(tmp_path, toy_manifest())
    return tmp_path


@pytest.fixture
def first(gpu: FakeGpu, folder: Path) -> Pair:
    trunk, draft = open_engines(folder, toy_manifest(), context_size=CONTEXT, max_rows=MAX_ROWS, num_sequences=4)
    assert draft is not None and trunk.num_sequences == 4
    return trunk, draft


@pytest.fixture
def pairs(first: Pair) -> list[Pair]:
    """Four sequences."""
    trunks = [first[0], *(first[0].another() for _ in range(3))]
    return [first, *((trunk, first[1].another(trunk)) for trunk in trunks[1:])]


def generation(
    pair: Pair, prompt: Sequence[int], sampler: Sampler = SAMPLERS[0], n: int = 3, max_tokens: int = -1, **more: object
) -> Generation:
    given = {"stats": SpecStats(), "end_token_ids": (), "context_size": CONTEXT, "message_ends": (END,), **more}
    return Generation(*pair, prompt, sampler=sampler, controller=FixedDraft(n), max_tokens=max_tokens, **given)  # type: ignore[arg-type]


def text_of(steps: Generation) -> list[int]:
    return [token for tokens in blocks(steps) for token in tokens]


def blocks(steps: Generation) -> Iterator[list[int]]:
    while True:
        block = steps.step()
        yield block.tokens
        if block.finish_reason:
            return


def test_they_are_what_schedulers_and_prefix_caches_want(pairs: list[Pair]) -> None:
    for trunk, draft in pairs:
        assert isinstance(trunk, SharedTrunk) and isinstance(draft, SharedDraft)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafts", [0, 1])
@pytest.mark.parametrize("turns", [[0, 1, 2, 3], [0, 0, 1, 3, 3, 3, 2], [3, 2, 2, 1, 0, 0, 0, 0]])
def test_interleaved_texts_are_those_of_each_alone(
    pairs: list[Pair], turns: list[int], drafts: int, overlap: bool
) -> None:
    """drafts 0: none; 1: 1 to 4 of them, by sequence."""
    prompts = [PROMPT[i : 6 * i + 1 + i] for i in range(4)]
    running = {
        i: blocks(generation(pair, prompts[i], SAMPLERS[i], n=drafts * (i + 1), overlap=overlap))
        for i, pair in enumerate(pairs)
        if prompts[i]
    }
    texts: dict[int, list[int]] = {i: [] for i in running}
    while running:
        for i in turns:
            if i in running:
                tokens = next(running[i], None)
                if tokens is None:
                    del running[i]
                else:
                    texts[i] += tokens
    for i, text in texts.items():
        assert text == plain_decode(prompts[i], SAMPLERS[i], -1, (), CONTEXT)[0], i


@pytest.mark.parametrize("n", [0, 3])
def test_a_round_begun_for_nobody(pairs: list[Pair], n: int) -> None:
    """A text that is broken off leaves a round under way: neither the next text nor other sequences notice."""
    for again in (0, 1):
        broken_off = generation(pairs[0], PROMPT, n=n, overlap=True)
        while not broken_off.step().tokens:
            pass
        text = text_of(generation(pairs[again], PROMPT, SAMPLERS[1], n, overlap=True))
        assert text == plain_decode(PROMPT, SAMPLERS[1], -1, (), CONTEXT)[0]


def test_the_device_works_while_the_caller_looks(first: Pair, gpu: FakeGpu) -> None:
    """Each step but the last leaves a pass queued that nobody has waited for."""
    steps = generation(first, PROMPT, n=2, max_tokens=12, overlap=True)
    done = False
    while not done:
        before = gpu.cuda.calls.get("cudaGraphLaunch", 0)
        block = steps.step()
        done = block.finish_reason is not None
        launched = gpu.cuda.calls.get("cudaGraphLaunch", 0) - before
        assert launched == bool(block.tokens and not done)


@pytest.mark.parametrize("n", [0, 2])
def test_a_round_counts_though_the_next_cannot_begin(first: Pair, gpu: FakeGpu, n: int) -> None:
    stats = SpecStats()
    steps = generation(first, PROMPT, n=n, stats=stats, overlap=True)
    for rounds in range(3):
        while not steps.step().tokens:
            pass
        assert stats.verify_steps == rounds
    gpu.cuda.errors["cudaGraphLaunch"] = 1
    with pytest.raises(EngineError, match="cudaGraphLaunch failed"):
        steps.step()
    assert stats.verify_steps == 3 and stats.draft_n == 3 * n and stats.offered == [3] * n


def test_each_sequence_has_its_own_recorded_passes(pairs: list[Pair], gpu: FakeGpu) -> None:
    """They hold addresses. Once recorded, changing from one sequence to another records nothing and tells the engines
    nothing."""
    for pair in pairs:
        text_of(generation(pair, PROMPT))
    captures = gpu.cuda.calls["cudaStreamBeginCapture"]
    running = [blocks(generation(pair, PROMPT)) for pair in pairs]
    texts: list[list[int]] = [[] for _ in pairs]
    for _ in range(CONTEXT):
        for text, steps in zip(texts, running, strict=True):
            text += next(steps, [])
    assert texts == [plain_decode(PROMPT, SAMPLERS[0], -1, (), CONTEXT)[0]] * 4
    assert gpu.cuda.calls["cudaStreamBeginCapture"] == captures


def test_memory_of_all_goes_back(gpu: FakeGpu, folder: Path) -> None:
    trunk, draft = open_engines(folder, toy_manifest(), context_size=CONTEXT, max_rows=MAX_ROWS)
    assert draft is not None
    one = sum(gpu.cuda.allocated.values())
    more = trunk.another()
    both = sum(gpu.cuda.allocated.values())
    assert both > one
    text_of(generation((more, draft.another(more)), PROMPT))
    del more
    assert sum(gpu.cuda.allocated.values()) < both
    del trunk, draft
    assert not gpu.cuda.allocated


def test_the_plan_counts_every_sequence(gpu: FakeGpu, folder: Path) -> None:
    plans = [
        open_engines(folder, toy_manifest(), context_size=CONTEXT, max_rows=MAX_ROWS, num_sequences=n)[0].plan
        for n in (1, 3)
    ]
    assert plans[1].kv_caches == 3 * plans[0].kv_caches and plans[1].states == 3 * plans[0].states
    assert plans[1].buffers > plans[0].buffers and plans[1].weights == plans[0].weights
    assert "f16 KV caches of 3 sequences" in str(plans[1]) and "sequences" not in str(plans[0])
    trunk, _ = open_engines(folder, toy_manifest(), context_size=CONTEXT, max_rows=MAX_ROWS)
    before = sum(gpu.cuda.allocated.values())
    one_more = [trunk.another()]
    taken = sum(gpu.cuda.allocated.values()) - before
    assert one_more and plans[0].kv_caches + plans[0].states <= taken <= (plans[1].total - plans[0].total) // 2


def opened_in(folder: Path, gpu: FakeGpu, free: int, num_sequences: int) -> TensorrtTrunk:
    gpu.cuda.free = free
    sizes = {"context_size": CONTEXT, "max_rows": MAX_ROWS, "num_sequences": num_sequences}
    return open_engines(folder, toy_manifest(), **sizes)[0]  # type: ignore[arg-type]


def test_as_many_sequences_as_there_is_memory_for(gpu: FakeGpu, folder: Path) -> None:
    totals = [opened_in(folder, gpu, 1 << 30, n).plan.total for n in range(1, 7)]
    assert opened_in(folder, gpu, 1 << 30, 0).num_sequences == 4
    for n in (1, 2, 3):
        assert opened_in(folder, gpu, totals[n] - 1, 0).num_sequences == n
    assert opened_in(folder, gpu, totals[5], 6).num_sequences == 6
    with pytest.raises(ResourceError, match=r"KV caches of 6 sequences .* serve fewer --sequences than 6, "):
        opened_in(folder, gpu, totals[5] - 1, 6)
    with pytest.raises(ResourceError, match="not enough GPU memory: needs"):
        opened_in(folder, gpu, totals[0] - 1, 0)


def test_one_more_than_there_is_memory_for(first: Pair, gpu: FakeGpu) -> None:
    gpu.cuda.free = 100
    allocated = dict(gpu.cuda.allocated)
    with pytest.raises(ResourceError, match=r"for one more sequence: .* are free; serve fewer --sequences"):
        first[0].another()
    assert gpu.cuda.allocated == allocated


Passes = list[tuple[str, int, int]]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    """Engine, first position and tokens of each pass."""
    seen: Passes = []

    def noting(role: str, compute: Callable[..., None]) -> Callable[..., None]:
        def run_pass(at: dict[str, int], count: int, *rest: object) -> None:
            seen.append((role, int(fake_tensorrt.array(at["position"], (1,), "i4")[0]), count))
            compute(at, count, *rest)

        return run_pass

    monkeypatch.setattr(fake_tensorrt, "trunk_pass", noting("trunk", fake_tensorrt.trunk_pass))
    monkeypatch.setattr(fake_tensorrt, "draft_pass", noting("draft", fake_tensorrt.draft_pass))
    return seen


@pytest.mark.parametrize("staging", [1 << 20, 48, 7])
@pytest.mark.parametrize("slot", [0, 2])
@pytest.mark.parametrize("n", [0, 3])
def test_a_kept_prompt_goes_on_with_the_passes_of_a_cold_run(
    pairs: list[Pair], passes: Passes, monkeypatch: pytest.MonkeyPatch, slot: int, n: int, staging: int
) -> None:
    """The very passes, with which bits agree whatever the kernels round; in the same sequence and in another one.
    staging: bytes of the page-locked buffer that copies go through."""
    monkeypatch.setattr("runtime.host_copies._STAGING_BYTES", staging)
    cache = PrefixCache(1 << 30)
    saves = (9, len(PROMPT) - 2)
    reply = text_of(generation(pairs[0], PROMPT, n=n, max_tokens=8, prefixes=cache, save_at=saves))
    second = [*PROMPT, *reply, END, 7, 2, END, 1]
    passes.clear()
    cold_text = text_of(generation(pairs[1], second, n=n, max_tokens=9))
    cold = list(passes)
    passes.clear()
    warm = generation(pairs[slot], second, n=n, max_tokens=9, prefixes=cache)
    assert text_of(warm) == cold_text == plain_decode(second, SAMPLERS[0], 9, (), CONTEXT)[0]
    assert warm._stats.cache_n == PROMPT.index(END) + 1
    assert warm._stats.cache_n + warm._stats.prompt_n == len(second)
    assert 0 < len(passes) < len(cold)
    assert passes == cold[-len(passes) :]


def test_replies_are_not_kept(pairs: list[Pair]) -> None:
    """They were not made by passes over a prompt."""
    cache = PrefixCache(1 << 30)
    running = generation(pairs[0], PROMPT, prefixes=cache, save_at=(CHUNK,))
    assert text_of(running)
    before = cache.nbytes, cache.num_saved
    running.save()
    assert (cache.nbytes, cache.num_saved) == before
    assert before[1] == 1


@pytest.mark.parametrize("budget", [0, 200, 8000, 20_000])
def test_what_is_kept_stays_within_its_budget(pairs: list[Pair], budget: int) -> None:
    cache = PrefixCache(budget)
    for i in range(12):
        prompt = [i % VOCAB, *PROMPT]
        text = text_of(generation(pairs[i % 4], prompt, max_tokens=4, prefixes=cache, save_at=(9, 18)))
        assert text == plain_decode(prompt, SAMPLERS[0], 4, (), CONTEXT)[0]
        assert cache.nbytes <= budget
    assert (cache.num_saved > 0) == (budget >= 8000)


def test_a_scheduler_serves_as_many_as_were_planned_for(gpu: FakeGpu, folder: Path) -> None:
    from runtime.scheduler import _make_slots
    from runtime.session import Session

    trunk, draft = open_engines(folder, toy_manifest(), context_size=CONTEXT, max_rows=MAX_ROWS, num_sequences=3)
    session = Session(folder, toy_manifest(), "tensorrt", "draft-mtp", CONTEXT, trunk, draft, None, FixedDraft(2))  # type: ignore[arg-type]
    slots = _make_slots(session, 0)
    assert len(slots) == 3 and len({id(slot.trunk) for slot in slots}) == 3
    assert len(_make_slots(session, 2)) == 2
    session.draft = object()  # type: ignore[assignment]
    with pytest.raises(UsageError, match="the tensorrt backend holds one"):
        _make_slots(session, 2)
