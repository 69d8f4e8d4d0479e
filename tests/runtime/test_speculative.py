"""The loop with toy engines: for any draft, any draft_n and any sampler, the text of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.errors import UsageError
from runtime.controller import FixedDraft, Round
from runtime.speculative import SpecStats, generate
from tests.runtime.fake_engines import VOCAB, ToyHead, ToyTrunk, UnrestoredTrunk, greedy, noisy, plain_decode

PROMPT = [3, 1, 4, 1, 5, 9, 2]
END = 7


class RandomDraft(FixedDraft):
    """Another draft_n every round."""

    def __init__(self, seed: int) -> None:
        super().__init__(0)
        self._random = np.random.default_rng(seed)

    def draft_n(self, limit: int) -> int:
        return int(self._random.integers(0, limit + 1))


class Recorded(FixedDraft):
    """Keeps the rounds it is told of."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.rounds: list[Round] = []

    def observe(self, done: Round) -> None:
        self.rounds.append(done)


def run(
    trunk: ToyTrunk, head: ToyHead | None, prompt: Sequence[int] = PROMPT, **options: Any
) -> tuple[list[int], SpecStats]:
    stats = SpecStats()
    settings_: dict[str, Any] = {
        "sampler": greedy,
        "controller": FixedDraft(3),
        "max_tokens": -1,
        "end_token_ids": (),
        "context_size": trunk.context_size,
        **options,
    }
    return list(generate(trunk, head, prompt, stats=stats, **settings_)), stats


def wrong(token: int, _: int) -> int:
    return (token + 1) % VOCAB


def mostly_right(seed: int, share: float) -> Callable[[int, int], int]:
    def twist(token: int, position: int) -> int:
        return token if np.random.default_rng((seed, position)).random() < share else wrong(token, position)

    return twist


TWISTS = {
    "right": lambda token, _: token,
    "wrong": wrong,
    "half right": mostly_right(0, 0.5),
    "nearly right": mostly_right(1, 0.9),
    "random": lambda _, position: int(np.random.default_rng(position).integers(VOCAB)),
    "always an end": lambda token, position: END,
    "an end inside": lambda token, position: END if position % 3 == 0 else token,
}


@settings(deadline=None, max_examples=300)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
    twist=st.sampled_from(sorted(TWISTS)),
    draft_n=st.integers(0, 12) | st.none(),
    max_tokens=st.integers(-1, 40),
    room=st.integers(0, 40),
    max_rows=st.integers(1, 9),
    chunks=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    seed=st.integers(0, 2**16) | st.none(),
    ends=st.sampled_from([(), (END,), (END, 2), tuple(range(VOCAB))]),
)
def test_any_draft_gives_the_text_of_plain_decoding(
    prompt: list[int],
    twist: str,
    draft_n: int | None,
    max_tokens: int,
    room: int,
    max_rows: int,
    chunks: tuple[int, int],
    seed: int | None,
    ends: tuple[int, ...],
) -> None:
    context_size = len(prompt) + room
    sampler = greedy if seed is None else noisy(seed)
    trunk = ToyTrunk(context_size, max_rows, prefill_chunk=chunks[0])
    head = ToyHead(TWISTS[twist], prefill_chunk=chunks[1])
    controller = RandomDraft(room) if draft_n is None else FixedDraft(draft_n)
    want, reason = plain_decode(prompt, sampler, max_tokens, ends, context_size)
    got, stats = run(
        trunk, head, prompt, sampler=sampler, controller=controller, max_tokens=max_tokens, end_token_ids=ends
    )
    assert got == want
    assert (stats.finish_reason, stats.predicted_n, stats.prompt_n) == (reason, len(want), len(prompt))
    head.check_rows(prompt + want)

    # What stays behind is what plain decoding leaves: the prompt and every token but the last one chosen.
    reference = ToyTrunk(context_size)
    run(reference, None, prompt, sampler=sampler, max_tokens=max_tokens, end_token_ids=ends)
    assert (trunk.state, trunk.position) == (reference.state, reference.position)


