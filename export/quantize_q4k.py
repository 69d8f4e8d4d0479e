"""Float32 rows -> Q4_K superblocks with the least squared error that a short search finds. NumPy only.

The gguf package dequantises K-quants but quantises none of them. A superblock of 256 weights has eight blocks of 32,
w = d * scale * q - dmin * min, with q of 4 bits and scale and min of 6. Each block tries a few step sizes around the
one that spans its values; for each, q is rounded and step and offset are fitted to it by least squares. Squared error
counts for every weight alike: here the result is the LM head of the drafts, whose inputs are normed.

Source of the layout: ggml-common.h (block_q4_K).
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

SUPERBLOCK, BLOCK, LEVELS, SIX_BITS = 256, 32, 15, 63
# Steps to span a block's values with. Fewer than 15 clip the extremes, which pays where they are rare.
_SPANS = (15.0, 14.4, 13.8, 13.2, 15.6, 16.2)
_CACHE_VALUES = 1 << 15  # values at a time: the work arrays stay in a core's cache
_TINY = np.float32(1e-30)


def quantize_q4_k(values: np.ndarray) -> np.ndarray:
    """values [rows, K] f32, finite, K % 256 == 0 -> [rows, K / 256 * 144] u8."""
    rows, columns = values.shape
    assert columns % SUPERBLOCK == 0, columns
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, SUPERBLOCK // BLOCK, BLOCK)
    step = _CACHE_VALUES // SUPERBLOCK
    packed = np.empty((len(blocks), 144), np.uint8)

    def pack_from(first: int) -> None:
        packed[first : first + step] = _pack(blocks[first : first + step])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(pack_from, range(0, len(blocks), step)):
            pass
    return packed.reshape(rows, -1)


def _pack(x: np.ndarray) -> np.ndarray:
    """x [n, 8, 32] f32 -> [n, 144] u8."""
    scale, offset = _fit(x)
    d, scales = _six_bits(scale)
    dmin, mins = _six_bits(offset)
    scale, offset = d.astype(np.float32)[:, None] * scales, dmin.astype(np.float32)[:, None] * mins
    q = _rounded(x + offset[..., None], 1 / np.maximum(scale, _TINY)[..., None]).astype(np.uint8)
    pairs = q.reshape(len(q), 4, 2, BLOCK)  # 32 bytes hold 64 values, the first 32 in the low halves
    heads = [d.view(np.uint8).reshape(-1, 2), dmin.view(np.uint8).reshape(-1, 2), _packed_scales(scales, mins)]
    return np.concatenate([*heads, (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(len(q), -1)], axis=1)


def _fit(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Step and offset [n, 8] f32, neither negative, of w = step * q - offset for blocks x [n, 8, 32]."""
    low = np.minimum(x.min(-1), 0)
    width = np.maximum(x.max(-1) - low, _TINY)
    shifted = x - low[..., None]
    sum_x, square_x = x.sum(-1), np.einsum("...i,...i", x, x)
    best = np.full(low.shape, np.inf, np.float32)
    step, offset = np.zeros_like(low), np.zeros_like(low)
    for span in _SPANS:
        q = _rounded(shifted, (np.float32(span) / width)[..., None])
        sum_q, square_q, product = q.sum(-1), np.einsum("...i,...i", q, q), np.einsum("...i,...i", q, x)
        # Least squares of a * q - b over the block; of -b alone where all q are equal, of a * q where b would be < 0.
        determinant = BLOCK * square_q - sum_q * sum_q  # of whole numbers: exact
        a = (BLOCK * product - sum_q * sum_x) / np.maximum(determinant, 1)
        a = np.where(determinant > 0, a, 0)
        b = (a * sum_q - sum_x) / BLOCK
        a = np.maximum(np.where(b < 0, product / np.maximum(square_q, 1), a), 0)
        b = np.maximum(b, 0)
        error = square_x + a * a * square_q + BLOCK * b * b - 2 * (a * product - b * sum_x + a * b * sum_q)
        better = error < best
        best, step, offset = np.where(better, error, best), np.where(better, a, step), np.where(better, b, offset)
    return step, offset


def _rounded(x: np.ndarray, factor: np.ndarray) -> np.ndarray:
    q: np.ndarray = x * factor
    np.rint(q, out=q)
    np.maximum(q, 0, out=q)
    return np.minimum(q, LEVELS, out=q)


def _six_bits(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """values [n, 8] >= 0 -> factor f16 [n] and whole numbers 0..63 f32 [n, 8] whose product is near them."""
    factor = (values.max(-1) / SIX_BITS).astype(np.float16)
    whole = np.rint(values / np.maximum(factor.astype(np.float32), _TINY)[:, None])
    return factor, np.minimum(whole, SIX_BITS)


def _packed_scales(scales: np.ndarray, mins: np.ndarray) -> np.ndarray:
    """[n, 8] numbers of 6 bits, twice -> 12 bytes: of the first four in bytes 0..7, of the others spread."""
    s, m = scales.astype(np.uint8), mins.astype(np.uint8)
    first = [s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6]
    return np.concatenate([*first, (s[:, 4:] & 15) | m[:, 4:] << 4], axis=1)
