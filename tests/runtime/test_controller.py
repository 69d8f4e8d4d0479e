"""The adaptive controller against simulated costs: no clock but the simulation's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from engines.errors import UsageError
from runtime.controller import AdaptiveDraft, Controller, FixedDraft, Round

PLAIN_MS = 1.0


@dataclass(frozen=True)
class Machine:
    """Costs in units of a plain decode step: each further verify row, one draft step, one row the head catches up."""

    row_ms: float
    draft_ms: float
    catch_up_ms: float


# Rows nearly free and a light head; a heavier head; rows that cost (a CPU); rows that cost nearly a plain step each.
MACHINES = {
    "flat": Machine(0.01, 0.05, 0.001),
    "gpu": Machine(0.03, 0.15, 0.002),
    "cpu": Machine(0.35, 0.08, 0.005),
    "no gain": Machine(0.8, 0.1, 0.005),
}


@dataclass
class Outcome:
    total_ms: float = 0.0
    used: list[int] = field(default_factory=list)


def simulate(
    controller: Controller,
    machine: Machine,
    rate: Callable[[int], float],
    n_tokens: int,
    seed: int = 0,
    slow_rounds: float = 0.0,
    limit: int = 8,
) -> Outcome:
    """Generate n_tokens; rate(tokens so far) = chance of each draft. A slow round takes six times as long."""
    rng = np.random.default_rng(seed)
    outcome, done_tokens, waiting = Outcome(), 0, 1
    while done_tokens < n_tokens:
        n = controller.draft_n(min(limit, n_tokens - done_tokens - 1))
        outcome.used.append(n)
        n_accept = 0
        while n_accept < n and rng.random() < rate(done_tokens):
            n_accept += 1
        jitter = rng.uniform(0.95, 1.05, 2) + 5.0 * (rng.random(2) < slow_rounds)
        draft_ms = (n * machine.draft_ms + waiting * machine.catch_up_ms) * jitter[0] if n else 0.0
        verify_ms = (PLAIN_MS + n * machine.row_ms) * jitter[1]
        controller.observe(Round(n, n_accept, waiting if n else 0, draft_ms, verify_ms))
        waiting = n_accept + 1 + (0 if n else waiting)
        outcome.total_ms += draft_ms + verify_ms
        done_tokens += n_accept + 1
    return outcome


def mean_ms(make: Callable[[], Controller], machine: Machine, rate: Callable[[int], float], n_tokens: int) -> float:
    return float(np.mean([simulate(make(), machine, rate, n_tokens, seed).total_ms for seed in range(4)]))


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("machine", MACHINES)
def test_never_slower_than_plain_and_close_to_the_best_fixed_depth(machine: str, acceptance: float) -> None:
    costs, n_tokens = MACHINES[machine], 600
    adaptive = mean_ms(lambda: AdaptiveDraft(3), costs, lambda _: acceptance, n_tokens)
    fixed = [mean_ms(lambda n=n: FixedDraft(n), costs, lambda _: acceptance, n_tokens) for n in range(4)]  # type: ignore[misc]
    assert adaptive < 1.025 * fixed[0]
    assert adaptive < 1.09 * min(fixed)


@pytest.mark.parametrize("machine", MACHINES)
def test_acceptance_that_changes_on_the_way(machine: str) -> None:
    def rate(n_done: int) -> float:
        return (0.9, 0.0, 0.9, 0.3)[min(n_done // 400, 3)]

    costs, n_tokens = MACHINES[machine], 1600
    adaptive = mean_ms(lambda: AdaptiveDraft(3), costs, rate, n_tokens)
    fixed = [mean_ms(lambda n=n: FixedDraft(n), costs, rate, n_tokens) for n in range(4)]  # type: ignore[misc]
    assert adaptive < 1.025 * fixed[0]
    assert adaptive < 1.06 * min(fixed)


def test_off_costs_little_and_on_comes_back() -> None:
    costs = MACHINES["gpu"]

    def rate(n_done: int) -> float:
        return 0.9 if n_done >= 2000 else 0.0

    for seed in range(8):
        outcome = simulate(AdaptiveDraft(3), costs, rate, 4000, seed)
        off, on = outcome.used[20:1900], outcome.used[-400:]
        assert 0 < sum(n > 0 for n in off) < 0.06 * len(off)  # trials go on, rarely
        assert sum(n >= 2 for n in on) > 0.9 * len(on)
        # 2000 plain tokens, then about 3.4 tokens a round of 1.54: nothing else is paid but trials and the switch
        assert outcome.total_ms < 1.015 * 2000 + 2000 / 2.0


def test_a_new_sequence_gives_an_idle_head_a_chance() -> None:
    """Even where catching up is so dear that trials within a sequence have all but ended."""
    dear = Machine(0.03, 0.15, 0.1)
    again = []
    for seed in range(16):
        controller = AdaptiveDraft(3)
        off = simulate(controller, dear, lambda _: 0.0, 1000, seed)
        assert sum(n > 0 for n in off.used[500:]) <= 2
        controller.begin()
        assert controller.draft_n(8) > 0
        controller.observe(Round(1, 1, 2, 0.35, 1.03))
        again.append(simulate(controller, dear, lambda _: 0.9, 300, seed).total_ms)
    assert np.median(again) < 220
    assert max(again) < 310


def test_one_slow_pass_does_not_decide() -> None:
    for seed in range(8):
        outcome = simulate(AdaptiveDraft(3), MACHINES["gpu"], lambda _: 0.9, 1000, seed, slow_rounds=0.03)
        assert np.mean(np.array(outcome.used[50:]) >= 2) > 0.7


def test_a_busy_machine_holds_up_long_passes_more_often() -> None:
    """Delays in proportion to the work leave the order of the depths as it was, though most plain passes meet none."""
    costs, shares = MACHINES["cpu"], []
    for seed in range(12):
        rng, controller, used = np.random.default_rng(seed), AdaptiveDraft(2), []
        for _ in range(300):
            n = controller.draft_n(2)
            used.append(n)
            n_accept = int(np.argmin([*(rng.random(n) < 0.85), False]))
            draft_ms, verify_ms = n * costs.draft_ms, PLAIN_MS + n * costs.row_ms
            held_up = rng.poisson([0.3 * draft_ms, 0.3 * verify_ms]) * 4.0
            controller.observe(Round(n, n_accept, n_accept + 1, draft_ms + held_up[0], verify_ms + held_up[1]))
        shares.append(np.mean(np.array(used[100:]) > 0))
    assert np.mean(shares) > 0.85


def test_first_calls_are_slow_everywhere() -> None:
    """An engine that sets up each pass size at its first use, at the price of 30 plain steps."""
    costs = MACHINES["gpu"]
    controller, seen, used = AdaptiveDraft(3), set(), []
    for _ in range(200):
        n = controller.draft_n(8)
        setup_ms = 0.0 if n in seen else 30.0
        seen.add(n)
        used.append(n)
        controller.observe(Round(n, n, n + 1, n * costs.draft_ms, PLAIN_MS + n * costs.row_ms + setup_ms))
    assert used[-50:].count(3) > 40


def test_depth_follows_what_a_row_costs() -> None:
    def typical(machine: Machine) -> float:
        return float(np.median(simulate(AdaptiveDraft(7), machine, lambda _: 0.8, 1500).used))

    assert typical(MACHINES["flat"]) >= 5
    assert typical(MACHINES["cpu"]) in (1, 2, 3)
    assert typical(MACHINES["no gain"]) == 0


@pytest.mark.parametrize("limit", [0, 1, 2, 100])
def test_the_limit_holds_in_every_round(limit: int) -> None:
    outcome = simulate(AdaptiveDraft(3), MACHINES["flat"], lambda _: 0.9, 200, limit=limit)
    assert min(outcome.used) >= 0 and max(outcome.used) <= min(limit, 3)


def test_a_clock_that_stands_still_is_no_trouble() -> None:
    controller = AdaptiveDraft(3)
    for _ in range(50):
        n = controller.draft_n(3)
        controller.observe(Round(n, n, 1, 0.0, 0.0))


def test_choices_are_a_function_of_what_was_observed() -> None:
    runs = [simulate(AdaptiveDraft(3), MACHINES["cpu"], lambda _: 0.7, 300, seed=3).used for _ in range(2)]
    assert runs[0] == runs[1]


def test_fixed_depth() -> None:
    assert [FixedDraft(3).draft_n(limit) for limit in (0, 2, 3, 9)] == [0, 2, 3, 3]
    assert FixedDraft(0).draft_n(9) == 0


@pytest.mark.parametrize("make", [lambda: FixedDraft(-1), lambda: AdaptiveDraft(0), lambda: AdaptiveDraft(-1)])
def test_bad_depths(make: Callable[[], Controller]) -> None:
    with pytest.raises(UsageError, match="number of drafts"):
        make()
