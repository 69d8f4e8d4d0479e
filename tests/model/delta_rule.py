"""The gated delta rule for training: in chunks, and token by token as its definition.

All take q, k, v [B, T, V_HEADS, STATE] (q scaled, q and k of unit length) and beta, g [B, T, V_HEADS], g the log of the
decay, and give [B, T, V_HEADS, STATE].
"""

from __future__ import annotations

import torch
from geometry import STATE, V_HEADS
from torch import Tensor
from torch.nn import functional

CHUNK = 64
_BLOCK = 8


def delta_steps(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
    """The definition: S = e^g S;  d = beta (v - S^T k);  S += k d^T;  o = S^T q."""
    state, out = q.new_zeros(q.shape[0], V_HEADS, STATE, STATE), []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        d = beta[:, t, :, None] * (v[:, t] - (k[:, t, :, None] @ state)[:, :, 0])
        state = state + k[:, t, :, :, None] * d[:, :, None]
        out.append((q[:, t, :, None] @ state)[:, :, 0])
    return torch.stack(out, 1)


def delta_chunks(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
    """The same by chunks of CHUNK tokens, the differences d of a chunk from one triangular system."""
    batch, n_tokens = q.shape[:2]
    q, k, v = _chunks(q), _chunks(k), _chunks(v)  # [B, N, V_HEADS, CHUNK, STATE]
    beta, g = _chunks(beta[..., None]), _chunks(g[..., None])  # [B, N, V_HEADS, CHUNK, 1]
    total = g.cumsum(-2)
    decay = (total - total.transpose(-1, -2)).tril().exp().tril()  # e^{G_t - G_i}, i <= t
    eye = torch.eye(CHUNK, device=q.device)
    system = eye + (beta * (k @ k.transpose(-1, -2)) * decay).tril(-1)
    with torch.no_grad():
        guess = _triangular_inverse(system - eye)
    inverse = guess @ (2 * eye - system @ guess)  # one Newton step carries the exact gradient
    u, w = inverse @ (beta * v), inverse @ (beta * total.exp() * k)
    k_decayed = (k * (total[..., -1:, :] - total).exp()).transpose(-1, -2)
    last = total[..., -1:, :].exp()
    state, states, differences = q.new_zeros(batch, V_HEADS, STATE, STATE), [], []
    for i in range(q.shape[1]):
        d = u[:, i] - w[:, i] @ state
        states.append(state)
        differences.append(d)
        state = state * last[:, i] + k_decayed[:, i] @ d
    across = (q * total.exp()) @ torch.stack(states, 1)
    within = (q @ k.transpose(-1, -2) * decay) @ torch.stack(differences, 1)
    return (across + within).transpose(2, 3).reshape(batch, -1, V_HEADS, STATE)[:, :n_tokens]


def _chunks(x: Tensor) -> Tensor:
    """[B, T, V_HEADS, ...] -> [B, T / CHUNK rounded up, V_HEADS, CHUNK, ...], zeros at the end."""
    x = functional.pad(x, [0, 0] * (x.dim() - 2) + [0, -x.shape[1] % CHUNK])
    return x.reshape(x.shape[0], -1, CHUNK, *x.shape[2:]).transpose(2, 3)


def _triangular_inverse(n: Tensor) -> Tensor:
    """(I + n)^-1, n [..., CHUNK, CHUNK] strictly lower: _BLOCK x _BLOCK blocks by a finite series, then doubling."""
    outer, size = n.shape[:-2], _BLOCK
    blocks = n.reshape(*outer, CHUNK // size, size, CHUNK // size, size)
    b = torch.diagonal(blocks, dim1=-4, dim2=-2).movedim(-1, -3)
    eye, square = torch.eye(size, device=n.device), b @ b
    inverse = (eye - b) @ (eye + square) @ (eye + square @ square)  # b^8 = 0
    while size < CHUNK:
        pairs = n.reshape(*outer, CHUNK // (2 * size), 2, size, CHUNK // (2 * size), 2, size)
        c = torch.diagonal(pairs[..., :, 1, :, :, 0, :], dim1=-4, dim2=-2).movedim(-1, -3)
        upper, lower = inverse.reshape(*outer, CHUNK // (2 * size), 2, size, size).unbind(-3)
        corner = -lower @ c @ upper
        inverse = torch.cat([torch.cat([upper, torch.zeros_like(upper)], -1), torch.cat([corner, lower], -1)], -2)
        size *= 2
    return inverse.reshape(*outer, CHUNK, CHUNK)
