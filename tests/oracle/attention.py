"""Gated grouped-query attention of one layer in float64, one token and one head at a time.

Written from the layer's equations; shares nothing with the product.   Sources: Qwen3-Next's gated attention, RoFormer
(rotary embedding, NeoX pairing), YaRN (one factor on cos and sin); layout of query and gate as in GGUF files of qwen35.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


@dataclass
class Layer:
    """Constants: q_norm, k_norm [D]; inv_freq [rope_dim / 2]; factor on cos and sin."""

    heads: int
    kv_heads: int
    q_norm: F64
    k_norm: F64
    eps: float
    inv_freq: F64
    factor: float

    @property
    def dim(self) -> int:
        return len(self.q_norm)


def rms_norm(x: F64, weight: F64, eps: float) -> F64:
    return x / np.sqrt((x * x).mean() + eps) * weight


def rotate(x: F64, position: int, inv_freq: F64, factor: float) -> F64:
    """Pairs (i, i + n) of the first 2n values turn by position * inv_freq[i]."""
    n = len(inv_freq)
    cos, sin = factor * np.cos(position * inv_freq), factor * np.sin(position * inv_freq)
    out = x.copy()
    out[:n] = x[:n] * cos - x[n : 2 * n] * sin
    out[n : 2 * n] = x[n : 2 * n] * cos + x[:n] * sin
    return out


def run(
    layer: Layer,
    query_gate: F64,
    key: F64,
    value: F64,
    position: int,
    keys: F64,
    values: F64,
    stored: Callable[[F64], F64] = lambda rows: rows,
) -> tuple[F64, F64, F64]:
    """query_gate [T, H, 2, D], key, value [T, KV, D] of tokens at position ..; keys, values [position, KV, D] so far;
    stored: what the cache gives back of rows put into it.

    -> y [T, H * D] and the keys and values with the new rows behind them.
    """
    rows = np.empty_like(key)
    for t in range(len(key)):
        for h in range(layer.kv_heads):
            normed = rms_norm(key[t, h], layer.k_norm, layer.eps)
            rows[t, h] = rotate(normed, position + t, layer.inv_freq, layer.factor)
    keys, values = np.concatenate([keys, stored(rows)]), np.concatenate([values, stored(value)])
    out = np.empty((len(key), layer.heads, layer.dim))
    for t in range(len(key)):
        end = position + t + 1
        for h in range(layer.heads):
            kv = h // (layer.heads // layer.kv_heads)
            q = rms_norm(query_gate[t, h, 0], layer.q_norm, layer.eps)
            q = rotate(q, position + t, layer.inv_freq, layer.factor)
            scores = keys[:end, kv] @ q / np.sqrt(layer.dim)
            weights = np.exp(scores - scores.max())
            mixed = weights @ values[:end, kv] / weights.sum()
            out[t, h] = mixed / (1 + np.exp(-query_gate[t, h, 1]))
    return out.reshape(len(key), -1), keys, values
