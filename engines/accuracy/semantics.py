"""What each plugin op means, in NumPy float64, by the contract of `plugins.ops`: the CPU's stand-in for the kernels.

It shares no code with the canonical graph, which is what it is compared with; weights are dequantised by the package
`gguf`. Only caches are rounded, since their type is part of the contract. Every function takes a node's inputs and
attributes and returns its outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from engines.accuracy import int8_rows, state_slots
from plugins import ops

Attributes = dict[str, Any]
Arrays = list[np.ndarray]
Mixer = Callable[[np.ndarray, np.ndarray], Arrays]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def rms_norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + epsilon) * weight


def matrix(blocks: np.ndarray, ggml_type: int) -> np.ndarray:
    """Values [N, K] f64 of int8 rows of blocks [N, K / block, block bytes]."""
    rows = np.ascontiguousarray(blocks).view(np.uint8).reshape(len(blocks), -1)
    return dequantize(rows, GGMLQuantizationType(ggml_type)).astype(np.float64)


def kquant_matmul(inputs: Arrays, at: Attributes) -> Arrays:
    x, *rest = inputs
    weights = [rest.pop(0) for _ in at["types"]]
    if at["has_norm"]:
        x = rms_norm(x, rest.pop(0), at["epsilon"])
    products = [x @ matrix(weight, kind).T for weight, kind in zip(weights, at["types"], strict=True)]
    if at["swiglu"]:
        gate, up = products
        products = [gate * sigmoid(gate) * up]
    y = np.concatenate(products, axis=1)
    return [y + rest.pop(0) if at["has_residual"] else y]


def kquant_embedding(inputs: Arrays, at: Attributes) -> Arrays:
    tokens, table = inputs
    known = (tokens >= 0) & (tokens < len(table))
    rows = matrix(table[np.where(known, tokens, 0)], at["type"])
    rows[~known] = np.nan
    return [rows]


def rms_norm_op(inputs: Arrays, at: Attributes) -> Arrays:
    x, weight = inputs
    return [rms_norm(x, weight, at["epsilon"])]


def rms_norm_rows(inputs: Arrays, at: Attributes) -> Arrays:
    x, weight, rows = inputs
    y = rms_norm(x, weight, at["epsilon"])
    return [y, y[rows]]


def rms_norm_pair(inputs: Arrays, at: Attributes) -> Arrays:
    a, a_weight, b, b_weight = inputs
    parts = [rms_norm(a, a_weight, at["epsilon"]), rms_norm(b, b_weight, at["epsilon"])]
    return [np.concatenate(parts, axis=1)]


def rope_tables(inputs: Arrays, at: Attributes) -> Arrays:
    rows, position, bits = inputs
    angles = (int(position[0]) + np.arange(len(rows)))[:, None] * bits.view(np.float64)
    return [at["factor"] * np.stack([np.cos(angles), np.sin(angles)])]


def split_pool(pool: np.ndarray, at: Attributes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Views of a pool: state and steps (see `state_slots`), windows [S, kernel - 1, C]."""
    heads, dim, window = at["v_heads"], at["head_dim"], at["conv_kernel"] - 1
    channels = (2 * at["k_heads"] + heads) * dim
    state, steps, windows = state_slots.split(pool, heads, dim, window * channels)
    return state, steps, windows.reshape(-1, window, channels)


