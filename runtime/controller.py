"""How many tokens to draft in the next round: a fixed number, or the one that measured costs and acceptance favour.

A controller never changes the text, only its speed. It sees no clock: the loop measures and reports each round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from engines.errors import UsageError
from runtime.acceptance import AcceptanceRates
from runtime.engine import PassCosts
from runtime.round_costs import RoundCosts

# Without a profile of costs, the first rounds measure what one draft and none cost, twice each, and one draft again
# while it seems dearer than any machine makes it: so many plain steps.
_OPENING = (1, 0, 1, 0)
_IMPLAUSIBLE_COST = 2.0
_MOST_OPENING_ROUNDS = 8
# Then, while drafting is on, a neighbour of the best depth, or none, is measured again: after so many rounds at first,
# later after so many.
_FIRST_LOOK = 16
_LATEST_LOOK = 256
# While drafting is off: the share of the time that finding out about the head may take if it is never right.
_TRIAL_SHARE = 0.004
# When drafting has been switched off, the head gets a first chance after so many rounds if a perfect one would make
# decoding so many times as fast, and sooner if drafting had gained at least a plain step. It is judged by as many
# guesses at least, a pass over few rows. Further chances come at gaps that double; after guesses that were mostly wrong
# where nothing had been gained before, much later.
_FIRST_GAP, _FIRST_GAP_AFTER_GAIN, _PROMISE = 8, 4, 1.25
_GROWTH, _GROWTH_WITHOUT_GAIN = 2, 16
# What a pass of the head over many rows takes against a short one, until one is measured.
_LONG_PASS = 2.0
# Gains are counted up to so many plain steps.
_MOST_GAIN = 20.0


class Round(NamedTuple):
    """One round as measured: draft_n drafts, n_accept of them accepted, rows the head took on the way, times in ms."""

    draft_n: int
    n_accept: int
    n_rows: int
    draft_ms: float
    verify_ms: float


class Controller(Protocol):
    """Chooses draft_n before each round and hears how the round went."""

    def begin(self) -> None:
        """A new sequence starts; the head is level with the trunk."""

    def draft_n(self, limit: int) -> int:
        """Drafts for the next round, 0..limit; limit >= 0 is what budget, context and engine allow."""

    def observe(self, done: Round) -> None:
        """Take note of a finished round."""

    def wants_guesses(self, n: int) -> bool:
        """Asked before `draft_n`: is the head to guess tokens that are known, as `judge` takes them? n: how many."""

    def judge(self, right: Sequence[bool], n_rows: int, took_ms: float) -> None:
        """The head took n_rows rows and was asked for the tokens after the last of them: which of its guesses were
        right, in the text's order."""


class FixedDraft:
    """Always n drafts, as far as the limit allows. n = 0 is plain decoding."""

    def __init__(self, n: int) -> None:
        if n < 0:
            raise UsageError(f"the number of drafts must be 0 (no drafting) or more, got {n}")
        self._n = n

    def begin(self) -> None:
        """Nothing to forget."""

    def draft_n(self, limit: int) -> int:
        return min(self._n, limit)

    def observe(self, done: Round) -> None:
        """Nothing to learn."""

    def wants_guesses(self, n: int) -> bool:
        return False

    def judge(self, right: Sequence[bool], n_rows: int, took_ms: float) -> None:
        """Nothing to learn."""