@pytest.mark.parametrize("twist", ["wrong", "half right", "random"])
def test_a_trunk_that_does_not_restore_its_state_is_noticed(twist: str) -> None:
    want, _ = plain_decode(PROMPT, greedy, 40, (), 64)
    assert run(ToyTrunk(), ToyHead(TWISTS[twist]), max_tokens=40)[0] == want
    assert run(UnrestoredTrunk(), ToyHead(TWISTS[twist]), max_tokens=40)[0] != want


@pytest.mark.parametrize("draft_n", [1, 2, 3, 5])
def test_a_right_head_is_accepted_whole_and_caught_up_for_free(draft_n: int) -> None:
    trunk, head = ToyTrunk(), ToyHead(prefill_chunk=6)
    tokens, stats = run(trunk, head, controller=FixedDraft(draft_n), max_tokens=1 + 6 * (draft_n + 1))
    assert stats.acceptance_rate == 1.0
    assert stats.tokens_per_step == draft_n + 1
    assert (stats.verify_steps, stats.draft_n, stats.draft_n_accepted) == (6, 6 * draft_n, 6 * draft_n)
    assert stats.offered == stats.accepted == [6] * draft_n
    # After the prompt one row waits (the first chosen token); then each draft call brings the round before it.
    assert head.draft_calls == [(1, draft_n)] + [(draft_n + 1, draft_n)] * 5
    assert len(tokens) == 1 + 6 * (draft_n + 1)


def test_a_wrong_head_costs_a_draft_each_round_and_gains_nothing() -> None:
    _, stats = run(ToyTrunk(), ToyHead(wrong), max_tokens=10)
    # nine rounds follow the prompt's own token; the last three have room for 2, 1 and 0 drafts
    assert (stats.verify_steps, stats.draft_n, stats.draft_n_accepted) == (9, 6 * 3 + 2 + 1, 0)
    assert (stats.acceptance_rate, stats.tokens_per_step) == (0.0, 1.0)
    assert (stats.offered, stats.accepted) == ([8, 7, 6], [0, 0, 0])


def test_rounds_are_reported_and_add_up() -> None:
    controller = Recorded(3)
    ticks = iter(range(10**6))
    _, stats = run(ToyTrunk(), ToyHead(TWISTS["half right"]), controller=controller, clock=lambda: float(next(ticks)))
    assert sum(r.draft_n for r in controller.rounds) == stats.draft_n == sum(stats.offered)
    assert sum(r.n_accept for r in controller.rounds) == stats.draft_n_accepted == sum(stats.accepted)
    assert sum(r.n_accept + 1 for r in controller.rounds) + 1 == stats.predicted_n
    assert all((r.draft_ms, r.verify_ms) == (1000.0, 1000.0) for r in controller.rounds)
    assert stats.predicted_ms == 2000.0 * stats.verify_steps
    assert stats.prompt_ms == 2000.0  # began, then once after each of two chunks
    assert 0 < stats.draft_n_accepted < stats.draft_n


def test_counting_matches_a_loop_that_never_clips() -> None:
    """Up to a given number of tokens the rounds are those of a loop that drafts k every round."""
    k, wanted = 3, 30
    controller = Recorded(k)
    text, _ = run(ToyTrunk(), ToyHead(TWISTS["half right"]), controller=controller, max_tokens=wanted + k)
    emitted, drafted, accepted = 1, 0, 0
    for done in controller.rounds:
        if emitted >= wanted:
            break
        drafted, accepted, emitted = drafted + done.draft_n, accepted + done.n_accept, emitted + done.n_accept + 1
    twist, at, rounds, expected = TWISTS["half right"], 1, 0, 0
    full, _ = plain_decode(PROMPT, greedy, -1, (), 64)
    while at < wanted:  # a draft is right exactly where the twist leaves the token alone
        hits = [twist(full[at + i], len(PROMPT) + at + i) == full[at + i] for i in range(k)]
        n_accept = (*hits, False).index(False)
        at, rounds, expected = at + n_accept + 1, rounds + 1, expected + n_accept
    assert (drafted, accepted) == (k * rounds, expected)
    assert text == full[: wanted + k]


