"""The adaptive controller against simulated costs and acceptance: never much slower than plain decoding, and nearly as
fast as the best fixed number of drafts, or faster, where acceptance changes on the way."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from engines.errors import UsageError
from runtime.controller import AdaptiveDraft, Controller, FixedDraft, Round
from tests.runtime.draft_simulator import (
    CPUS,
    GPUS,
    MAX_N,
    Machine,
    Process,
    accepted_runs,
    bursts,
    constant,
    fixed_cost,
    linear,
    simulate,
    switching,
)

# Texts to average over, by length in tokens.
N_TEXTS = {128: 60, 200: 40, 1000: 12, 5000: 3}

CONSTANT = {f"{p}": constant(p) for p in (0.0, 0.3, 0.6, 0.9)}
STEADY = {**CONSTANT, "falling": constant(0.85, 0.7, 0.5, 0.35, 0.25, 0.15, 0.1)}
CHANGING = {
    "every 250 tokens": switching((0.9, 0.0, 0.6, 0.3), 250),
    "from 0 to 0.9": switching((0.0, 0.9), 600),
    "from 0.9 to 0": switching((0.9, 0.0), 600),
    "bursts": bursts(0.9, 0.05, 40, 40),
    "rare bursts": bursts(0.8, 0.0, 100, 300),
}
# Too quick to follow: drafting at a fixed depth comes out as well.
RESTLESS = {"every 50 tokens": switching((0.9, 0.0, 0.6, 0.3), 50), "short bursts": bursts(0.9, 0.1, 15, 15)}


def ratios(
    make: Callable[[], Controller],
    machine: Machine,
    process: Process,
    n_tokens: int,
    max_n: int = MAX_N,
    guesses: bool = True,
) -> tuple[float, float]:
    """(plain, best fixed number of drafts) against the controller: above 1 it is faster. Each text anew."""
    adaptive, fixed = 0.0, np.zeros(max_n + 1)
    for seed in range(N_TEXTS[n_tokens]):
        runs = accepted_runs(process, n_tokens, seed)
        adaptive += simulate(make(), machine, runs, seed, guesses=guesses).cost
        fixed += [fixed_cost(machine, runs, n) for n in range(max_n + 1)]
    return float(fixed[0] / adaptive), float(fixed.min() / adaptive)


@pytest.mark.parametrize("n_tokens", [200, 1000, 5000])
@pytest.mark.parametrize("machine", GPUS)
def test_never_slower_than_plain_and_close_to_the_best(machine: str, n_tokens: int) -> None:
    costs = GPUS[machine]
    for name, process in {**STEADY, **CHANGING}.items():
        plain, best = ratios(lambda: AdaptiveDraft(MAX_N, costs.profile(MAX_N)), costs, process, n_tokens)
        assert plain >= 0.98, name
        assert best >= 0.97, name
    for name, process in RESTLESS.items():
        plain, best = ratios(lambda: AdaptiveDraft(MAX_N, costs.profile(MAX_N)), costs, process, n_tokens)
        assert plain >= 0.985 and best >= 0.95, name


@pytest.mark.parametrize(("n_tokens", "least"), [(128, 0.98), (1000, 0.99), (5000, 0.99)])
@pytest.mark.parametrize("machine", GPUS)
def test_a_head_that_is_never_right(machine: str, n_tokens: int, least: float) -> None:
    costs = GPUS[machine]
    plain, _ = ratios(lambda: AdaptiveDraft(MAX_N, costs.profile(MAX_N)), costs, CONSTANT["0.0"], n_tokens)
    assert plain >= least


@pytest.mark.parametrize("n_tokens", [200, 1000])
def test_engines_that_tell_no_guesses(n_tokens: int) -> None:
    """Rounds of trial instead: slower to notice that a head has become useful, but no dearer."""
    costs = GPUS["measured"]
    for name, process in {**CONSTANT, **CHANGING}.items():
        plain, best = ratios(
            lambda: AdaptiveDraft(MAX_N, costs.profile(MAX_N)), costs, process, n_tokens, guesses=False
        )
        assert plain >= 0.97 and best >= 0.96, name


@pytest.mark.parametrize("n_tokens", (200, 1000))
@pytest.mark.parametrize("machine", CPUS)
def test_with_costs_to_be_found_out(machine: str, n_tokens: int) -> None:
    for name, process in {**STEADY, **CHANGING}.items():
        plain, best = ratios(lambda: AdaptiveDraft(3), CPUS[machine], process, n_tokens, max_n=3)
        assert plain >= 0.975, name
        assert best >= 0.96, name


@pytest.mark.parametrize("acceptance", CONSTANT)
def test_texts_of_one_session_learn_from_those_before(acceptance: str) -> None:
    """Ten texts of 200 tokens, the first not counted: no opening is paid twice."""
    costs, totals = GPUS["measured"], np.zeros(3)
    for session in range(4):
        controller = AdaptiveDraft(MAX_N, costs.profile(MAX_N))
        for text in range(10):
            runs = accepted_runs(CONSTANT[acceptance], 200, 10 * session + text)
            cost = simulate(controller, costs, runs, text).cost
            fixed = [fixed_cost(costs, runs, n) for n in range(MAX_N + 1)]
            if text:
                totals += [cost, fixed[0], min(fixed)]
    assert totals[1] / totals[0] >= 0.985
    assert totals[2] / totals[0] >= 0.95  # of the best for each text, known only afterwards


def test_a_text_unlike_the_one_before() -> None:
    """What was learnt is given up soon."""
    costs = GPUS["measured"]
    for first, second, least in (("0.9", "0.0", 0.97), ("0.0", "0.9", 2.0)):
        plain = adaptive = 0.0
        for seed in range(10):
            controller = AdaptiveDraft(MAX_N, costs.profile(MAX_N))
            simulate(controller, costs, accepted_runs(CONSTANT[first], 1000, seed), seed)
            adaptive += simulate(controller, costs, accepted_runs(CONSTANT[second], 1000, seed), seed).cost
            plain += 1000
        assert plain / adaptive >= least


def test_off_costs_little_and_on_comes_back() -> None:
    costs = GPUS["measured"]
    for seed in range(4):
        controller = AdaptiveDraft(3, costs.profile(3))
        outcome = simulate(controller, costs, accepted_runs(switching((0.0, 0.9), 2000), 4000, seed), seed)
        off, on = outcome.used[20:1900], outcome.used[-400:]
        assert outcome.judged > 10 and sum(n > 0 for n in off) < 0.01 * len(off)  # it is looked at, rarely
        assert sum(n >= 2 for n in on) > 0.9 * len(on)


def test_a_new_text_gives_an_idle_head_a_chance() -> None:
    """Even where catching up is so dear that trials within a text have all but ended."""
    dear, costs = Machine(GPUS["measured"].verify, 0.168, 0.158, feed=20.0), []
    for seed in range(8):
        controller = AdaptiveDraft(3, dear.profile(3))
        off = simulate(controller, dear, accepted_runs(CONSTANT["0.0"], 1000, seed), seed)
        assert sum(n > 0 for n in off.used[200:]) <= 2
        on = simulate(controller, dear, accepted_runs(CONSTANT["0.9"], 300, seed), seed)
        assert on.used[0] > 0
        costs.append(on.cost)
    assert np.median(costs) < 200 and max(costs) < 330


def test_one_slow_pass_does_not_decide() -> None:
    for costs in (None, GPUS["measured"].profile(3)):
        for seed in range(8):
            runs = accepted_runs(CONSTANT["0.9"], 1000, seed)
            outcome = simulate(AdaptiveDraft(3, costs), GPUS["measured"], runs, seed, delayed=0.03)
            assert np.mean(np.array(outcome.used[50:]) >= 2) > 0.7


def test_a_busy_machine_holds_up_long_passes_more_often() -> None:
    """Delays in proportion to the work leave the order of the depths as it was, though most plain passes meet none."""
    costs, shares = CPUS["cpu"], []
    for seed in range(12):
        rng, controller, used = np.random.default_rng(seed), AdaptiveDraft(2), []
        for _ in range(300):
            n = controller.draft_n(2)
            used.append(n)
            n_accept = int(np.argmin([*(rng.random(n) < 0.85), False]))
            draft_ms, verify_ms = costs.draft_cost(n), costs.verify[n]
            held_up = rng.poisson([0.3 * draft_ms, 0.3 * verify_ms]) * 4.0
            controller.observe(Round(n, n_accept, n_accept + 1, draft_ms + held_up[0], verify_ms + held_up[1]))
        shares.append(np.mean(np.array(used[100:]) > 0))
    assert np.mean(shares) > 0.85


def test_first_calls_are_slow_everywhere() -> None:
    """An engine that sets up each pass size at its first use, at the price of 30 plain steps."""
    costs = GPUS["measured"]
    for profile in (None, costs.profile(3)):
        controller, seen, used = AdaptiveDraft(3, profile), set(), []
        for _ in range(200):
            n = controller.draft_n(8)
            setup_ms = 0.0 if n in seen else 30.0
            seen.add(n)
            used.append(n)
            controller.observe(Round(n, n, n + 1, costs.draft_cost(n), costs.verify[n] + setup_ms))
        assert used[-50:].count(3) > 40


def test_a_profile_that_is_wrong_is_corrected() -> None:
    """Rows that seemed free cost nearly a plain step each, as where tokens are chosen on the host."""
    runs = accepted_runs(CONSTANT["0.6"], 1000, 0)
    truth, told = linear(0.8, 0.1), GPUS["measured, cut head"]
    controller = AdaptiveDraft(3, told.profile(3))
    assert simulate(controller, truth, runs).cost < 1.15 * len(runs)
    again = simulate(controller, truth, runs)
    assert np.mean(np.array(again.used) == 0) > 0.9
    assert again.cost < 1.03 * len(runs)


def test_depth_follows_what_a_row_costs() -> None:
    def typical(machine: Machine) -> float:
        runs = accepted_runs(constant(0.8), 1500, 0)
        return float(np.median(simulate(AdaptiveDraft(7), machine, runs).used))

    assert typical(linear(0.01, 0.05)) >= 5
    assert typical(CPUS["cpu"]) in (1, 2, 3)
    assert typical(CPUS["no gain"]) == 0


@pytest.mark.parametrize("limit", [0, 1, 2, 7])
@pytest.mark.parametrize("profiled", [False, True])
def test_the_limit_holds_in_every_round(limit: int, profiled: bool) -> None:
    machine = GPUS["measured, cut head"]
    controller = AdaptiveDraft(3, machine.profile(3) if profiled else None)
    outcome = simulate(controller, machine, accepted_runs(CONSTANT["0.9"], 200, 0), limit=limit)
    assert min(outcome.used) >= 0 and max(outcome.used) <= min(limit, 3)


def test_a_clock_that_stands_still_is_no_trouble() -> None:
    for accepts in (0, 3):
        controller = AdaptiveDraft(3)
        for _ in range(100):
            n = controller.draft_n(3)
            controller.observe(Round(n, min(n, accepts), 1, 0.0, 0.0))


def test_choices_are_a_function_of_what_was_observed() -> None:
    runs = accepted_runs(CONSTANT["0.6"], 300, 3)
    used = [simulate(AdaptiveDraft(3), CPUS["cpu"], runs, seed=3).used for _ in range(2)]
    assert used[0] == used[1]


def test_fixed_depth() -> None:
    assert [FixedDraft(3).draft_n(limit) for limit in (0, 2, 3, 9)] == [0, 2, 3, 3]
    assert FixedDraft(0).draft_n(9) == 0


@pytest.mark.parametrize("make", [lambda: FixedDraft(-1), lambda: AdaptiveDraft(0), lambda: AdaptiveDraft(-1)])
def test_bad_depths(make: Callable[[], Controller]) -> None:
    with pytest.raises(UsageError, match="number of drafts"):
        make()
