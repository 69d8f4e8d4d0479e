"""Token choice: the noise to the last bit, the distribution, the filters, the refusals."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.errors import NumericError, UsageError
from runtime import noise
from runtime.sampling import SEED_MAX, SamplingParams, choose, filtered


def philox_words(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 on Python integers, key bumped before every round but the first."""
    c, k = list(counter), list(key)
    for i in range(10):
        if i:
            k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b % 2**32, (a >> 32) ^ c[3] ^ k[1], a % 2**32]
    return c


def all_keys(row: np.ndarray, position: int, params: SamplingParams) -> np.ndarray:
    """logit + t*g of every token: nothing pruned."""
    blocks = np.arange(-(-len(row) // 4))
    drawn = noise.words(params.seed, np.full(len(blocks), position), blocks).ravel()[: len(row)]
    return row.astype(np.float64) + params.temperature * noise.gumbel(drawn)


def reference_filter(row: np.ndarray, params: SamplingParams) -> list[int]:
    """top-k, top-p, min-p on a sorted list of exact weights."""
    order = sorted((i for i in range(len(row)) if row[i] > -np.inf), key=lambda i: (-row[i], i))
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1:
        weights = [round(math.exp(float(row[i]) - float(row.max())) * 2**40) for i in order]
        n, total, needed = 0, 0, params.top_p * sum(weights)
        while n == 0 or total < needed:
            total, n = total + weights[n], n + 1
        order = order[:n]
    if params.min_p:
        order = [i for i in order if float(row[i]) - float(row.max()) >= math.log(params.min_p)]
    return sorted(order)


# ---------------------------------------------------------------- noise
KNOWN = [  # Random123, tests/kat_vectors, "philox4x32 10"
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_philox_known_answers(counter, key, want):
    assert philox_words(counter, key) == want
    got = noise.philox4x32(np.array([counter, counter], np.uint64).T, (key[0], key[1]))
    assert got.T.tolist() == [want, want]


@pytest.mark.parametrize("seed", [0, 1, 2**32, SEED_MAX])
def test_word_layout(seed):
    positions, blocks = np.array([0, 7, 2**33 + 5]), np.array([0, 62079, 3])
    want = [
        philox_words([b, p % 2**32, p >> 32, 0], [seed % 2**32, seed >> 32])
        for p, b in zip(positions.tolist(), blocks.tolist(), strict=True)
    ]
    assert noise.words(seed, positions, blocks).tolist() == want


def test_words_of_many_blocks_do_not_depend_on_the_batch():
    blocks = np.arange(20_000)
    whole = noise.words(5, np.full(20_000, 11), blocks)
    assert np.array_equal(whole[12_345:12_347], noise.words(5, np.full(2, 11), blocks[12_345:12_347]))


def test_log_and_exp_are_accurate():
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.random(4000), 2.0 ** rng.uniform(-33, 6, 4000), 1 - 2.0 ** -np.arange(1.0, 34), [1.0]])
    want = np.array([math.log(v) for v in x.tolist()])
    assert np.all(np.abs(noise.log(x) - want) <= 2 * np.spacing(np.abs(want)))
    y = -np.concatenate([rng.random(2000), rng.uniform(0, 64, 4000), [0.0]])
    want = np.array([math.exp(v) for v in y.tolist()])
    assert np.all(np.abs(noise.exp(y) - want) <= 2.0**-51 * want)


def test_gumbel_bits_are_pinned():
    """Recorded once: a kernel and every later version must give these bits."""
    got = noise.gumbel(np.array([0, 1, 0x80000000, 0xDEADBEEF, 0xFFFFFFFE, 0xFFFFFFFF], np.uint64))
    assert [v.hex() for v in got.tolist()] == [
        "-0x1.90a3aa15a0b5dp+1",
        "-0x1.8a56cb66869f4p+1",
        "0x1.774f29c39c0bdp-2",
        "0x1.f8564bfa1e55ep+0",
        "0x1.5c6766f467b8ep+4",
        "0x1.6dfb516f1cbbep+4",
    ]
    many = noise.gumbel(np.arange(7, 2**32, 1_000_003, dtype=np.uint64))
    assert (
        hashlib.sha256(many.astype("<f8").tobytes()).hexdigest()
        == "ac71d41ab6357cef6374ff79fa7c5c8407de8d98261a56cee422883700cd5b79"
    )


def test_exp_bits_are_pinned():
    many = noise.exp(np.arange(0, -40, -0.0078125))
    assert (
        hashlib.sha256(many.astype("<f8").tobytes()).hexdigest()
        == "d44007bc0a8cc480620822d28f49bb35b46be5970f92e983fa9083ce697a4ec3"
    )


def test_gumbel_stays_in_its_bounds_and_rises():
    x = np.sort(np.concatenate([np.arange(1000), 2**32 - 1 - np.arange(1000), np.arange(0, 2**32, 2**20)]))
    g = noise.gumbel(x.astype(np.uint64))
    assert g[0] > noise.GUMBEL_MIN and g[-1] < noise.GUMBEL_MAX
    assert np.all(np.diff(g[np.diff(x, prepend=-1) > 0]) > 0)


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
    want = [int(all_keys(row, p, params).argmax()) for row, p in zip(logits, positions.tolist(), strict=True)]
    assert choose(logits, positions, params).tolist() == want


def test_a_large_vocabulary_is_pruned_exactly():
    """Far tokens win often here: one peak against a hundred thousand tokens 6 below it."""
    rng = np.random.default_rng(3)
    row = rng.normal(-6, 0.5, 100_001).astype(np.float32)
    row[77] = 4.0
    params = SamplingParams(1.0, seed=123)
    want = [int(all_keys(row, p, params).argmax()) for p in range(40)]
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
        assert choose(logits, np.array([4]), params)[0] == all_keys(logits[0], 4, params).argmax()


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
    assert filtered(row, params).tolist() == reference_filter(row, params)


@pytest.mark.parametrize("spread", [0.1, 2.0, 9.0])
@pytest.mark.parametrize("top_p", [0.2, 0.95, 0.99999])
def test_top_p_on_a_large_row_equals_the_plain_reference(spread, top_p):
    row = (np.random.default_rng(5).standard_normal(30_000) * spread).astype(np.float32)
    params = SamplingParams(1.0, top_p=top_p)
    assert filtered(row, params).tolist() == reference_filter(row, params)


def test_filtered_draws_stay_inside_and_equal_the_unpruned_choice():
    rows = np.random.default_rng(6).standard_normal((50, 300)).astype(np.float32) * 3
    params = SamplingParams(1.5, top_k=40, top_p=0.9, min_p=0.02, seed=31)
    got = choose(rows, np.arange(50), params)
    for position, row in enumerate(rows):
        ids = reference_filter(row, params)
        assert got[position] == ids[int(all_keys(row, position, params)[ids].argmax())]


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