def test_ends_inside_a_block_of_accepted_drafts() -> None:
    text, _ = plain_decode(PROMPT, greedy, 40, (), 64)
    for at in range(12):
        end = text[at]
        want = text[: text.index(end)]
        for draft_n in (0, 1, 2, 3, 5):
            got, stats = run(ToyTrunk(), ToyHead(), controller=FixedDraft(draft_n), end_token_ids={end})
            assert (got, stats.finish_reason, stats.predicted_n) == (want, "stop", len(want))


@pytest.mark.parametrize("room", range(6))
def test_near_the_end_of_the_context(room: int) -> None:
    context_size = len(PROMPT) + room
    for head in (None, ToyHead(), ToyHead(wrong)):
        got, stats = run(ToyTrunk(context_size), head, controller=FixedDraft(4))
        assert (len(got), stats.finish_reason) == (room, "length")
        assert got == plain_decode(PROMPT, greedy, room, (), context_size)[0]


def test_the_engine_may_hold_more_context_than_asked_for() -> None:
    got, stats = run(ToyTrunk(64), ToyHead(), context_size=len(PROMPT) + 2)
    assert (len(got), stats.finish_reason) == (2, "length")


def test_no_tokens_asked_for() -> None:
    got, stats = run(ToyTrunk(), ToyHead(), max_tokens=0, end_token_ids=range(VOCAB))
    assert (got, stats.finish_reason, stats.prompt_n, stats.verify_steps) == ([], "length", len(PROMPT), 0)
    assert (stats.acceptance_rate, stats.tokens_per_step, stats.predicted_per_second) == (0.0, 0.0, 0.0)


def test_drafting_resumes_after_a_pause_with_every_row_caught_up() -> None:
    class Pausing(FixedDraft):
        rounds = 0

        def draft_n(self, limit: int) -> int:
            self.rounds += 1
            return 0 if 3 <= self.rounds < 20 else super().draft_n(limit)

    head = ToyHead(prefill_chunk=5)
    got, stats = run(ToyTrunk(), head, controller=Pausing(2))
    assert got == plain_decode(PROMPT, greedy, -1, (), 64)[0]
    assert stats.acceptance_rate == 1.0
    head.check_rows(PROMPT + got)
    assert max(rows for rows, _ in head.draft_calls) <= 5
    assert len(head.rows) > 50


def test_a_head_that_pauses_for_long_is_fed_whole_chunks() -> None:
    head = ToyHead(prefill_chunk=5)
    got, stats = run(ToyTrunk(), head, controller=FixedDraft(0))
    assert (stats.draft_n, head.draft_calls) == (0, [])
    assert len(PROMPT + got) - head.position <= 2 * 5
    head.check_rows(PROMPT + got)


@pytest.mark.parametrize("calls", range(6))
def test_cancelling_ends_between_passes_with_what_there_is(calls: int) -> None:
    asked = 0

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked > calls

    trunk = ToyTrunk()
    got, stats = run(trunk, ToyHead(), cancelled=cancelled)
    want, _ = plain_decode(PROMPT, greedy, -1, (), 64)
    # two prompt chunks, then one token, then four a round
    assert len(got) == (0 if calls < 2 else 1 + 4 * (calls - 2))
    assert got == want[: len(got)]
    assert (stats.finish_reason, stats.predicted_n) == ("cancelled", len(got))
    trunk.verify([1])  # nothing is left uncommitted


def test_closing_the_iterator_cancels() -> None:
    stats, trunk = SpecStats(), ToyTrunk()
    tokens = generate(
        trunk, ToyHead(), PROMPT, sampler=greedy, controller=FixedDraft(3), max_tokens=-1, end_token_ids=(),
        context_size=64, stats=stats,
    )  # fmt: skip
    assert [next(tokens), next(tokens)] == plain_decode(PROMPT, greedy, 2, (), 64)[0]
    tokens.close()
    assert (stats.finish_reason, stats.predicted_n) == ("cancelled", 2)


@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        ([], {}, "no token"),
        ([1] * 65, {}, "65 tokens"),
        ([1] * 9, {"context_size": 8}, "context holds 8"),
        (PROMPT, {"max_tokens": -2}, "-2"),
    ],
)
def test_what_cannot_be_served_is_a_usage_error(prompt: list[int], options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        run(ToyTrunk(), ToyHead(), prompt, **options)
    with pytest.raises(UsageError, match="-1"):
        FixedDraft(-1)
