"""Rows of an int8 KV cache, as `plugins/README.md` describes them: D values, then 16 bytes with their scales."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

GROUP = 64  # values of a scale
SCALE_BYTES = 16


def encode(values: NDArray[np.floating]) -> NDArray[np.int8]:
    """values [..., D] -> rows [..., D + 16]. A group with a value that is not finite gets such a scale."""
    dim = values.shape[-1]
    size = min(GROUP, dim)
    groups = values.astype(np.float32).reshape(*values.shape[:-1], dim // size, size)
    scales = np.abs(groups).max(axis=-1) / np.float32(127)
    with np.errstate(invalid="ignore"):
        steps = np.rint(groups / np.where(scales > 0, scales, 1)[..., None])
    rows = np.zeros((*values.shape[:-1], dim + SCALE_BYTES), np.int8)
    rows[..., :dim] = np.clip(np.nan_to_num(steps), -127, 127).reshape(values.shape)
    rows[..., dim : dim + 4 * (dim // size)] = scales.view(np.int8)
    return rows


def decode(rows: NDArray[np.int8]) -> NDArray[np.float64]:
    """rows [..., D + 16] -> the values [..., D] that they stand for."""
    dim = rows.shape[-1] - SCALE_BYTES
    size = min(GROUP, dim)
    scales = np.ascontiguousarray(rows[..., dim : dim + 4 * (dim // size)]).view(np.float32)
    groups = rows[..., :dim].reshape(*rows.shape[:-1], dim // size, size)
    return (groups * scales[..., None].astype(np.float64)).reshape(*rows.shape[:-1], dim)


def kept(values: NDArray[np.floating]) -> NDArray[np.float64]:
    """What a cache gives back of values put into it."""
    return decode(encode(values))
