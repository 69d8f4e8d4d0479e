"""Blocks of synthetic weights: random and valid, of chosen size, or exact for the matrices that make the known text.

Raw bytes come from a seeded generator, so each piece of a tensor is the same however the work is shared out.
Source: ggml-common.h (block_q4_K, block_q6_K). NumPy only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Q4_K_BYTES, Q6_K_BYTES, SUPERBLOCK = 144, 210, 256
# The embedding: 0.4375 * 32 * (q - 7.5), of RMS 64.5.
_EMBEDDING_D, _EMBEDDING_DMIN, _EMBEDDING_SCALE = 0.4375, 3.28125, 32
_HEAD_RMS, _HEAD_SCALE = 0.01, 16
_COPY_GAIN = 64.0


def random_q4_k(seed: Sequence[int], count: int, rms: float) -> np.ndarray:
    """[count, 144] u8: d * scale * (q - 7.5), q uniform in 0..15, scale uniform in 32..63."""
    blocks = np.empty((count, Q4_K_BYTES), np.uint8)
    raw = _random_bytes(seed, count * 136).reshape(count, 136)
    d = np.float16(rms / (4.61 * 48.4))  # RMS of q - 7.5, and of the scales
    blocks[:, 0:2], blocks[:, 2:4] = _half(float(d)), _half(7.5 * float(d))
    blocks[:, 4:16] = _equal_scales(32 + (raw[:, :8] & 31))
    blocks[:, 16:] = raw[:, 8:]
    return blocks


def random_q6_k(seed: Sequence[int], count: int, rms: float) -> np.ndarray:
    """[count, 210] u8: d * scale * (q - 32), q uniform in 0..63, scale uniform in +-(64..127)."""
    blocks = np.empty((count, Q6_K_BYTES), np.uint8)
    raw = _random_bytes(seed, count * 208).reshape(count, 208)
    blocks[:, :192] = raw[:, :192]
    sizes = 64 + (raw[:, 192:] & 63).astype(np.int16)
    blocks[:, 192:208] = np.where(raw[:, 192:] & 128, -sizes, sizes).astype(np.int8).view(np.uint8)
    blocks[:, 208:] = _half(rms / (18.5 * 97.2))
    return blocks


def embedding_blocks(seed: Sequence[int], count: int) -> np.ndarray:
    """[count, 144] u8, Q4_K: random levels, all blocks of one scale."""
    blocks = np.empty((count, Q4_K_BYTES), np.uint8)
    blocks[:, 0:2], blocks[:, 2:4] = _half(_EMBEDDING_D), _half(_EMBEDDING_DMIN)
    blocks[:, 4:16] = _equal_scales(np.full((1, 8), _EMBEDDING_SCALE, np.uint8))
    blocks[:, 16:] = _random_bytes(seed, count * 128).reshape(count, 128)
    return blocks


def head_blocks(embedding: np.ndarray) -> np.ndarray:
    """Q4_K blocks of the embedding [n, 144] -> Q6_K blocks [n, 210] of exactly proportional values (2 q - 15)."""
    count = len(embedding)
    nibbles = embedding[:, 16:].reshape(count, 2, 2, 32)  # half, 64 values of it, byte
    levels = np.empty((count, 2, 4, 32), np.uint8)  # half, quarter of it, value
    levels[:, :, 0::2], levels[:, :, 1::2] = nibbles & 15, nibbles >> 4
    levels = 2 * levels + 17  # 32 + (2 q - 15)
    low, high = levels & 15, levels >> 4
    blocks = np.empty((count, Q6_K_BYTES), np.uint8)
    lows = blocks[:, :128].reshape(count, 2, 2, 32)
    lows[:, :, 0], lows[:, :, 1] = low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4
    highs = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    blocks[:, 128:192], blocks[:, 192:208] = highs.reshape(count, 64), _HEAD_SCALE
    blocks[:, 208:] = _half(_HEAD_RMS / (9.22 * _HEAD_SCALE))  # RMS of 2 q - 15
    return blocks


def copy_blocks(width: int, first: int, last: int) -> np.ndarray:
    """Rows first..last - 1 of [64 * identity | 0], [width, 2 width], in Q4_K: [n, 144] u8. One level per row is set."""
    blocks = np.zeros((last - first, 2 * width // SUPERBLOCK, Q4_K_BYTES), np.uint8)
    blocks[:, :, 4:16] = _equal_scales(np.full((1, 8), 32, np.uint8))
    blocks[:, :, 0:2] = _half(_COPY_GAIN / (15 * 32))
    for row in range(first, last):
        block, place = divmod(row, SUPERBLOCK)
        group, value = divmod(place, 64)
        blocks[row - first, block, 16 + 32 * group + value % 32] = 15 << 4 * (value // 32)
    return blocks.reshape(-1, Q4_K_BYTES)


def _equal_scales(values: np.ndarray) -> np.ndarray:
    """[n, 8] six-bit numbers, scales and mins alike -> the 12 bytes of a superblock."""
    low, high = values[:, :4], values[:, 4:]
    first = (low & 63) | high >> 4 << 6
    return np.concatenate([first, first, (high & 15) | (high & 15) << 4], axis=1).astype(np.uint8)


def _random_bytes(seed: Sequence[int], count: int) -> np.ndarray:
    return np.random.SFC64(np.random.SeedSequence(list(seed))).random_raw((count + 7) // 8).view(np.uint8)[:count]


def _half(value: float) -> np.ndarray:
    return np.frombuffer(np.float16(value).tobytes(), np.uint8)
