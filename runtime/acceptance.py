"""How likely each draft of a round is to be accepted, from what became of earlier ones."""

from __future__ import annotations

import math

# Before anything is known, and how many observations that guess weighs.
_PRIOR_RATE = 0.65
_PRIOR_WEIGHT = 2.0
# For a later draft the rate of the one before it is the guess, and weighs more.
_CHAIN_WEIGHT = 8.0
# About so many of a draft's last observations count: for what is believed, and for noticing that it has changed.
_LONG_KEEP = 1.0 - 1.0 / 160.0
_SHORT_KEEP = 1.0 - 1.0 / 12.0
# The long memory is replaced by the short one when that has predicted so many times as well.
_CHANGE_ODDS = 4.5
# What is known of a draft that is no longer made is forgotten over about so many rounds.
_IDLE_ROUNDS = 60.0
_LONGEST_IDLE = 1000
# No more observations than this are carried into a new text.
_NEW_TEXT_WEIGHT = 12.0


class AcceptanceRates:
    """Of drafts 1..max_n: the chance of each to be accepted once those before it were.

    Two memories, a long and a short one, are shares of fading counts. The long one is believed, until the short one has
    clearly predicted better: then text or head have changed, and the long one starts anew from it.
    """

    def __init__(self, max_n: int) -> None:
        # Fading counts by draft: [offered, accepted] of the long memory, [offered, accepted] of the short one.
        self._counts = [[0.0] * 4 for _ in range(max_n)]
        self._guess_weights = [_PRIOR_WEIGHT, *[_CHAIN_WEIGHT] * (max_n - 1)]
        self._made = [0] * max_n  # the round in which each draft was last made
        self._round = 0
        self._odds = 1.0  # how many times as well the short memory has predicted, never below 1

    def new_text(self) -> None:
        """The drafts from now on are of another text: what is known is a hint only."""
        for counts in self._counts:
            for offered in (0, 2):
                factor = min(1.0, _NEW_TEXT_WEIGHT / max(counts[offered], 1e-9))
                counts[offered] *= factor
                counts[offered + 1] *= factor

    def rates(self) -> list[float]:
        """Expected now, of all drafts; between 0 and 1, both excluded."""
        rate, rates = _PRIOR_RATE, []
        for made, guess, (offered, accepted, _, _) in zip(self._made, self._guess_weights, self._counts, strict=True):
            if made != self._round:
                guess *= math.exp(min(self._round - made, _LONGEST_IDLE) / _IDLE_ROUNDS)
            rate = (accepted + guess * rate) / (offered + guess)
            rates.append(rate)
        return rates

    def observe(self, n: int, n_accept: int) -> None:
        """A round made n drafts, of which the first n_accept were accepted."""
        before = self._round
        self._round += 1
        if n == 0:
            return
        believed = suspected = _PRIOR_RATE
        for i, counts in enumerate(self._counts[:n]):
            if self._made[i] != before:
                weight = math.exp((self._made[i] - before) / _IDLE_ROUNDS)
                counts[:] = [weight * count for count in counts]
            self._made[i] = self._round
            if i > n_accept:
                continue
            guess = self._guess_weights[i]
            offered, accepted, lately_offered, lately_accepted = counts
            believed = (accepted + guess * believed) / (offered + guess)
            suspected = (lately_accepted + guess * suspected) / (lately_offered + guess)
            right = i < n_accept
            self._odds *= suspected / believed if right else (1.0 - suspected) / (1.0 - believed)
            counts[0] = offered * _LONG_KEEP + 1.0
            counts[1] = accepted * _LONG_KEEP + right
            counts[2] = lately_offered * _SHORT_KEEP + 1.0
            counts[3] = lately_accepted * _SHORT_KEEP + right
        if self._odds > _CHANGE_ODDS:
            for counts in self._counts:
                counts[:2] = counts[2:]
            self._odds = 1.0
        self._odds = max(1.0, self._odds)
