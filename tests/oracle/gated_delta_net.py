"""Conv, Gated DeltaNet and gated norm of one layer in float64, one token and one head at a time.

Written from the layer's equations; shares nothing with the product.   Source: Gated Delta Networks (Yang et al.,
2024); order of channels and head mapping (value head h reads key head h mod key heads) as in GGUF files of qwen35.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


@dataclass
class Layer:
    """Constants: conv_weight [C, kernel], a and dt_bias [HV], norm [D]."""

    k_heads: int
    v_heads: int
    conv_weight: F64
    a: F64
    dt_bias: F64
    norm: F64
    eps: float

    @property
    def dim(self) -> int:
        return len(self.norm)


@dataclass
class Steps:
    """y [T, HV D], and what is known after each token: window [T, kernel - 1, C], state [T, HV, D, D], and what made
    it of the one before, decay * state + key delta^T: keys, deltas [T, HV, D], decays [T, HV]."""

    y: F64
    windows: F64
    states: F64
    keys: F64
    deltas: F64
    decays: F64


def sigmoid(x: F64) -> F64:
    return 1 / (1 + np.exp(-x))


def run(layer: Layer, qkv: F64, z: F64, alpha: F64, beta: F64, window: F64, state: F64) -> Steps:
    """qkv [T, C], z [T, HV D], alpha and beta [T, HV]; window [kernel - 1, C] and state [HV, D, D] before them."""
    d, hk, hv = layer.dim, layer.k_heads, layer.v_heads
    window, state = window.copy(), state.copy()
    out, windows, states = np.empty((len(qkv), hv * d)), [], []
    keys, deltas, decays = np.empty((len(qkv), hv, d)), np.empty((len(qkv), hv, d)), np.empty((len(qkv), hv))
    for t in range(len(qkv)):
        rows = np.vstack([window, qkv[t]])
        mixed = np.einsum("jc,cj->c", rows, layer.conv_weight)
        mixed = mixed * sigmoid(mixed)
        window = rows[1:]
        q, k, v = np.split(mixed, [hk * d, 2 * hk * d])
        for h in range(hv):
            qh, kh = q.reshape(hk, d)[h % hk], k.reshape(hk, d)[h % hk]
            qh = qh / np.sqrt((qh * qh).sum() + layer.eps) / np.sqrt(d)
            kh = kh / np.sqrt((kh * kh).sum() + layer.eps)
            decay = np.exp(layer.a[h] * np.log1p(np.exp(alpha[t, h] + layer.dt_bias[h])))
            decayed = state[h] * decay
            delta = sigmoid(beta[t, h]) * (v.reshape(hv, d)[h] - decayed.T @ kh)
            state[h] = decayed + np.outer(kh, delta)
            keys[t, h], deltas[t, h], decays[t, h] = kh, delta, decay
            o = state[h].T @ qh
            gate = z[t].reshape(hv, d)[h]
            o = o / np.sqrt((o * o).mean() + layer.eps) * layer.norm
            out[t].reshape(hv, d)[h] = o * gate * sigmoid(gate)
        windows.append(window)
        states.append(state.copy())
    return Steps(out, np.stack(windows), np.stack(states), keys, deltas, decays)