def gated_delta_net(inputs: Arrays, at: Attributes) -> Arrays:
    rows, pool, slot, parameters = inputs
    heads, keys, dim, kernel = at["v_heads"], at["k_heads"], at["head_dim"], at["conv_kernel"]
    channels = (2 * keys + heads) * dim
    conv, a, dt, norm = np.split(parameters.astype(np.float64), np.cumsum([channels * kernel, heads, heads]))
    qkv, z, alpha, beta = np.split(rows, np.cumsum([channels, heads * dim, heads]), axis=1)
    pool = pool.astype(np.float64)
    first, steps, windows = split_pool(pool, at)
    state, window = state_slots.state_of(first, steps, slot[0]), windows[slot[0]]
    if slot[0] < 0:
        state, window = np.zeros_like(state), np.zeros_like(window)
    window = np.concatenate([window, qkv])
    taps = np.lib.stride_tricks.sliding_window_view(window, kernel, axis=0)
    mixed = np.einsum("tcj,cj->tc", taps, conv.reshape(channels, kernel))
    mixed = mixed * sigmoid(mixed)
    query, key, value = (
        part.reshape(len(rows), -1, dim) for part in np.split(mixed, [keys * dim, 2 * keys * dim], axis=1)
    )
    query, key = (for_value_heads(_unit(part, at["epsilon"]), heads) for part in (query, key))
    decay, rate = np.exp(a * np.logaddexp(0, alpha + dt)), sigmoid(beta)
    out, one_slot_each = np.empty((len(rows), heads, dim)), len(rows) <= len(windows)
    for t in range(len(rows)):
        state = state * decay[t][:, None, None]
        delta = rate[t][:, None] * (value[t] - np.einsum("hkv,hk->hv", state, key[t]))
        state = state + key[t][:, :, None] * delta[:, None]
        out[t] = np.einsum("hkv,hk->hv", state, query[t]) / np.sqrt(dim)
        if one_slot_each or t == len(rows) - 1:
            kept = t if one_slot_each else 0
            windows[kept] = window[t + 1 : t + kernel]
            if kept:
                state_slots.put_step(steps[kept - 1], key[t], delta, decay[t])
            else:
                first[:] = state
    normed = rms_norm(out, norm, at["epsilon"]).reshape(len(rows), -1)
    return [normed * z * sigmoid(z), pool]


