"""A token's part of the probability, as a whole number that every processor computes alike.

share = the integer part of 2^40 e^-depth, depth = peak - logit >= 0 in binary64, defined to the last bit:

1. Depth.     q = rint(depth * 2^32 log2(e)), the product rounded once, rint to even: depth in units of 2^-32 octaves.
2. Split.     w = q >> 32 and f = q mod 2^32; 40 < w gives 0.
3. Power.     h = 46333, then h = C - (h * f >> 32) with the coefficients C below in turn, then
              share = (2^40 - (h * f >> 24)) >> w.   All in whole numbers; every product is below 2^64.

The relative error is below 2^-29, so top-p cuts where real numbers would but for shares that close. Sums of whole
numbers do not depend on their order: a GPU that adds them in any order gets the sums of this module.

Source: coefficients of a minimax fit of (1 - 2^-x) / x on [0, 1], times 2^32.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SHARE_OF_PEAK = 2**40
_DEPTH_TO_Q = 1.4426950408889634 * 2.0**32
_COEFFICIENTS = (632021, 5702267, 41298234, 238385494, 1031764650, 2977044458)
_FIRST = 46333
_DEPTH_MAX = 64.0  # deeper than any share above 0, and q still fits
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
_CHUNK = 8192  # numbers per pass: the work arrays stay in the cache


def shares(depth: NDArray[np.float64]) -> NDArray[np.uint64]:
    """Shares of tokens ``depth`` >= 0 below the best logit.   [N] f64 -> [N] u64, at most SHARE_OF_PEAK."""
    out = np.empty(len(depth), np.uint64)
    for i in range(0, len(depth), _CHUNK):
        q = np.rint(np.minimum(depth[i : i + _CHUNK], _DEPTH_MAX) * _DEPTH_TO_Q).astype(np.uint64)
        f, h = q & _LOW, np.full_like(q, _FIRST)
        for c in _COEFFICIENTS:
            h *= f
            h >>= _SHIFT
            np.subtract(np.uint64(c), h, out=h)
        h *= f
        h >>= np.uint64(24)
        np.subtract(np.uint64(SHARE_OF_PEAK), h, out=h)
        np.right_shift(h, np.minimum(q >> _SHIFT, np.uint64(63)), out=out[i : i + _CHUNK])
    return out
