"""What a round costs by its number of drafts: measured beforehand where the backend can, corrected by every round."""

from __future__ import annotations

from itertools import accumulate

from runtime.engine import PassCosts

# How far a round moves what is known of the machine's speed, be it a little slower than expected or much.
_LEVEL_STEP = 1.002
# Rounds over which the cost of one size against that speed is averaged.
_SIZE_ROUNDS = 32
# How many measurements a cost that was measured beforehand weighs.
_PROFILE_WEIGHT = 3
# Of the first measurements of a size the least counts: they pay set-up, and delays only add.
_FIRST_MEASUREMENTS = 3
# A single measurement moves a known cost as if it had been so many times the cost, or one in so many, at the most.
_GREATEST_SURPRISE = 1.25
# Growth of costs past the greatest known size, against that below it: low, so that a promising size is soon known.
_BOLD_GROWTH = 0.5
# Rounds between two looks at costs that change slowly.
_REFRESH_ROUNDS = 8


class RoundCosts:
    """Costs of rounds with 0..max_n drafts, in units that are the same for all of them, near ms.

    A cost is a speed of the machine, common to all sizes, times a cost of the size: so what was measured long ago stays
    comparable with what is measured now, when clocks or the context have changed. Both follow the measurements slowly,
    and no single one far: a pass that was held up must not put its size out of the running.
    """

    def __init__(self, max_n: int, profile: PassCosts | None = None) -> None:
        """profile: of at least max_n drafts; None: nothing is known beforehand."""
        sizes = max_n + 1
        self._verify = _SizeCosts(sizes, profile.verify_ms if profile else None)
        self._draft = _SizeCosts(sizes, profile.draft_ms if profile else None, free_first=True)
        self._level = 1.0
        self._num_rounds = 0
        self._costs: list[float] = []  # as last looked at

    def by_draft_n(self) -> list[float]:
        """Of rounds with 0..max_n drafts."""
        if not self._costs:
            self._costs = [v + d for v, d in zip(self._verify.all(), self._draft.all(), strict=True)]
        return self._costs

    def of_ms(self, ms: float) -> float:
        """A time as measured now, in units of the costs."""
        return ms / self._level

    def excess(self, n: int, draft_ms: float) -> float:
        """What drafting took beyond what n drafts cost, 0 where that is not known."""
        known = self._draft.own[n]
        return max(0.0, draft_ms / self._level - known) if known else 0.0

    def add(self, n: int, draft_ms: float, verify_ms: float, caught_up: bool) -> None:
        """A round as measured. caught_up: the head took many rows on the way, which is in draft_ms, too."""
        known = self._verify.own[n] * self._level
        if known:
            self._level *= _LEVEL_STEP if verify_ms > known else 1.0 / _LEVEL_STEP
        is_new = self._verify.add(n, verify_ms / self._level)
        if n and not (caught_up and self._draft.own[n]):
            is_new |= self._draft.add(n, draft_ms / self._level)
        self._num_rounds += 1
        if is_new or self._num_rounds % _REFRESH_ROUNDS == 0:
            self._costs = []


class _SizeCosts:
    """Costs by size. Without a profile, a size met less than three times is believed no dearer than the line through
    others says."""

    def __init__(self, sizes: int, profile: tuple[float, ...] | None, free_first: bool = False) -> None:
        self.own = list(profile[:sizes]) if profile else [0.0] * sizes  # 0: not known
        self._count = [_PROFILE_WEIGHT if profile else 0] * sizes
        self._has_profile, self._is_first_free = profile is not None, free_first
        if free_first:
            self._count[0] = _PROFILE_WEIGHT

    def add(self, size: int, cost: float) -> bool:
        """Whether the size was hardly known before."""
        met = self._count[size]
        self._count[size] = min(met + 1, _SIZE_ROUNDS)
        own = self.own[size]
        if met < _FIRST_MEASUREMENTS:
            self.own[size] = cost if met == 0 else min(cost, own)
            return True
        cost = min(max(cost, own / _GREATEST_SURPRISE), _GREATEST_SURPRISE * own)
        self.own[size] = own + (cost - own) / self._count[size]
        return met == _FIRST_MEASUREMENTS

    def all(self) -> list[float]:
        """Of every size. More work never takes less time. Where two measurements say so, they are wrong by a delay, and
        the lesser one counts; where a profile does, it was made in other conditions, and the greater one counts."""
        if self._has_profile:
            return list(accumulate(self.own, max))
        known = [size for size, count in enumerate(self._count) if count]
        costs = [self._estimate(size, known) for size in range(len(self.own))]
        return list(accumulate(reversed(costs), min))[::-1]

    def _estimate(self, size: int, known: list[int]) -> float:
        count = self._count[size]
        if count > 2 or (size == 0 and self._is_first_free):
            return self.own[size]
        others = [other for other in known if other != size]
        if count == 0:
            return self._guess(size, others)
        # One or two measurements may all have met a delay: believe the other sizes if they promise better.
        return self.own[size] if len(others) < 2 else min(self.own[size], self._guess(size, others))

    def _guess(self, size: int, known: list[int]) -> float:
        """From other sizes: between the nearest, or past them along the line through the least and the greatest."""
        if len(known) < 2:
            return self.own[known[0]] if known else 0.0
        low, high = known[0], known[-1]
        if low < size < high:
            low = max(s for s in known if s < size)
            high = min(s for s in known if s > size)
        slope = max(0.0, (self.own[high] - self.own[low]) / (high - low))
        if size > high:
            return self.own[high] + _BOLD_GROWTH * slope * (size - high)
        return max(0.0, self.own[low] + slope * (size - low))
