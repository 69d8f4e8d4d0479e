"""Token choice: the distribution, the filters, the refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.errors import NumericError, UsageError
from runtime.sampling import SEED_MAX, SamplingParams, check_logits, choose, filtered
from tests.oracle.token_choice import chosen, kept


# ---------------------------------------------------------------- choice
def test_greedy_is_argmax_lowest_id_first():
    logits = np.array([[1, 5, 5, -np.inf], [2, 2, 2, 2], [-np.inf, -3, -np.inf, -3]], np.float32)
    assert choose(logits, np.arange(3), SamplingParams(seed=9)).tolist() == [1, 0, 1]


def test_lowest_id_wins_among_equal_keys():
    logits = np.full((4, 40), 1e30, np.float32)  # the noise is lost in the sum
    logits[1, :7] = -np.inf
    assert choose(logits, np.arange(4), SamplingParams(1.0, seed=5)).tolist() == [0, 7, 0, 0]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_draws_follow_softmax(temperature):
    n, row = 20_000, np.linspace(-2, 2, 50).astype(np.float32)
    got = choose(np.tile(row, (n, 1)), np.arange(n), SamplingParams(temperature, seed=20))
    p = np.exp((row.astype(np.float64) - row.max()) / temperature)
    want = n * p / p.sum()
    assert want.min() > 5
    chi2, df = float(((np.bincount(got, minlength=50) - want) ** 2 / want).sum()), 49
    # p > 0.001, Wilson-Hilferty
    assert chi2 < df * (1 - 2 / (9 * df) + 3.09 * math.sqrt(2 / (9 * df))) ** 3


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32), st.integers(1, 700), st.sampled_from([0.05, 1.0, 4.0, 12.0]),
    st.sampled_from([1e-3, 0.3, 0.7, 1.0, 1.5, 30.0]), st.integers(0, SEED_MAX),
)  # fmt: skip
def test_pruned_equals_unpruned(data_seed, n_vocab, spread, temperature, seed):
    rng = np.random.default_rng(data_seed)
    logits = (rng.standard_normal((3, n_vocab)) * spread + rng.uniform(-50, 50)).astype(np.float32)
    logits[:, rng.random(n_vocab) < 0.2] = -np.inf
    logits[:, rng.integers(n_vocab)] = 1.0
    params = SamplingParams(temperature, seed=seed)
    positions = np.array([0, 5, 2**31])
    want = [chosen(row, p, params) for row, p in zip(logits, positions.tolist(), strict=True)]
    assert choose(logits, positions, params).tolist() == want


def test_a_large_vocabulary_is_pruned_exactly():
    """Far tokens win often here: one peak against a hundred thousand tokens 6 below it."""
    rng = np.random.default_rng(3)
    row = rng.normal(-6, 0.5, 100_001).astype(np.float32)
    row[77] = 4.0
    params = SamplingParams(1.0, seed=123)
    want = [chosen(row, p, params) for p in range(40)]
    assert 5 < sum(w == 77 for w in want) < 35
    assert choose(np.tile(row, (40, 1)), np.arange(40), params).tolist() == want


def test_a_row_alone_and_in_a_batch_give_the_same_token():
    logits = np.random.default_rng(8).standard_normal((6, 900)).astype(np.float32)
    params = SamplingParams(1.2, top_k=50, top_p=0.9, seed=77)
    whole = choose(logits, np.arange(10, 16), params)
    alone = [choose(logits[i : i + 1], np.array([10 + i]), params)[0] for i in range(6)]
    assert whole.tolist() == alone


def test_seed_and_position_change_the_draw():
    logits = np.zeros((200, 500), np.float32)
    same = choose(logits, np.full(200, 3), SamplingParams(1.0, seed=1))
    assert len(set(same.tolist())) == 1
    moved = choose(logits, np.arange(200), SamplingParams(1.0, seed=1))
    other = choose(logits, np.arange(200), SamplingParams(1.0, seed=2))
    assert len(set(moved.tolist())) > 100
    assert np.mean(moved == other) < 0.05


def test_the_argument_is_left_alone():
    logits = np.random.default_rng(2).standard_normal((2, 64)).astype(np.float32)
    before = logits.copy()
    choose(logits, np.arange(2), SamplingParams(0.8, top_k=4, top_p=0.5, min_p=0.1, seed=3))
    assert np.array_equal(logits, before)


@pytest.mark.parametrize("scale", [1e-30, 1e6, 3e38])
def test_extreme_logits_and_temperatures(scale):
    logits = np.array([[-1, 0.5, 1, -np.inf, 0.25]], np.float32) * np.float32(scale)
    for temperature in (5e-324, 1e-9, 1.0, 1e6):
        params = SamplingParams(temperature, seed=6)
        assert choose(logits, np.array([4]), params)[0] == chosen(logits[0], 4, params)


# ---------------------------------------------------------------- filters
@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([-np.inf, -9.0, -2.5, 0.0, 0.5, 3.0]) | st.floats(-40, 8, width=32), max_size=60),
    st.sampled_from([0, 1, 2, 7, 1000]), st.sampled_from([0.0, 0.3, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.05, 1.0]),
)  # fmt: skip
def test_filters_equal_the_plain_reference(values, top_k, top_p, min_p):
    row = np.array([*values, 1.0], np.float32)
    params = SamplingParams(1.0, top_k, top_p, min_p)
    assert filtered(row, params).tolist() == kept(row, params)


def test_top_p_orders_logits_that_differ_by_less_than_their_depths():
    """1e-30 and 2e-30 lie equally deep below 9 in binary64; the larger one is the more probable all the same."""
    row = np.array([1e-30, 9.0, 2e-30, -0.0, 0.0], np.float32)
    left = [filtered(row, SamplingParams(1.0, top_p=p)).tolist() for p in (1 - 4.5e-4, 1 - 3.2e-4, 1 - 2e-4)]
    assert left == [[1, 2], [0, 1, 2], [0, 1, 2, 3]]


@pytest.mark.parametrize("spread", [0.1, 2.0, 9.0])
@pytest.mark.parametrize("top_p", [0.2, 0.95, 0.99999])
def test_top_p_on_a_large_row_equals_the_plain_reference(spread, top_p):
    row = (np.random.default_rng(5).standard_normal(30_000) * spread).astype(np.float32)
    params = SamplingParams(1.0, top_p=top_p)
    assert filtered(row, params).tolist() == kept(row, params)


def test_filtered_draws_stay_inside_and_equal_the_unpruned_choice():
    rows = np.random.default_rng(6).standard_normal((50, 300)).astype(np.float32) * 3
    params = SamplingParams(1.5, top_k=40, top_p=0.9, min_p=0.02, seed=31)
    got = choose(rows, np.arange(50), params)
    assert got.tolist() == [chosen(row, position, params) for position, row in enumerate(rows)]


@pytest.mark.parametrize(
    "params", [SamplingParams(1.5, top_k=1), SamplingParams(1.5, top_p=0.0), SamplingParams(1.5, min_p=1.0)]
)
def test_filters_that_leave_one_token_are_greedy(params):
    rows = np.random.default_rng(7).standard_normal((20, 100)).astype(np.float32)
    assert np.array_equal(choose(rows, np.arange(20), params), rows.argmax(1))


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("value", "said"), [(np.nan, "1 NaN and 0 infinite of 8"), (np.inf, "0 NaN and 1 infinite of 8")]
)
def test_nan_and_infinity_are_refused(temperature, value, said):
    logits = np.zeros((3, 8), np.float32)
    logits[1, 5], logits[1, 2] = value, 7
    with pytest.raises(NumericError, match=f"position 41: {said}"):
        choose(logits, np.array([40, 41, 42]), SamplingParams(temperature, seed=1))


@pytest.mark.parametrize(
    ("value", "said"), [(np.nan, "1 NaN and 0"), (np.inf, "0 NaN and 1"), (-np.inf, "0 NaN and 1")]
)
@pytest.mark.parametrize("at", [0, 3, 7])
def test_a_models_logits_are_refused_for_any_that_is_no_number(value, said, at):
    logits = np.full((3, 8), np.finfo(np.float32).min, np.float32)
    logits[:, 4] = np.finfo(np.float32).max
    check_logits(logits, np.array([40, 41, 42]))
    logits[1, at] = logits[2, 1] = value
    with pytest.raises(NumericError, match=f"position 41: {said} infinite of 8"):
        check_logits(logits, np.array([40, 41, 42]))


def test_a_wholly_masked_row_is_refused():
    with pytest.raises(NumericError, match="position 3: only masked"):
        choose(np.full((1, 4), -np.inf, np.float32), np.array([3]), SamplingParams(1.0))


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0}, {"temperature": math.nan}, {"temperature": math.inf}, {"temperature": 1e7},
        {"temperature": "1"}, {"temperature": True}, {"top_k": -1}, {"top_k": 2.5}, {"top_p": 1.1}, {"top_p": -0.1},
        {"top_p": math.nan}, {"min_p": 1.5}, {"min_p": -0.1}, {"seed": -2}, {"seed": SEED_MAX + 1}, {"seed": 1.0},
        {"seed": None},
    ],
)  # fmt: skip
def test_values_without_meaning_are_refused(bad):
    with pytest.raises(UsageError, match=next(iter(bad)).replace("_", "-")):
        SamplingParams(**bad).validate()


def test_edge_values_have_their_documented_meaning():
    for good in ({}, {"temperature": 1e6}, {"top_k": 0}, {"top_p": 0}, {"top_p": 1}, {"min_p": 1}, {"seed": -1}):
        SamplingParams(**good).validate()
    assert SamplingParams(seed=SEED_MAX).resolved().seed == SEED_MAX


def test_seed_minus_one_is_drawn_once():
    drawn = [SamplingParams(1.0, seed=-1).resolved() for _ in range(8)]
    assert all(0 <= p.seed < 2**32 and p.temperature == 1.0 for p in drawn)
    assert len({p.seed for p in drawn}) > 1
    assert drawn[0].resolved() is drawn[0]
