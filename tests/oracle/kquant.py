"""GGUF block types written from the format description: random blocks, and their values one formula at a time.

Nothing here is shared with the product. Values are float32 in the format's operation order (so embedding rows can be
compared bit by bit); products with them are float64.   Source: ggml-common.h, block_q4_K and friends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]


@dataclass(frozen=True)
class BlockType:
    """One GGUF type: its id in files, values and bytes per block."""

    id: int
    values: int
    bytes: int


TYPES = {
    "F32": BlockType(0, 1, 4),
    "F16": BlockType(1, 1, 2),
    "Q8_0": BlockType(8, 32, 34),
    "Q4_K": BlockType(12, 256, 144),
    "Q5_K": BlockType(13, 256, 176),
    "Q6_K": BlockType(14, 256, 210),
    "BF16": BlockType(30, 1, 2),
}


def random_rows(rng: np.random.Generator, name: str, n: int, k: int) -> U8:
    """n rows of k random values: every bit pattern of the quants, finite scales.   -> [n, row bytes] u8"""
    kind = TYPES[name]
    if name in ("F32", "F16", "BF16"):
        values = (rng.standard_normal((n, k)) * 0.05).astype(np.float32)
        if name == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(n, -1)
        return values.astype(np.float32 if name == "F32" else np.float16).view(np.uint8).reshape(n, -1)
    blocks = rng.integers(0, 256, (n, k // kind.values, kind.bytes), np.uint8)
    for at in {"Q8_0": [0], "Q6_K": [208]}.get(name, [0, 2]):
        d = (rng.uniform(0.2, 1.0, blocks.shape[:2]) * 1e-3).astype(np.float16)
        blocks[..., at : at + 2] = d[..., None].view(np.uint8)
    return blocks.reshape(n, -1)


def values_of(name: str, rows: U8, k: int) -> F32:
    """What the rows stand for.   rows: [n, row bytes] u8 -> [n, k] f32"""
    if name == "F32":
        return rows.view(np.float32)
    if name == "F16":
        return rows.view(np.float16).astype(np.float32)
    if name == "BF16":
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    kind = TYPES[name]
    b = rows.reshape(-1, kind.bytes)

    def half(at: int) -> F32:
        return b[:, at : at + 2].copy().view(np.float16).astype(np.float32)

    if name == "Q8_0":
        return (half(0) * b[:, 2:].view(np.int8)).reshape(-1, k)
    if name == "Q6_K":
        h, j, part = np.meshgrid(np.arange(2), np.arange(4), np.arange(32), indexing="ij")
        low = b[:, (64 * h + 32 * (j % 2) + part).ravel()] >> (4 * (j // 2)).ravel().astype(np.uint8) & 15
        high = b[:, (128 + 32 * h + part).ravel()] >> (2 * j).ravel().astype(np.uint8) & 3
        q = (low | high << 4).astype(np.int32) - 32
        scale = half(208) * b[:, 192:208].view(np.int8).astype(np.float32)
        return (np.repeat(scale, 16, axis=1) * q.astype(np.float32)).reshape(-1, k)
    packed = b[:, 4:16]
    scale, least = np.empty((len(b), 8), np.float32), np.empty((len(b), 8), np.float32)
    for s in range(8):
        if s < 4:
            scale[:, s], least[:, s] = packed[:, s] & 63, packed[:, s + 4] & 63
        else:
            scale[:, s] = packed[:, s + 4] & 15 | packed[:, s - 4] >> 6 << 4
            least[:, s] = packed[:, s + 4] >> 4 | packed[:, s] >> 6 << 4
    nibbles = b[:, 16 if name == "Q4_K" else 48 :].reshape(-1, 4, 1, 32)
    q = np.concatenate([nibbles & 15, nibbles >> 4], axis=2).reshape(-1, 8, 32)
    if name == "Q5_K":
        q = q | (b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 4
    return ((half(0) * scale)[..., None] * q.astype(np.float32) - (half(2) * least)[..., None]).reshape(-1, k)
