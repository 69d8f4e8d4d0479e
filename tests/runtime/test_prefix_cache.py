"""A sequence taken up from saved state is, bit for bit, the one that took all its tokens itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from runtime.controller import FixedDraft
from runtime.engine_onnxruntime import OnnxDraftEngine, OnnxTrunkEngine
from runtime.prefix_cache import PrefixCache
from runtime.speculative import Generation, SpecStats
from tests import compare
from tests.exported import Exported, greedy

PLENTY = 1 << 30
RANDOM = np.random.default_rng(5)
OLD = RANDOM.integers(0, 4000, 320).tolist()


class Run:
    """One text of at most ``n`` tokens; its state is kept at the end."""

    def __init__(
        self,
        engines: tuple[OnnxTrunkEngine, OnnxDraftEngine | None],
        prompt: Sequence[int],
        cache: PrefixCache | None,
        n: int = 8,
        save_at: Sequence[int] = (),
        draft_n: int = 3,
    ) -> None:
        trunk, draft = engines
        self.stats, self.tokens = SpecStats(), list(prompt)
        generation = Generation(
            trunk,
            draft,
            prompt,
            sampler=greedy,
            controller=FixedDraft(draft_n),
            max_tokens=n,
            end_token_ids=(),
            context_size=trunk.context_size,
            stats=self.stats,
            prefixes=cache,
            save_at=save_at,
        )
        self.first_logits: np.ndarray | None = None
        while True:
            block = generation.step()
            if block.tokens and self.first_logits is None:
                self.first_logits = trunk.logits.copy()
            self.tokens += block.tokens
            if block.finish_reason:
                break
        generation.save()
        self.state = trunk.state()


@pytest.fixture(scope="module")
def engines(exported: Callable[[str], Exported]) -> tuple[OnnxTrunkEngine, OnnxDraftEngine]:
    return exported("trained").engines(context_size=4096)


@pytest.mark.parametrize("draft_n", [0, 3])
def test_second_turn_goes_on_after_the_first(engines: tuple[OnnxTrunkEngine, OnnxDraftEngine], draft_n: int) -> None:
    cache = PrefixCache(PLENTY)
    first = Run(engines, OLD, cache, n=20, draft_n=draft_n)
    prompt = [*first.tokens, 7, 8, 9]
    cold = Run(engines, prompt, None)
    warm = Run(engines, prompt, cache)
    assert (cold.stats.cache_n, cold.stats.prompt_n) == (0, len(prompt))
    # All but the last token of the first text, which was chosen and not yet taken.
    assert (warm.stats.cache_n, warm.stats.prompt_n) == (len(OLD) + 19, 4)
    compare.assert_same_bits(warm.first_logits, cold.first_logits, "logits")
    compare.assert_same_state(warm.state, cold.state, "state")
    assert warm.tokens == cold.tokens
    assert (warm.stats.draft_n, warm.stats.accepted) == (cold.stats.draft_n, cold.stats.accepted)


@pytest.mark.parametrize(("kept", "resumed"), [(200, 128), (128, 128), (127, 0), (300, 256)])
def test_longest_saved_prefix(engines: tuple[OnnxTrunkEngine, OnnxDraftEngine], kept: int, resumed: int) -> None:
    """``kept`` tokens of the old prompt, then others: it goes on at the last place saved before them."""
    cache = PrefixCache(PLENTY)
    Run(engines, OLD, cache, n=1, save_at=(128, 256))
    prompt = [*OLD[:kept], 5]
    cold, warm = Run(engines, prompt, None), Run(engines, prompt, cache)
    assert warm.stats.cache_n == resumed
    assert warm.tokens == cold.tokens
    compare.assert_same_state(warm.state, cold.state, "state")


def test_saved_while_another_sequence_runs(exported: Callable[[str], Exported]) -> None:
    """What one sequence saved, another's engines take up."""
    trunk, draft = exported("trained").engines(context_size=4096)
    more = trunk.another()
    others = (more, draft.another(more))
    cache = PrefixCache(PLENTY)
    first = Run((trunk, draft), OLD, cache, n=4)
    prompt = [*first.tokens, 1]
    warm = Run(others, prompt, cache)
    cold = Run((trunk, draft), prompt, None)
    assert warm.stats.cache_n == len(OLD) + 3
    assert warm.tokens == cold.tokens
    compare.assert_same_state(warm.state, cold.state, "state")