class AdaptiveDraft:
    """The draft_n of 0..max_n with the most expected tokens per second.

    With p_i the chance that draft i is accepted once those before it were (`AcceptanceRates`), n drafts are worth
    ``1 + p_1 + p_1 p_2 + ... + p_1..p_n`` tokens, and cost what such rounds cost (`RoundCosts`). What is known of a
    draft that is no longer made fades towards what is known of the draft before it, so deeper drafts get their chance.

    Where the best n is 0, drafting is off. Now and then the head takes the rows that it has missed, and its guesses for
    the last of them are compared with the text, which needs no verify pass; soon at first, then so rarely that this
    takes a small share of the time even if no guess is right. Drafting is on again once it is expected to pay. Where
    there are no guesses to compare, a round of trial does: at the begin of a text, and with engines that do not tell.
    Trials follow each other while their drafts are accepted.
    """

    def __init__(self, max_n: int, costs: PassCosts | None = None) -> None:
        """costs: as measured beforehand, for max_n drafts or more; None: found out on the way."""
        if max_n < 1:
            raise UsageError(f"the greatest number of drafts must be 1 or more, got {max_n}")
        self._max_n = max_n
        self._acceptance = AcceptanceRates(max_n)
        self._costs = RoundCosts(max_n, costs)
        self._opening = [] if costs else list(reversed(_OPENING))
        self._rounds = 0
        self._seen = [0] * (max_n + 1)  # the round in which each depth was last used
        self._look_gap = _FIRST_LOOK  # rounds to the next measurement of another depth
        self._look_at = math.inf if costs else _FIRST_LOOK
        self._gain = 0.0  # by drafting since it was last switched on, in plain steps, 0.._MOST_GAIN
        self._is_off = False
        self._trial_at = 0  # the round of the next trial
        self._trial_gap = 0  # rounds from one to the next, if the share allows it; 0: none planned yet
        self._has_gained = False  # when drafting was last switched off, there had been a gain by it
        self._trial_n = 0  # drafts of the round under way, if it is a trial
        self._is_hopeful = False  # the last trial had a draft accepted
        self._catch_up = 0.0  # what the head takes to catch up before a trial
        self._guess_cost = 0.0  # what it takes to catch up and guess; 0: not known
        self._num_known = 0  # guesses that could be judged when last asked

    def begin(self) -> None:
        self._acceptance.new_text()
        self._trial_at, self._trial_gap, self._is_hopeful = self._rounds, 0, False
        self._has_gained = False

    def draft_n(self, limit: int) -> int:
        limit = min(limit, self._max_n)
        self._trial_n = 0
        if limit == 0 or (self._is_off and self._rounds < self._trial_at):
            return 0
        if self._opening:
            return self._opening[-1]
        per_token = self._cost_per_token()
        drafting = min(range(1, limit + 1), key=per_token.__getitem__)
        pays = min(per_token[1:]) < per_token[0]
        if self._is_off and not (pays and self._is_hopeful):
            if 0 < self._num_known < self._first_gap:
                return 0  # soon there will be guesses
            self._trial_n = drafting
            return drafting
        self._is_off = not pays
        if pays and self._rounds >= self._look_at:
            self._look_gap = min(2 * self._look_gap, _LATEST_LOOK)
            self._look_at = self._rounds + self._look_gap
            return min({0, drafting - 1, min(drafting + 1, limit)} - {drafting}, key=self._seen.__getitem__)
        if pays:
            return drafting if per_token[drafting] < per_token[0] else 0
        self._has_gained, self._gain, self._is_hopeful = self._gain > 1.0, 0.0, False
        if self._has_gained:
            self._trial_gap = 0
        self._plan_trial(drafting, growth=1)
        return 0

    def wants_guesses(self, n: int) -> bool:
        self._num_known = n
        return self._is_off and self._rounds >= self._trial_at and n >= self._first_gap and not self._opening

    def judge(self, right: Sequence[bool], n_rows: int, took_ms: float) -> None:
        cost, plain = self._costs.of_ms(took_ms), self._costs.by_draft_n()[0]
        if n_rows <= self._max_n + 1:  # most will take more rows
            cost = max(self._guess_cost, _LONG_PASS * cost)
        known = self._guess_cost or cost
        self._guess_cost = known + 0.5 * (min(cost, 2 * known + plain) - known)
        for each in right:
            self._acceptance.observe(1, int(each))
        per_token = self._cost_per_token()
        self._is_off = min(per_token[1:]) >= per_token[0]
        if self._is_off:
            is_first = self._trial_gap <= _FIRST_GAP and not self._has_gained
            self._plan_trial(1, _GROWTH_WITHOUT_GAIN if is_first else _GROWTH)

    def observe(self, done: Round) -> None:
        n, costs = done.draft_n, self._costs
        caught_up = done.n_rows > self._max_n + 1
        if n and caught_up:  # one that was held up must not put off the next trial for long
            most = 2 * self._catch_up + costs.by_draft_n()[0]
            self._catch_up = min(costs.excess(n, done.draft_ms), most)
        costs.add(n, done.draft_ms, done.verify_ms, caught_up)
        self._rounds += 1
        self._seen[n] = self._rounds
        by_n = costs.by_draft_n()
        if self._opening:
            self._opening.pop()
            if not self._opening and by_n[1] > _IMPLAUSIBLE_COST * by_n[0] and self._rounds < _MOST_OPENING_ROUNDS:
                self._opening.append(1)
        elif n:
            gain = self._gain + done.n_accept + 1 - (by_n[n] / by_n[0] if by_n[0] else 1.0)
            self._gain = min(max(gain, 0.0), _MOST_GAIN)
        self._acceptance.observe(n, done.n_accept)
        if self._trial_n:
            self._is_hopeful = done.n_accept > 0
            if self._is_hopeful:
                self._trial_at = self._rounds
            else:
                self._plan_trial(self._trial_n, _GROWTH)

    def _cost_per_token(self) -> list[float]:
        """Of rounds with 0..max_n drafts, as expected."""
        reached = tokens = 1.0
        costs = self._costs.by_draft_n()
        per_token = [costs[0]]
        for rate, cost in zip(self._acceptance.rates(), costs[1:], strict=True):
            reached *= rate
            tokens += reached
            per_token.append(cost / tokens)
        return per_token

    @property
    def _first_gap(self) -> int:
        return _FIRST_GAP_AFTER_GAIN if self._has_gained else _FIRST_GAP

    def _plan_trial(self, n: int, growth: int) -> None:
        """The next one, of n drafts or about as many, after so many times the gap before it."""
        costs = self._costs.by_draft_n()
        lost = self._guess_cost or costs[n] + self._catch_up - costs[0]
        most = max(_FIRST_GAP_AFTER_GAIN, lost / costs[0] / _TRIAL_SHARE if costs[0] else 0.0)
        has_promise = (self._max_n + 1) * costs[0] > _PROMISE * costs[self._max_n]
        self._trial_gap = self._trial_gap * growth or self._first_gap
        self._trial_at = self._rounds + int(min(self._trial_gap, most) if has_promise else most)
