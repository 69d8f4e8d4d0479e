"""Rows of an int8 KV cache, as `plugins.ops` describes them: D values, then CACHE_SCALE_BYTES bytes with scales."""

from __future__ import annotations

import numpy as np

from plugins.ops import CACHE_SCALE_BYTES

_GROUP = 64  # values of a scale
_MOST = 127


def encode(values: np.ndarray) -> np.ndarray:
    """values [..., D] -> int8 [..., D + CACHE_SCALE_BYTES]."""
    dim = values.shape[-1]
    size = min(_GROUP, dim)
    groups = values.astype(np.float32).reshape(*values.shape[:-1], -1, size)
    scales = np.abs(groups).max(axis=-1) / np.float32(_MOST)
    steps = np.rint(groups / np.where(scales > 0, scales, np.float32(1))[..., None])
    rows = np.zeros((*values.shape[:-1], dim + CACHE_SCALE_BYTES), np.int8)
    rows[..., :dim] = steps.reshape(values.shape)
    rows[..., dim : dim + 4 * scales.shape[-1]] = scales.view(np.int8)
    return rows


def decode(rows: np.ndarray) -> np.ndarray:
    """int8 [..., D + CACHE_SCALE_BYTES] -> float32 [..., D]."""
    dim = rows.shape[-1] - CACHE_SCALE_BYTES
    size = min(_GROUP, dim)
    count = dim // size
    scales = np.ascontiguousarray(rows[..., dim : dim + 4 * count]).view(np.float32)
    groups = rows[..., :dim].reshape(*rows.shape[:-1], count, size).astype(np.float32)
    return (groups * scales[..., None]).reshape(*rows.shape[:-1], dim)
