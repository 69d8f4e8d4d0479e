"""Float32 rows -> blocks of a GGML type, for test files. K-quants here, the other types by the gguf package.

Plain round-to-nearest, not llama.cpp's search: tests need valid blocks, not the best ones.
Source: ggml-common.h (block_q4_K, block_q5_K, block_q6_K).
"""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType as T
from gguf.quants import quantize

SUPERBLOCK = 256


def pack(values: np.ndarray, ggml_type: T) -> np.ndarray:
    """[rows, K] f32 -> [rows, row bytes] u8. K must be a multiple of the type's block size."""
    values = np.ascontiguousarray(values, np.float32)
    rows = values.shape[0]
    if ggml_type == T.Q4_K:
        return _q4_k(values).reshape(rows, -1)
    if ggml_type == T.Q5_K:
        return _q5_k(values).reshape(rows, -1)
    if ggml_type == T.Q6_K:
        return _q6_k(values).reshape(rows, -1)
    return np.ascontiguousarray(quantize(values, ggml_type)).view(np.uint8).reshape(rows, -1)


def _scales_and_mins(scales: np.ndarray, mins: np.ndarray) -> np.ndarray:
    """[n, 8] six-bit scales and mins -> [n, 12] bytes: low six bits of 0..3, high bits of 4..7 above them."""
    scales, mins = scales.astype(np.uint8), mins.astype(np.uint8)
    low, high = slice(0, 4), slice(4, 8)
    return np.concatenate(
        [
            scales[:, low] | (scales[:, high] >> 4) << 6,
            mins[:, low] | (mins[:, high] >> 4) << 6,
            (scales[:, high] & 15) | (mins[:, high] & 15) << 4,
        ],
        axis=1,
    )


def _affine(values: np.ndarray, levels: int) -> tuple[np.ndarray, np.ndarray]:
    """value = d * scale * q - dmin * min per 32 values: ([n, 16] d, dmin and the packed scales; [n, 8, 32] q)."""
    groups = values.reshape(-1, 8, 32)
    low = np.minimum(groups.min(-1), 0.0)
    step = np.maximum(groups.max(-1) - low, 1e-12) / levels
    d = (step.max(-1) / 63).astype(np.float16)
    dmin = ((-low).max(-1) / 63).astype(np.float16)
    d_f32 = np.maximum(d.astype(np.float32), 1e-12)[:, None]
    dmin_f32 = np.maximum(dmin.astype(np.float32), 1e-12)[:, None]
    scales = np.clip(np.rint(step / d_f32), 1, 63)
    mins = np.clip(np.rint(-low / dmin_f32), 0, 63)
    q = np.rint((groups + (dmin_f32 * mins)[..., None]) / (d_f32 * scales)[..., None])
    head = [d.view(np.uint8).reshape(-1, 2), dmin.view(np.uint8).reshape(-1, 2), _scales_and_mins(scales, mins)]
    return np.concatenate(head, axis=1), np.clip(q, 0, levels).astype(np.uint8)


def _nibbles(q: np.ndarray) -> np.ndarray:
    """[n, 8, 32] low nibbles -> [n, 128]: of each 64 values, the first 32 in the low halves."""
    pairs = (q & 15).reshape(-1, 4, 2, 32)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)


def _q4_k(values: np.ndarray) -> np.ndarray:
    head, q = _affine(values, 15)
    return np.concatenate([head, _nibbles(q)], axis=1)


def _q5_k(values: np.ndarray) -> np.ndarray:
    head, q = _affine(values, 31)
    # Byte j holds the fifth bits of value j of every group, group i in bit i.
    fifth = np.bitwise_or.reduce((q >> 4) << np.arange(8, dtype=np.uint8)[:, None], axis=1)
    return np.concatenate([head, fifth, _nibbles(q)], axis=1)


def _q6_k(values: np.ndarray) -> np.ndarray:
    groups = values.reshape(-1, 16, 16)
    step = np.maximum(np.abs(groups).max(-1) / 31, 1e-12)
    d = (step.max(-1) / 127).astype(np.float16)
    d_f32 = np.maximum(d.astype(np.float32), 1e-12)[:, None]
    scales = np.clip(np.rint(step / d_f32), 1, 127)
    q = (np.clip(np.rint(groups / (d_f32 * scales)[..., None]), -32, 31) + 32).astype(np.uint8)
    quarters = q.reshape(-1, 2, 4, 32)  # half, quarter of it, value
    low, high = quarters & 15, quarters >> 4
    low_bytes = np.concatenate([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], axis=-1)
    high_bytes = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    return np.concatenate(
        [
            low_bytes.reshape(-1, 128),
            high_bytes.reshape(-1, 64),
            scales.astype(np.int8).view(np.uint8),
            d.view(np.uint8).reshape(-1, 2),
        ],
        axis=1,
    )
