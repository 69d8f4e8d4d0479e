"""Gumbel noise as a pure function of (seed, position, token), defined to the last bit.

The definition uses only operations that every processor rounds alike, so a kernel can repeat it exactly:

1. Word.      Philox4x32-10 with key = (low, high 32 bits of the seed) and
              counter = (token // 4, low 32 bits of position, high 32 bits of position, 0);
              the token's word x is output word ``token % 4``.
2. Uniform.   u = (x + 0.5) * 2^-32, exact in binary64 and never 0 or 1.
3. Gumbel.    g = -log(-log(u)) in binary64, with ``log`` as written below.

``log`` is our own: the C library's differs in the last place between machines and GPUs. It is a fixed sequence of
single binary64 operations, rounded to nearest and **not contracted** (in CUDA: ``-fmad=false`` or ``__dmul_rn`` and
friends), plus exact scaling by powers of two.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011); known answers from Random123.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

# Bounds of g, rounded outwards (the true ones are -3.1298 and 22.8739), so that an error of ``log`` cannot matter.
GUMBEL_MIN, GUMBEL_MAX = -3.2, 22.9

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_CHUNK = 8192  # counters per pass: the four work arrays stay in the cache

_SQRT_HALF = 0.7071067811865476
_LN2 = 0.6931471805599453
# log(m) = 2 atanh(s) = 2s (1 + z/3 + z^2/5 + ...) with z = s^2 <= 0.0295: the first term left out is below 2^-54
_ATANH = tuple(1.0 / (2 * i + 1) for i in range(11, 0, -1))


def philox4x32(counter: U64, key: tuple[int, int]) -> U64:
    """Philox4x32-10.   counter: [4, N] u64, each below 2^32; key: two 32-bit words -> [4, N] u64 below 2^32."""
    c0, c1, c2, c3 = counter.astype(np.uint64)
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c1 ^= p1 >> _SHIFT
        c1 ^= np.uint64(k0)
        c3 ^= p0 >> _SHIFT
        c3 ^= np.uint64(k1)
        p0 &= _LOW
        p1 &= _LOW
        c0, c1, c2, c3 = c1, p1, c3, p0
        k0, k1 = (k0 + _KEY_STEPS[0]) & 0xFFFFFFFF, (k1 + _KEY_STEPS[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3])


def words(seed: int, positions: I64, blocks: I64) -> U64:
    """The words of tokens 4b .. 4b+3 at each (position, block b).   [N], [N] -> [N, 4] u64 below 2^32."""
    out = np.empty((len(blocks), 4), np.uint64)
    key = seed & 0xFFFFFFFF, seed >> 32
    for i in range(0, len(blocks), _CHUNK):
        place = positions[i : i + _CHUNK].astype(np.uint64)
        counter = np.zeros((4, len(place)), np.uint64)
        counter[0], counter[1], counter[2] = blocks[i : i + _CHUNK], place & _LOW, place >> _SHIFT
        out[i : i + _CHUNK] = philox4x32(counter, key).T
    return out


def log(x: F64) -> F64:
    """Natural logarithm of normal positive numbers; within 2 units in the last place for x in [2^-33, 64]."""
    m, e = np.frexp(x)
    small = m < _SQRT_HALF
    m = np.where(small, m + m, m)
    e = e - small
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = _horner(z, _ATANH)
    s = s + s
    return e * _LN2 + (s + s * (z * p))


def _horner(x: F64, coefficients: tuple[float, ...]) -> F64:
    """Polynomial, highest power first: (...(c0 x + c1) x + ...), product and sum rounded apart."""
    p = np.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        p *= x
        p += c
    return p


def gumbel(word: U64) -> F64:
    """Standard Gumbel noise of Philox words.   [N] u64 below 2^32 -> [N] f64 in (GUMBEL_MIN, GUMBEL_MAX)."""
    u = (word.astype(np.float64) + 0.5) * 2.0**-32
    return -log(-log(u))
