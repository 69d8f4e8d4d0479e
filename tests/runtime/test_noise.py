"""What choice is made of, to the last bit: random words, noise, shares."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest

from runtime import noise
from runtime.sampling import SEED_MAX
from runtime.shares import SHARE_OF_PEAK, shares
from tests.oracle.token_choice import share_of


def philox_words(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 on Python integers, key bumped before every round but the first."""
    c, k = list(counter), list(key)
    for i in range(10):
        if i:
            k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b % 2**32, (a >> 32) ^ c[3] ^ k[1], a % 2**32]
    return c


# ---------------------------------------------------------------- shares
def test_shares_are_the_definition_and_exponentials():
    rng = np.random.default_rng(1)
    edges = math.log(2) * np.arange(42.0)
    depth = np.concatenate([rng.uniform(0, 30, 20_000), edges, np.nextafter(edges, 99), [0.0, 1e-12, 64.0, 1e30]])
    got = shares(depth)
    assert got.tolist() == [share_of(x) for x in depth.tolist()]
    want = SHARE_OF_PEAK * np.exp(-depth)
    assert np.all(np.abs(got - want) <= 2.0**-29 * want + 1)
    assert got[depth == 0].tolist() == [SHARE_OF_PEAK] * 2


def test_share_bits_are_pinned():
    many = shares(np.arange(0, 40, 0.0078125))
    want = "b63d2597ad296f160c7965f3aada1ae6b0b8b95e97d73ff765928806f0a084a1"
    assert hashlib.sha256(many.astype("<u8").tobytes()).hexdigest() == want


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


def test_log_is_accurate():
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.random(4000), 2.0 ** rng.uniform(-33, 6, 4000), 1 - 2.0 ** -np.arange(1.0, 34), [1.0]])
    want = np.array([math.log(v) for v in x.tolist()])
    assert np.all(np.abs(noise.log(x) - want) <= 2 * np.spacing(np.abs(want)))


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


def test_gumbel_stays_in_its_bounds_and_rises():
    x = np.sort(np.concatenate([np.arange(1000), 2**32 - 1 - np.arange(1000), np.arange(0, 2**32, 2**20)]))
    g = noise.gumbel(x.astype(np.uint64))
    assert g[0] > noise.GUMBEL_MIN and g[-1] < noise.GUMBEL_MAX
    assert np.all(np.diff(g[np.diff(x, prepend=-1) > 0]) > 0)