def for_value_heads(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows [T, HK, D] for each of HV value heads: head h reads key head h mod HK."""
    return np.tile(x, (1, heads // x.shape[1], 1))


def _unit(x: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt(np.square(x).sum(axis=-1, keepdims=True) + epsilon)


def rotated(x: np.ndarray, tables: np.ndarray) -> np.ndarray:
    """Pairs (i, i + n) of the first 2n values of every head turned.   x: [T, heads, D], tables [2, T, n]"""
    cos, sin = tables[:, :, None]
    n = cos.shape[-1]
    first, second = x[..., :n], x[..., n : 2 * n]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, x[..., 2 * n :]], axis=-1)


def gated_attention(inputs: Arrays, at: Attributes) -> Arrays:
    rows, position, rope, norms, cache = inputs
    heads, kv_heads, dim, count = at["heads"], at["kv_heads"], at["head_dim"], len(rows)
    query_gate, key, value = np.split(rows, np.cumsum([2 * heads * dim, kv_heads * dim]), axis=1)
    query, gate = query_gate.reshape(count, heads, 2, dim).transpose(2, 0, 1, 3)
    query = rotated(rms_norm(query, norms[0], at["epsilon"]), rope)
    key = rotated(rms_norm(key.reshape(count, kv_heads, dim), norms[1], at["epsilon"]), rope)
    new = np.stack([key, value.reshape(count, kv_heads, dim)])
    first, cache = int(position[0]), cache.copy()
    quantised = bool(at["cache_type"])
    cache[:, first : first + count] = int8_rows.encode(new) if quantised else new.astype(cache.dtype)
    seen = cache[:, : first + count]
    keys, values = (int8_rows.decode(seen) if quantised else seen).astype(np.float64)
    keys, values = (np.repeat(part, heads // kv_heads, axis=1) for part in (keys, values))
    scores = np.einsum("thd,lhd->htl", query, keys) / np.sqrt(dim)
    hidden = np.arange(first + count) > first + np.arange(count)[:, None]
    scores[:, hidden] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = np.einsum("htl,lhd->thd", weights / weights.sum(axis=-1, keepdims=True), values)
    return [(mixed * sigmoid(gate)).reshape(count, -1), cache]


def _unpacked(pack: np.ndarray, types: list[int], shapes: list[tuple[int, int]]) -> Arrays:
    sizes = [ops.matrix_nbytes(kind, *shape) for kind, shape in zip(types, shapes, strict=True)]
    offsets, _ = ops.pack_offsets(sizes)
    flat = pack.reshape(-1)
    return [
        matrix(flat[begin : begin + size].reshape(rows, -1), kind)
        for begin, size, kind, (rows, _) in zip(offsets, sizes, types, shapes, strict=True)
    ]


def _layer(inputs: Arrays, at: Attributes, rows_in: list[int], width: int, mixer: Mixer) -> Arrays:
    """A decoder layer. mixer: rows of the input products, its own parameters -> ``width`` values a row, state."""
    x, pack, parameters = inputs[:3]
    ffn, hidden = at["ffn_size"], x.shape[1]
    shapes = [(n, hidden) for n in rows_in] + [(hidden, width), (ffn, hidden), (ffn, hidden), (hidden, ffn)]
    *products, output, gate, up, down = _unpacked(pack, at["types"], shapes)
    mixer_norm, ffn_norm, own = np.split(parameters.astype(np.float64), [hidden, 2 * hidden])
    normed = rms_norm(x, mixer_norm, at["epsilon"])
    mixed, state = mixer(np.concatenate([normed @ weight.T for weight in products], axis=1), own)
    r = x + mixed @ output.T
    normed = rms_norm(r, ffn_norm, at["epsilon"])
    gated = normed @ gate.T
    return [r + (gated * sigmoid(gated) * (normed @ up.T)) @ down.T, state]


def gated_delta_net_layer(inputs: Arrays, at: Attributes) -> Arrays:
    slot, pool = inputs[3:]
    width = at["v_heads"] * at["head_dim"]
    rows_in = [2 * at["k_heads"] * at["head_dim"] + width, width, at["v_heads"], at["v_heads"]]
    return _layer(inputs, at, rows_in, width, lambda rows, own: gated_delta_net([rows, pool, slot, own], at))


def gated_attention_layer(inputs: Arrays, at: Attributes) -> Arrays:
    position, rope, cache = inputs[3:]
    dim, width = at["head_dim"], at["heads"] * at["head_dim"]
    rows_in = [2 * width, at["kv_heads"] * dim, at["kv_heads"] * dim]

    def mixer(rows: np.ndarray, own: np.ndarray) -> Arrays:
        return gated_attention([rows, position, rope, own.reshape(2, dim), cache], at)

    return _layer(inputs, at, rows_in, width, mixer)


OPS: dict[str, Callable[[Arrays, Attributes], Arrays]] = {
    ops.KQUANT_MATMUL.name: kquant_matmul,
    ops.KQUANT_EMBEDDING.name: kquant_embedding,
    ops.RMS_NORM.name: rms_norm_op,
    ops.RMS_NORM_ROWS.name: rms_norm_rows,
    ops.RMS_NORM_PAIR.name: rms_norm_pair,
    ops.ROPE_TABLES.name: rope_tables,
    ops.GATED_DELTA_NET.name: gated_delta_net,
    ops.GATED_ATTENTION.name: gated_attention,
    ops.GATED_DELTA_NET_LAYER.name: gated_delta_net_layer,
    ops.GATED_ATTENTION_LAYER.name: gated_attention_layer,
}
# The standard operators that a model in TensorRT form has left.
STANDARD: dict[str, Callable[[Arrays, Attributes], Arrays]] = {
    "Add": lambda inputs, at: [inputs[0] + inputs[1]],
    "Mul": lambda inputs, at: [inputs[0] * inputs[1]],
    "Sigmoid": lambda inputs, at: [sigmoid(inputs[0])],
    "Concat": lambda inputs, at: [np.concatenate(inputs, axis=at["axis"])],
    "Split": lambda inputs, at: np.split(inputs[0], np.cumsum(inputs[1])[:-1], axis=at["axis"]),
    "Gather": lambda inputs, at: [np.take(inputs[0], inputs[1], axis=at["axis"])],
}