def test_saved_state_is_never_written(engines: tuple[OnnxTrunkEngine, OnnxDraftEngine]) -> None:
    cache = PrefixCache(PLENTY)
    Run(engines, OLD[:100], cache, n=1)
    for last in (1, 2, 1):
        prompt = [*OLD[:100], last]
        warm = Run(engines, prompt, cache, n=20)
        assert warm.stats.cache_n >= 100
        cold = Run(engines, prompt, None, n=20)
        assert warm.tokens == cold.tokens
        compare.assert_same_state(warm.state, cold.state, "state")


def test_budget(engines: tuple[OnnxTrunkEngine, OnnxDraftEngine]) -> None:
    """What was not used for longest goes; what is left still is right, and bytes are counted truly."""
    probe = PrefixCache(PLENTY)
    Run(engines, OLD[:80], probe, n=1)
    one = probe.nbytes
    cache = PrefixCache(3 * one + one // 2)
    prompts = [[i, *OLD[:79]] for i in range(5)]
    for prompt in prompts:
        Run(engines, prompt, cache, n=1)
        assert cache.nbytes <= 3 * one + one // 2
    assert (cache.num_saved, cache.nbytes) == (3, 3 * one)
    found = [Run(engines, [*prompt, 1], cache, n=1).stats.cache_n for prompt in prompts[::-1]]
    assert found[:2] == [80, 80]
    assert found[-1] == 0


def test_a_long_chain_within_the_budget_keeps_its_end(engines: tuple[OnnxTrunkEngine, OnnxDraftEngine]) -> None:
    """Inner nodes give up their recurrent state first: rows stay, since the longer prefixes need them."""
    whole = PrefixCache(PLENTY)
    Run(engines, OLD, whole, n=1, save_at=range(50, 320, 45))
    assert whole.num_saved == 7
    budget = whole.nbytes * 3 // 4
    cache = PrefixCache(budget)
    Run(engines, OLD, cache, n=1, save_at=range(50, 320, 45))
    assert 0 < cache.num_saved < 7
    assert cache.nbytes <= budget
    warm, cold = Run(engines, [*OLD, 1], cache), Run(engines, [*OLD, 1], None)
    assert warm.stats.cache_n == len(OLD)
    compare.assert_same_state(warm.state, cold.state, "state")
    cache.clear()
    assert Run(engines, [*OLD, 1], cache).stats.cache_n == 0


def test_at_least_one_token_is_processed(engines: tuple[OnnxTrunkEngine, OnnxDraftEngine]) -> None:
    """The very prompt again: its last token must be taken for its logits."""
    cache = PrefixCache(PLENTY)
    first = Run(engines, OLD[:100], cache, n=8, save_at=(99,))
    again = Run(engines, OLD[:100], cache, n=8)
    assert (again.stats.cache_n, again.stats.prompt_n) == (99, 1)
    assert again.tokens == first.tokens


def test_the_longest_prefix_that_fits(engines: tuple[OnnxTrunkEngine, OnnxDraftEngine]) -> None:
    whole = PrefixCache(PLENTY)
    Run(engines, OLD, whole, n=1, save_at=range(50, 320, 45))
    cache = PrefixCache(whole.nbytes // 4)
    Run(engines, OLD, cache, n=1, save_at=range(50, 320, 45))
    warm, cold = Run(engines, [*OLD, 1], cache), Run(engines, [*OLD, 1], None)
    assert 50 <= warm.stats.cache_n < len(OLD)
    compare.assert_same_state(warm.state, cold.state, "state")


def test_nothing_fits(engines: tuple[OnnxTrunkEngine, OnnxDraftEngine]) -> None:
    cache = PrefixCache(1000)
    Run(engines, OLD[:50], cache, n=1, save_at=(20,))
    assert (cache.num_saved, cache.nbytes) == (0, 0)
    assert Run(engines, [*OLD[:50], 1], cache).stats.cache_n == 0


def test_without_a_head(exported: Callable[[str], Exported]) -> None:
    trunk = exported("trained").trunk(context_size=4096)
    cache = PrefixCache(PLENTY)
    first = Run((trunk, None), OLD[:100], cache, n=5)
    prompt = [*first.tokens, 3]
    warm, cold = Run((trunk, None), prompt, cache), Run((trunk, None), prompt, None)
    assert warm.stats.cache_n == 104
    assert warm.tokens == cold.tokens
    compare.assert_same_state(warm.state, cold.state, "state")
