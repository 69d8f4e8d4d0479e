"""How many tokens to draft in the next round: a fixed number, or the one that measured costs and acceptance favour.

A controller never changes the text, only its speed. It sees no clock: the loop measures and reports each round.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from engines.errors import UsageError

# The first rounds alternate one draft and none, so that both have been measured twice after their first call.
_OPENING_ROUNDS = 6
# Acceptance before anything is known, and how many observations a guess weighs (for a later draft: the one before it).
_PRIOR_RATE = 0.7
_PRIOR_WEIGHT = 2.0
# About so many of the last observations of a draft's acceptance count.
_MEMORY = 40.0
# Passes of one size that its cost is taken from.
_COST_WINDOW = 24
# Growth of costs past the greatest known size, against that below it: low, so that a promising size is soon known.
_BOLD_GROWTH = 0.5
# Share of the time that may be lost to trials, and the fewest rounds between two while drafting is on.
_TRIAL_SHARE = 0.01
_TRIAL_GAP_ROUNDS = 16
# What trials may lose in a row, in plain steps: ever (and at the very start), and at the least when a text starts.
_MOST_ALLOWED = 2.0
_ALLOWED_NEW_TEXT = 1.0


@dataclass(frozen=True)
class Round:
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


class AdaptiveDraft:
    """The draft_n of 0..max_n with the most expected tokens per second.

    With p_i the probability that draft i is accepted once those before it were, n drafts are worth
    ``1 + p_1 + p_1 p_2 + ... + p_1..p_n`` tokens and cost n draft steps and a verify pass of n + 1 rows. p_i is a share
    of fading counts that starts from p_(i-1); costs come from the last passes of each size (`_CostTable`).

    Other depths are tried now and then: all of them but the best while drafting is on, a drafting round while it is
    off. Trials are paid from an allowance: it earns a share of the time spent, a trial is charged what it lost against
    the best depth known, and one is made only when the allowance covers its expected loss (while off: every draft
    refused). A trial that gains time refills it, so a head that has become good is back on within a few rounds. A few
    steps' worth is kept, so that a run of bad luck is looked into before drafting stays off. What the head takes to
    catch up after a pause is charged, too: the dearer, the longer to the next trial. A new sequence has nothing to
    catch up and a text of its own, so it starts with the price of a trial at least.
    """

    def __init__(self, max_n: int) -> None:
        if max_n < 1:
            raise UsageError(f"the greatest number of drafts must be 1 or more, got {max_n}")
        self._max_n = max_n
        self._offered = [0.0] * max_n  # fading counts, by draft
        self._accepted = [0.0] * max_n
        self._draft_cost = _CostTable(from_zero=True)  # of n drafts
        self._verify_cost = _CostTable(from_zero=False)  # of a pass of T = n + 1 rows
        self._seen = [0] * (max_n + 1)  # the round in which each depth was last used
        self._rounds = 0
        self._last_trial = 0
        self._allowance_ms = 0.0
        self._granted = _MOST_ALLOWED  # plain steps, at the next choice
        self._best_ms_per_token = 0.0  # at the last choice; 0 before there was one
        self._is_trial = False

    def begin(self) -> None:
        self._granted = max(self._granted, _ALLOWED_NEW_TEXT)

    def draft_n(self, limit: int) -> int:
        limit = min(limit, self._max_n)
        self._is_trial = False
        if limit == 0:
            return 0
        if self._rounds < _OPENING_ROUNDS:
            return 0 if self._rounds % 2 else 1
        ms, tokens = self._expected_ms(limit), self._expected_tokens(limit)
        ms_per_token = [m / t for m, t in zip(ms, tokens, strict=True)]
        best = min(range(limit + 1), key=ms_per_token.__getitem__)
        self._best_ms_per_token = ms_per_token[best]
        if best == 0:
            trial = min(range(1, limit + 1), key=ms_per_token.__getitem__)
            loss_ms = ms[trial] - ms[0]
        else:
            trial = min({0, best - 1, min(best + 1, limit)} - {best}, key=lambda n: (self._seen[n], n))
            loss_ms = ms[trial] - tokens[trial] * ms_per_token[best]
        # A cost known wrongly must not be too dear to find out.
        loss_ms = min(loss_ms, ms[best])
        if self._granted:
            self._allowance_ms = max(self._allowance_ms, self._granted * ms[0])
            self._granted = 0.0
        self._allowance_ms = min(self._allowance_ms, _MOST_ALLOWED * ms[best])
        waited = best == 0 or self._rounds - self._last_trial >= _TRIAL_GAP_ROUNDS
        self._is_trial = waited and self._allowance_ms >= loss_ms
        return trial if self._is_trial else best

    def observe(self, done: Round) -> None:
        n, round_ms = done.draft_n, done.draft_ms + done.verify_ms
        self._rounds += 1
        self._seen[n] = self._rounds
        self._verify_cost.add(n + 1, done.verify_ms)
        # After a pause the head has many rows to catch up with: no measure of what drafting costs from then on.
        if n and (done.n_rows <= self._max_n + 1 or not self._draft_cost.knows(n)):
            self._draft_cost.add(n, done.draft_ms)
        for i in range(min(done.n_accept + 1, n)):
            self._offered[i] += 1.0 - self._offered[i] / _MEMORY
            self._accepted[i] += (i < done.n_accept) - self._accepted[i] / _MEMORY
        self._allowance_ms += _TRIAL_SHARE * round_ms
        if self._is_trial:
            self._last_trial = self._rounds
            # A pass that was held up is charged as one wasted, no more.
            lost_ms = done.verify_ms - (done.n_accept + 1) * self._best_ms_per_token
            self._allowance_ms -= done.draft_ms + min(lost_ms, self._best_ms_per_token)
        elif n == 0:
            self._allowance_ms -= done.draft_ms  # rows fed so that the head can come back

    def _expected_tokens(self, largest: int) -> list[float]:
        """Of rounds with 0..largest drafts."""
        rate, reached, tokens = _PRIOR_RATE, 1.0, [1.0]
        for offered, accepted in zip(self._offered[:largest], self._accepted[:largest], strict=True):
            rate = (accepted + _PRIOR_WEIGHT * rate) / (offered + _PRIOR_WEIGHT)
            reached *= rate
            tokens.append(tokens[-1] + reached)
        return tokens

    def _expected_ms(self, largest: int) -> list[float]:
        """Of rounds with 0..largest drafts."""
        verify_ms = self._verify_cost.up_to(self._max_n + 1)[1:]
        return [v + d for v, d in zip(verify_ms[: largest + 1], self._draft_cost.up_to(largest), strict=True)]


class _CostTable:
    """Cost in ms by size, from the last few measurements of each size.

    The first measurement of a size is left out, for it pays set-up. A cost is the mean of the rest, the greatest few
    cut down to the next: a rare delay must not put a size out of the running, but on a busy machine delays come in
    proportion to the work, and a median or quartile would count them for the long passes alone. Sizes not known yet
    lie on the line through known ones; from_zero: size 0 is free.
    """

    def __init__(self, from_zero: bool) -> None:
        self._met: set[int] = set()
        self._measured: dict[int, deque[float]] = {0: deque([0.0])} if from_zero else {}

    def add(self, size: int, cost_ms: float) -> None:
        if size in self._met:
            self._measured.setdefault(size, deque(maxlen=_COST_WINDOW)).append(cost_ms)
        self._met.add(size)

    def knows(self, size: int) -> bool:
        return size in self._measured

    def up_to(self, largest: int) -> list[float]:
        """The costs of sizes 0..largest. More work never takes less time: no size costs more than a greater one."""
        costs = [self._own_ms(size) for size in range(largest + 1)]
        for size in reversed(range(largest)):
            costs[size] = min(costs[size], costs[size + 1])
        return costs

    def _own_ms(self, size: int) -> float:
        if size == 0:  # never a guess: below zero it would make plain decoding look cheap
            return 0.0
        n_measured = len(self._measured.get(size, ()))
        if n_measured > 2:
            return self._typical(size)
        others = sorted(set(self._measured) - {size})
        if n_measured == 0:
            return self._guess(size, others)
        # One or two measurements may all have met a delay: believe the other sizes if they promise better.
        return self._typical(size) if len(others) < 2 else min(self._typical(size), self._guess(size, others))

    def _guess(self, size: int, known: list[int]) -> float:
        """From other sizes: between the nearest, or past them along the line through the least and the greatest."""
        if len(known) < 2:
            return self._typical(known[0]) if known else 0.0
        low, high = known[0], known[-1]
        if low < size < high:
            low = max(s for s in known if s < size)
            high = min(s for s in known if s > size)
        slope = max(0.0, (self._typical(high) - self._typical(low)) / (high - low))
        if size > high:
            return self._typical(high) + _BOLD_GROWTH * slope * (size - high)
        return max(0.0, self._typical(low) + slope * (size - low))

    def _typical(self, size: int) -> float:
        ordered = sorted(self._measured[size])
        n_cut = (len(ordered) + 4) // 8
        kept = ordered[: len(ordered) - n_cut]
        return (sum(kept) + n_cut * kept[-1]) / len(ordered)
