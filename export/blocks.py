"""GGML blocks -> the block form of com.microsoft MatMulNBits, exactly. NumPy only.

A weight is  w = scale * (q - zero) + offset  with q unsigned, zero = 2^(bits-1) (MatMulNBits' default), one scale per
``block_size`` weights and, for the affine types, one offset per block. Offsets are added by a second product with the
block sums of the activations: a float zero point inside MatMulNBits would be the same number, but ONNX Runtime then
dequantises the whole matrix on every call (measured 20 to 80 times slower), and it has no such form at 8 bits.

Exact: scale = d * sc has at most 19 significant bits and so is exact in float32; the offset is rounded once, to
float32, from an exact float64 value. Types of 5 and 6 bits are stretched over all 8 (q shifted up, scale down by the
same power of two): MatMulNBits sums unsigned products and takes the zero's share off again in float32, so a weight
that uses an eighth of the range would come out with eight times the rounding error.

Source: ggml-common.h (block_q4_K, block_q5_K, block_q6_K, block_q8_0).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gguf.constants import GGMLQuantizationType as GGMLType


@dataclass(frozen=True)
class BlockForm:
    """How a GGML type is laid out for MatMulNBits."""

    bits: int
    block_size: int
    has_offset: bool

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.bits // 8


BLOCK_FORMS: dict[GGMLType, BlockForm] = {
    GGMLType.Q4_K: BlockForm(4, 32, True),
    GGMLType.Q5_K: BlockForm(8, 32, True),
    GGMLType.Q6_K: BlockForm(8, 16, False),
    GGMLType.Q8_0: BlockForm(8, 32, False),
}

# q [rows, K / block_size, block_bytes] u8, scales [rows, K / block_size] f32, offsets likewise or None.
Arrays = tuple[np.ndarray, np.ndarray, "np.ndarray | None"]


def to_block_form(blocks: np.ndarray, ggml_type: GGMLType) -> Arrays:
    """Repack raw rows [rows, row_bytes] u8 of a type in BLOCK_FORMS."""
    return _CONVERT[ggml_type](blocks)


def block_form_values(form: BlockForm, arrays: Arrays) -> np.ndarray:
    """The weights a block form stands for: [rows, K] f64 (exact up to the offsets' float32 rounding)."""
    quants, scales, offsets = arrays
    if form.bits == 4:
        quants = np.stack([quants & 15, quants >> 4], axis=-1).reshape(*quants.shape[:2], form.block_size)
    values = scales.astype(np.float64)[..., None] * (quants.astype(np.float64) - 2 ** (form.bits - 1))
    if offsets is not None:
        values += offsets.astype(np.float64)[..., None]
    return values.reshape(len(quants), -1)


def _f16(field: np.ndarray) -> np.ndarray:
    """[..., 2] u8 -> [...] f64."""
    return np.ascontiguousarray(field).view(np.float16)[..., 0].astype(np.float64)


def _scales_and_mins(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 12 bytes of a K-quant superblock -> eight 6-bit scales and eight 6-bit mins. [..., 12] u8 -> 2 x [..., 8]."""
    low, mid, high = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=-1)
    mins = np.concatenate([mid & 63, (high >> 4) | ((mid >> 6) << 4)], axis=-1)
    return scales, mins


def _affine(blocks: np.ndarray, centre: int, stretch: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Scales and offsets of Q4_K or Q5_K superblocks whose quants count from ``centre`` and are ``stretch`` times as
    large as in the file."""
    scales, mins = _scales_and_mins(blocks[..., 4:16])
    scale = _f16(blocks[..., 0:2])[..., None] * scales
    offset = centre * scale - _f16(blocks[..., 2:4])[..., None] * mins
    rows = len(blocks)
    return (scale / stretch).astype(np.float32).reshape(rows, -1), offset.astype(np.float32).reshape(rows, -1)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Q4_K / Q5_K order: 32 bytes hold 64 values, low nibbles first. [..., 128] u8 -> [..., 256]."""
    groups = packed.reshape(*packed.shape[:-1], 4, 1, 32)
    return np.concatenate([groups & 15, groups >> 4], axis=-2).reshape(*packed.shape[:-1], 256)


def _from_q4_k(raw: np.ndarray) -> Arrays:
    blocks = raw.reshape(len(raw), -1, 144)
    quants = _nibbles(blocks[..., 16:144]).reshape(len(raw), -1, 16, 2)
    packed = quants[..., 0] | (quants[..., 1] << 4)
    return packed, *_affine(blocks, centre=8)


def _from_q5_k(raw: np.ndarray) -> Arrays:
    blocks = raw.reshape(len(raw), -1, 176)
    high_bits = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    quants = _nibbles(blocks[..., 48:176]) | (high_bits.reshape(*blocks.shape[:2], 256) << 4)
    return (quants << 3).reshape(len(raw), -1, 32), *_affine(blocks, centre=16, stretch=8)


def _from_q6_k(raw: np.ndarray) -> Arrays:
    blocks = raw.reshape(len(raw), -1, 210)
    low = blocks[..., 0:128].reshape(*blocks.shape[:2], 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=-2).reshape(*blocks.shape[:2], 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = (blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32) >> shifts) & 3
    quants = (low | (high << 4)) << 2
    scales = blocks[..., 192:208].view(np.int8) * _f16(blocks[..., 208:210])[..., None] / 4
    return quants.reshape(len(raw), -1, 16), scales.astype(np.float32).reshape(len(raw), -1), None


def _from_q8_0(raw: np.ndarray) -> Arrays:
    blocks = raw.reshape(len(raw), -1, 34)
    return blocks[..., 2:34] ^ np.uint8(128), _f16(blocks[..., 0:2]).astype(np.float32), None


_CONVERT = {
    GGMLType.Q4_K: _from_q4_k,
    GGMLType.Q5_K: _from_q5_k,
    GGMLType.Q6_K: _from_q6_k,
    GGMLType.Q8_0: _from_q8_0,
}
