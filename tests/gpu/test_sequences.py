"""Several sequences over one pair of engines, and kept prompts: each text, and each bit, is that of its own run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from runtime.controller import FixedDraft
from runtime.prefix_cache import PrefixCache
from runtime.sampling import SamplingParams
from runtime.scheduler import Scheduler
from runtime.sequence_sampler import Adjustments
from runtime.session import Session, SpecOptions, make_sampler, open_session
from runtime.speculative import Generation, SpecStats
from runtime.tensorrt_draft import TensorrtDraft
from runtime.tensorrt_trunk import TensorrtTrunk
from tests.gpu.checks import assert_same_bits, assert_same_state
from tests.gpu.conftest import Opened
from tests.gpu.prepare import PREFILL_CHUNK, TRAINED_MODELS, WIDE
from tests.peer.speculation import recorded
from tests.runtime.serving import sampler_of, submit

pytestmark = [pytest.mark.gpu, pytest.mark.trt]

Pair = tuple[TensorrtTrunk, TensorrtDraft | None]
PARAMS = [SamplingParams(temperature=0.9 * (i % 2), seed=i, top_k=40 * (i % 3)) for i in range(12)]
# Seen by the host: the sampler needs the logits.
ADJUSTED = Adjustments(frequency_penalty=0.7, repetition_penalty=1.2, logit_bias={300: 2.0})


@pytest.fixture(scope="module")
def session(prepared: Path) -> Session:
    return open_session(prepared / "trained", spec=SpecOptions("draft-mtp", 4), sequences=4)


def prompts() -> list[list[int]]:
    """Of one token to several passes."""
    runs = recorded()
    return [(runs[i].prompt + runs[i].greedy)[: 1 + 13 * i] * (1 + 4 * (i % 3)) for i in range(12)]


def test_interleaved_texts_are_those_of_each_alone(session: Session) -> None:
    """Twelve at once over four places, drafting and not, greedy, sampled and with penalties; two times over."""
    want = [
        submitted(session, [prompt], [params], [drafting], 1)[0]
        for prompt, params, drafting in zip(prompts(), PARAMS, [i % 4 != 3 for i in range(12)], strict=True)
    ]
    for _ in range(2):
        assert submitted(session, prompts(), PARAMS, [i % 4 != 3 for i in range(12)], 4) == want
    plain = submitted(session, prompts(), PARAMS, [False] * 12, 4)
    assert plain == want


def submitted(
    session: Session, texts: list[list[int]], params: list[SamplingParams], drafting: list[bool], at_once: int
) -> list[list[int]]:
    scheduler = Scheduler(session, num_sequences=at_once)
    try:
        assert scheduler.num_slots == at_once
        jobs = [
            submit(
                scheduler,
                text,
                70,
                sampler=sampler_of(session, text, each, ADJUSTED if each.seed % 5 == 0 else None),
                drafting=drafts,
            )
            for text, each, drafts in zip(texts, params, drafting, strict=True)
        ]
        return [listener.wait().got for _, listener in jobs]
    finally:
        scheduler.close()


class Turn:
    """A text after a prompt, and everything that it left."""

    def __init__(self, pair: Pair, prompt: Sequence[int], end: int, cache: PrefixCache | None, n: int = 3) -> None:
        self.stats, self.tokens = SpecStats(), list(prompt)
        running = Generation(
            *pair,
            prompt,
            sampler=make_sampler(SamplingParams(0.7, seed=5)),
            controller=FixedDraft(n),
            max_tokens=40,
            end_token_ids=(),
            context_size=pair[0].context_size,
            stats=self.stats,
            prefixes=cache,
            save_at=(PREFILL_CHUNK, len(prompt)),
            message_ends=(end,),
        )
        self.logits = np.zeros(0)
        while True:
            block = running.step()
            if block.tokens and not self.logits.size:
                self.logits = pair[0].logits
            self.tokens += block.tokens
            if block.finish_reason:
                break
        running.save()
        self.state = pair[0].state()


@pytest.mark.parametrize("n", [0, 3])
@pytest.mark.parametrize("name", [*TRAINED_MODELS, "heads_256", "q4_k_m.ops", WIDE])
def test_a_second_turn_is_that_of_a_cold_run(opened: Callable[[str], Opened], name: str, n: int) -> None:
    """Logits, state and text to the bit; in the sequence that kept the first turn and in another one, whose memory has
    held other things."""
    engines = opened(name)
    rng, vocab, end = np.random.default_rng(7), engines.vocab_size, engines.vocab_size - 1
    first_prompt = [*rng.integers(0, vocab - 1, 2 * PREFILL_CHUNK + 95).tolist(), end]
    one, other = engines.trunk.another(), engines.trunk.another()
    pairs: list[Pair] = [(one, engines.draft.another(one)), (other, engines.draft.another(other))]
    Turn(pairs[1], rng.integers(0, vocab, 900).tolist(), end, None)
    cache = PrefixCache(1 << 30)
    first = Turn(pairs[0], first_prompt, end, cache, n)
    second = [*first.tokens, end, *rng.integers(0, vocab - 1, 30).tolist()]
    cold = Turn(pairs[0], second, end, None, n)
    for pair in (pairs[1], pairs[0], pairs[1]):
        warm = Turn(pair, second, end, cache, n)
        assert warm.stats.cache_n == len(first_prompt)
        assert warm.stats.prompt_n == len(second) - len(first_prompt)
        assert warm.tokens == cold.tokens
        assert_same_bits(warm.logits, cold.logits, "logits")
        assert_same_state(warm.state, cold.state, "at the end")
        assert (warm.stats.draft_n, warm.stats.accepted) == (cold.stats.draft_n, cold.stats.accepted)


def test_what_is_taken_up_is_never_written(opened: Callable[[str], Opened]) -> None:
    engines = opened("trained")
    trunk = engines.trunk.another()
    pair: Pair = (trunk, engines.draft.another(trunk))
    prompt = np.random.default_rng(8).integers(0, engines.vocab_size, PREFILL_CHUNK + 5).tolist()
    cache = PrefixCache(1 << 30)
    Turn(pair, prompt, -1, cache)
    for last in (1, 2, 1, 3):
        warm, cold = Turn(pair, [*prompt, last], -1, cache), Turn(pair, [*prompt, last], -1, None)
        assert warm.stats.cache_n == PREFILL_CHUNK
        assert warm.tokens == cold.tokens
        assert_same_state(warm.state, cold.state, f"after {last}")
