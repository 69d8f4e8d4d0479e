"""Generation without engines: a controller over random acceptance and given costs. No clock but the simulation's.

Costs are in units of a plain decode step. Draft i of a round that starts at token t is accepted if those before it were
and a random number of (t, i) is below the process's chance, so every number of drafts meets the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from runtime.controller import Controller, Round
from runtime.engine import PassCosts

MAX_N = 7

# (random numbers, tokens) -> chance of each draft of a round that starts at each token, [tokens, MAX_N].
Process = Callable[[np.random.Generator, int], np.ndarray]


@dataclass(frozen=True)
class Machine:
    """verify: of passes of 1.. rows; first, draft: of the first and of each further step of a draft; off: a plain
    round's share for rows that the head will want; feed, feed_row: a pass of the head over waiting rows, which a draft
    of more than MAX_N + 1 rows needs, too; guess: what it takes beyond that to guess the tokens after its last rows."""

    verify: tuple[float, ...]
    first: float
    draft: float
    off: float = 0.001
    feed: float = 0.45
    feed_row: float = 0.0004
    guess: float = 0.1
    chunk: int = 1024

    def draft_cost(self, n: int) -> float:
        return self.first + (n - 1) * self.draft if n else 0.0

    def guess_cost(self, rows: int) -> float:
        return self.guess + (self.first if rows <= MAX_N + 1 else self.feed + rows * self.feed_row)

    def profile(self, max_n: int) -> PassCosts:
        return PassCosts(self.verify[: max_n + 1], tuple(map(self.draft_cost, range(max_n + 1))))


def linear(row: float, draft: float) -> Machine:
    """A machine on which every further row costs the same."""
    return Machine(tuple(1 + row * n for n in range(MAX_N + 1)), draft, draft, 0.002, 0.05, 0.004, 0.02, 256)


def _of_ms(*verify: float) -> tuple[float, ...]:
    return tuple(ms / verify[0] for ms in verify)


# An H200 as measured with the whole LM head and with one of 32768 rows in Q4_K; and with passes that cost more.
_MEASURED = _of_ms(1.665, 1.762, 1.801, 1.844, 2.034, 2.058, 2.098, 2.131)
_DEARER = _of_ms(1.758, 2.141, 2.196, 2.233, 2.527, 2.555, 2.611, 2.637)
GPUS = {
    "measured": Machine(_MEASURED, 0.170, 0.155),
    "measured, cut head": Machine(_MEASURED, 0.068, 0.053, feed=0.37),
    "dearer": Machine(_DEARER, 0.168, 0.158),
    "dearer, cut head": Machine(_DEARER, 0.089, 0.077, feed=0.37),
}
# A CPU, and one on which even a perfect head gains next to nothing.
CPUS = {"cpu": linear(0.35, 0.08), "no gain": linear(0.8, 0.1)}


def constant(*chances: float) -> Process:
    """The same at every token; by draft, the last one for all that follow."""
    row = [*chances, *[chances[-1]] * MAX_N][:MAX_N]
    return lambda rng, n: np.tile(np.array(row), (n, 1))


def switching(chances: Sequence[float], every: int) -> Process:
    """Each chance in turn, for so many tokens."""
    return lambda rng, n: _rows(np.array(chances)[(np.arange(n) // every) % len(chances)])


def bursts(high: float, low: float, mean_high: int, mean_low: int) -> Process:
    """Two kinds of text in turn, of random lengths."""

    def process(rng: np.random.Generator, n: int) -> np.ndarray:
        chances: list[float] = []
        while len(chances) < n:
            chances += [high] * int(rng.geometric(1 / mean_high)) + [low] * int(rng.geometric(1 / mean_low))
        return _rows(np.array(chances[:n]))

    return process


def _rows(chances: np.ndarray) -> np.ndarray:
    return np.repeat(chances[:, None], MAX_N, axis=1)


def accepted_runs(process: Process, n_tokens: int, seed: int) -> list[int]:
    """For a round that starts at each token, how many of MAX_N drafts are accepted."""
    rng = np.random.default_rng(seed)
    chances = process(rng, n_tokens)
    return np.cumprod(rng.random(chances.shape) < chances, axis=1).sum(axis=1).tolist()


def fixed_cost(machine: Machine, runs: Sequence[int], n: int) -> float:
    """Of always drafting n, as far as the tokens left allow it, without any noise."""
    cost, done = 0.0, 0
    while done < len(runs):
        drafts = min(n, len(runs) - done - 1)
        cost += machine.verify[drafts] + machine.draft_cost(drafts)
        done += min(runs[done], drafts) + 1
    return cost


@dataclass
class Outcome:
    cost: float = 0.0
    used: list[int] = field(default_factory=list)
    judged: int = 0  # times that the head's guesses were compared


def simulate(
    controller: Controller,
    machine: Machine,
    runs: Sequence[int],
    seed: int = 0,
    *,
    limit: int = MAX_N,
    jitter: float = 0.02,
    delayed: float = 0.0,
    guesses: bool = True,
) -> Outcome:
    """One sequence of len(runs) tokens. jitter: relative deviation of times; delayed: share of parts that take six
    times as long. guesses: whether the head can be asked for them."""
    controller.begin()
    rng, outcome = np.random.default_rng(seed), Outcome()
    noise = np.clip(rng.normal(1, jitter, (len(runs), 2)), 0.8, 1.25) + 5.0 * (rng.random((len(runs), 2)) < delayed)
    done, waiting = 0, 1
    for draft_noise, verify_noise in noise.tolist():
        if guesses and controller.wants_guesses(waiting - 1):
            guess_ms = machine.guess_cost(waiting - 1) * draft_noise
            right = [run > 0 for run in runs[max(0, done - min(waiting - 1, MAX_N + 1)) : done]]
            controller.judge(right, waiting - 1, guess_ms)
            outcome.cost, outcome.judged, waiting = outcome.cost + guess_ms, outcome.judged + 1, 1
        n = controller.draft_n(min(limit, len(runs) - done - 1))
        n_accept = min(runs[done], n)
        draft, n_rows = machine.draft_cost(n), waiting if n else 0
        if waiting > (MAX_N + 1 if n else machine.chunk):
            draft, n_rows = draft + machine.feed + waiting * machine.feed_row, waiting
        waiting = n_accept + 1 if n else 1 + waiting * (n_rows == 0)
        draft_ms = (draft if n or n_rows else machine.off) * draft_noise
        verify_ms = machine.verify[n] * verify_noise
        controller.observe(Round(n, n_accept, n_rows, draft_ms, verify_ms))
        outcome.used.append(n)
        outcome.cost += draft_ms + verify_ms
        done += n_accept + 1
        if done >= len(runs):
            break
    return outcome
