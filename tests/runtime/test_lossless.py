"""Drafting never changes the text, and the head drafts as well as llama.cpp's does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from runtime.engine import Sampler
from runtime.sampling import SamplingParams, choose
from tests import compare
from tests.exported import Exported, generate_tokens, greedy
from tests.known_text import ENDLESS, RING, STOP_INSIDE
from tests.peer.speculation import NEW_TOKENS, recorded

Export = Callable[[str], Exported]

# Share of drafts by which acceptance may differ from llama.cpp's. Both are exact on the same values, so a rare near-tie
# decided otherwise is all that can differ.
ACCEPTANCE_MAX_ABS = 0.02
RING_PROMPT = list(RING[:5])


def sampler(temperature: float, seed: int) -> Sampler:
    return partial(choose, params=SamplingParams(temperature=temperature, top_k=40, seed=seed))


@pytest.mark.slow
def test_greedy_text_and_acceptance(exported: Export) -> None:
    """24 prompts of 96 tokens: the text of plain decoding in every one, llama.cpp's text and its acceptance."""
    trunk, draft = exported("trained").engines()
    runs = recorded()
    assert len(runs) == 24
    accepted, drafted, unlike_peer = 0, 0, 0
    for run in runs:
        plain, _, stats = generate_tokens(trunk, None, run.prompt, NEW_TOKENS, 0)
        assert stats.draft_n == 0
        text, rounds, _ = generate_tokens(trunk, draft, run.prompt, NEW_TOKENS, 3)
        assert text == plain
        accepted, drafted = accepted + sum(rounds.accepted), drafted + sum(rounds.drafted)
        unlike_peer += text != run.greedy
    peer_rounds = [count for run in runs for count in run.accepted[3]]
    assert accepted / drafted == pytest.approx(sum(peer_rounds) / (3 * len(peer_rounds)), abs=ACCEPTANCE_MAX_ABS)
    # Two exact engines part only where the best two logits are closer than their rounding: one prompt at most.
    assert unlike_peer <= 1


def test_acceptance_of_two_drafts(exported: Export) -> None:
    trunk, draft = exported("trained").engines()
    ours, peers = [0, 0], [0, 0]
    for run in recorded()[::6]:
        # Run on past the end: llama.cpp's last rounds draft as many as the others.
        _, rounds, _ = generate_tokens(trunk, draft, run.prompt, NEW_TOKENS + 3, 2)
        counted = len(run.accepted[2])
        ours = [ours[0] + sum(rounds.accepted[:counted]), ours[1] + sum(rounds.drafted[:counted])]
        peers = [peers[0] + sum(run.accepted[2]), peers[1] + 2 * counted]
    assert ours[0] / ours[1] == pytest.approx(peers[0] / peers[1], abs=ACCEPTANCE_MAX_ABS)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_sampled_text(exported: Export, temperature: float) -> None:
    """At a temperature, too, the same seed gives the same text with and without drafting; drafts still are accepted."""
    trunk, draft = exported("trained").engines()
    accepted, texts = 0, set()
    for seed, run in enumerate(recorded()):
        prompt, sample = run.prompt[:12], sampler(temperature, seed)
        plain, _, _ = generate_tokens(trunk, None, prompt, 16, 0, sample)
        text, _, stats = generate_tokens(trunk, draft, prompt, 16, 3 if seed % 4 else 7, sample)
        assert text == plain
        accepted += stats.draft_n_accepted
        texts.add(tuple(plain))
    assert len(texts) == 24 and accepted > 24


def test_state_after_drafting(exported: Export) -> None:
    """After many rejections the trunk's state is that of plain decoding, bit by bit."""
    trunk, draft = exported("trained").engines()
    plain, _, _ = generate_tokens(trunk, None, [40, 41, 42], 256, 0)
    want = trunk.state()
    assert trunk.position == 3 + 256 - 1
    for n_drafts in (1, 2, 3):
        text, _, stats = generate_tokens(trunk, draft, [40, 41, 42], 256, n_drafts)
        assert text == plain
        assert stats.draft_n - stats.draft_n_accepted > 8
        compare.assert_same_state(trunk.state(), want, f"{n_drafts} drafts a round")


@pytest.mark.parametrize("n_drafts", range(8))
def test_ring(exported: Export, n_drafts: int) -> None:
    """The known text, at every number of drafts, from a head that is right two times in three."""
    trunk, draft = exported("bigram_ring").engines()
    tokens, _, stats = generate_tokens(trunk, draft, RING_PROMPT, 200, n_drafts)
    assert tokens == ENDLESS.greedy(RING_PROMPT[-1], 200)
    assert stats.finish_reason == "length"
    if n_drafts:
        assert 0.2 < stats.acceptance_rate < 0.95


@pytest.mark.parametrize("n_drafts", [1, 2, 3, 4])
def test_perfect_head(exported: Export, n_drafts: int) -> None:
    """A head that drafts exactly the text: every draft is accepted. It would not be with eh_proj's halves swapped."""
    trunk, draft = exported("draft_perfect").engines()
    tokens, rounds, stats = generate_tokens(trunk, draft, RING_PROMPT, 100, n_drafts)
    assert tokens == ENDLESS.greedy(RING_PROMPT[-1], 100)
    assert rounds.accepted == rounds.drafted
    assert stats.acceptance_rate == 1.0


@pytest.mark.parametrize("n_drafts", range(5))
def test_end_token(exported: Export, n_drafts: int) -> None:
    """Inside a block of accepted drafts, or as the very first token."""
    model = exported("ring_stop_inside")
    ends = model.manifest.tokenizer.end_token_ids
    trunk, draft = model.engines()
    tokens, _, stats = generate_tokens(trunk, draft, [RING[-1]], 100, n_drafts, end_token_ids=ends)
    assert (tokens, stats.finish_reason) == (STOP_INSIDE.greedy(RING[-1], 11), "stop")
    trunk, draft = exported("stops_at_once").engines()
    tokens, _, stats = generate_tokens(trunk, draft, [RING[-1]], 100, n_drafts, end_token_ids=ends)
    assert (tokens, stats.finish_reason) == ([], "stop")


@pytest.mark.parametrize("room", [1, 2, 3, 4, 5])
def test_end_of_the_context(exported: Export, room: int) -> None:
    """Drafts never reach past the context; what fits is said."""
    trunk, draft = exported("bigram_ring").engines(context_size=64)
    prompt = (RING * 4)[: 64 - room]
    tokens, _, stats = generate_tokens(trunk, draft, prompt, -1, 4, greedy)
    assert (tokens, stats.finish_reason) == (ENDLESS.greedy(prompt[-1], room), "length")
    assert trunk.position < 64
