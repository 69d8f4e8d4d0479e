"""A model in TensorRT form, run node by node in float64: plugin nodes by their oracles, the rest by NumPy.

What a plugin node means is taken from `plugins.ops`; nothing of the exporter is used.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from plugins import ops
from tests.oracle import attention, gated_delta_net, int8_rows, kquant, state_slots
from tests.oracle.gated_delta_net import F64, sigmoid

_TYPE_NAMES = {kind.id: name for name, kind in kquant.TYPES.items()}
Attributes = dict[str, Any]


class Lowered:
    """A graph of an exported folder and the state between its passes: ``state`` by input name.

    model: the graph, where it is not the one at ``path``; its external data lies beside that."""

    def __init__(self, path: Path, max_rows: int, capacity: int, model: onnx.ModelProto | None = None) -> None:
        self.model = model or onnx.load(str(path), load_external_data=False)
        self.folder = path.parent
        self.max_rows = max_rows
        self.constants = {each.name: self._value(each) for each in self.model.graph.initializer}
        self.state: dict[str, np.ndarray] = {}
        for node in self.model.graph.node:
            attributes = _attributes(node)
            if node.domain != ops.DOMAIN or ops.OPS[node.op_type].alias_of(-1) < 0:
                continue
            name = node.input[ops.OPS[node.op_type].alias_of(-1)]
            if "v_heads" in attributes:
                self.state[name] = np.zeros(_pool_size(attributes, max_rows))
            else:
                rows = np.zeros((2, capacity, attributes["kv_heads"], attributes["head_dim"]))
                self.state[name] = int8_rows.encode(rows) if attributes["cache_type"] else rows

    def run(self, tokens: list[int], position: int, slot: int, **inputs: np.ndarray) -> dict[str, np.ndarray]:
        """One pass; its outputs by name. All rows get logits. State is carried on."""
        values: dict[str, Any] = {
            **self.constants,
            **self.state,
            **inputs,
            "tokens": np.array(tokens),
            "position": np.array([position]),
            "slot": np.array([slot]),
            "rows": np.arange(len(tokens)),
        }
        for node in self.model.graph.node:
            kernels = _PLUGINS if node.domain == ops.DOMAIN else _NATIVE
            arguments = [values[name] for name in node.input]
            results = kernels[node.op_type](arguments, _attributes(node))
            values.update(zip(node.output, results, strict=True))
        for name in self.state:
            self.state[name] = values[name + ".out"]
        return {each.name: values[each.name] for each in self.model.graph.output}

    def slot_state(self, layer: int, slot: int) -> tuple[F64, F64]:
        """Window [kernel - 1, C] and state [HV, D, D] of a slot."""
        node = next(n for n in self.model.graph.node if f"blk.{layer}.pool" in n.input)
        attributes = _attributes(node)
        windows, *states = _pools(self.state[f"blk.{layer}.pool"], attributes)
        return windows[slot], state_slots.get(*states, slot)

    def _value(self, tensor: TensorProto) -> np.ndarray:
        if tensor.data_location != TensorProto.EXTERNAL:
            return numpy_helper.to_array(tensor)
        entries = {entry.key: entry.value for entry in tensor.external_data}
        raw = np.fromfile(
            self.folder / entries["location"], np.uint8, int(entries["length"]), offset=int(entries["offset"])
        )
        return raw.reshape(tuple(tensor.dims))


def _attributes(node: onnx.NodeProto) -> Attributes:
    return {each.name: helper.get_attribute_value(each) for each in node.attribute}


def _matrix(blocks: np.ndarray, ggml_type: int) -> F64:
    rows = blocks.reshape(len(blocks), -1)
    columns = blocks.shape[1] * ops.BLOCKS[ggml_type][0]
    return kquant.values_of(_TYPE_NAMES[ggml_type], rows, columns).astype(np.float64)


def _rms_norm(x: F64, weight: F64, epsilon: float) -> F64:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight


def _matmul(inputs: list[np.ndarray], at: Attributes) -> list[np.ndarray]:
    x, *rest = inputs
    weights = [_matrix(rest.pop(0), kind) for kind in at["types"]]
    if at["has_norm"]:
        x = _rms_norm(x, rest.pop(0), at["epsilon"])
    results = [x @ weight.T for weight in weights]
    if at["swiglu"]:
        gate, up = results
        results = [gate * sigmoid(gate) * up]
    y = np.concatenate(results, axis=1)
    if at["has_residual"]:
        y = y + rest.pop(0)
    assert not rest
    return [y]


def _embedding(inputs: list[np.ndarray], at: Attributes) -> list[np.ndarray]:
    return [_matrix(inputs[1][inputs[0]], at["type"])]


def _rope_tables(inputs: list[np.ndarray], at: Attributes) -> list[np.ndarray]:
    positions = inputs[1][0] + np.arange(len(inputs[0]))
    angles = positions[:, None] * inputs[2].view(np.float64)
    return [at["factor"] * np.stack([np.cos(angles), np.sin(angles)])]


def _window_size(at: Attributes) -> int:
    return int((at["conv_kernel"] - 1) * (2 * at["k_heads"] + at["v_heads"]) * at["head_dim"])


def _pool_size(at: Attributes, slots: int) -> int:
    heads, dim = at["v_heads"], at["head_dim"]
    return int(heads * (dim**2 + (slots - 1) * (dim // 32) * (dim + 64)) + slots * _window_size(at))


def _pools(pool: F64, at: Attributes) -> tuple[F64, NDArray[np.floating], NDArray[np.floating]]:
    """Windows, state, steps."""
    slots = next(n for n in range(1, len(pool)) if _pool_size(at, n) == len(pool))
    first = len(pool) - slots * _window_size(at)
    state, steps = state_slots.split(pool[:first], at["v_heads"], at["head_dim"])
    return pool[first:].reshape(slots, at["conv_kernel"] - 1, -1), state, steps


def _gated_delta_net(inputs: list[np.ndarray], at: Attributes) -> list[np.ndarray]:
    rows, pool, slot, parameters = inputs
    heads, dim = at["v_heads"], at["head_dim"]
    channels = (2 * at["k_heads"] + heads) * dim
    conv, a, dt, norm = np.split(parameters.astype(np.float64), np.cumsum([channels * at["conv_kernel"], heads, heads]))
    layer = gated_delta_net.Layer(at["k_heads"], heads, conv.reshape(channels, -1), a, dt, norm, at["epsilon"])
    qkv, z, alpha, beta = np.split(rows, np.cumsum([channels, heads * dim, heads]), axis=1)
    pool = pool.copy()
    windows, state, kept_steps = _pools(pool, at)
    before = (
        (windows[slot[0]], state_slots.get(state, kept_steps, slot[0]))
        if slot[0] >= 0
        else (np.zeros_like(windows[0]), np.zeros_like(state))
    )
    steps = gated_delta_net.run(layer, qkv, z, alpha, beta, *before)
    kept = steps.windows if len(rows) <= len(windows) else steps.windows[-1:]
    windows[: len(kept)] = kept
    state_slots.put(state, kept_steps, steps)
    return [steps.y, pool]


def _gated_attention(inputs: list[np.ndarray], at: Attributes) -> list[np.ndarray]:
    rows, position, (cos, sin), norms, cache = inputs
    heads, kv_heads, dim, first = at["heads"], at["kv_heads"], at["head_dim"], int(position[0])
    query_gate, key, value = np.split(rows, np.cumsum([2 * heads * dim, kv_heads * dim]), axis=1)
    # The oracle makes its tables itself; the angles are in the ones given, up to whole turns.
    angle, factor = np.arctan2(sin, cos), float(np.hypot(cos, sin).flat[0])
    y = np.empty((len(rows), heads * dim))
    cache = cache.copy()
    for t in range(len(rows)):
        layer = attention.Layer(heads, kv_heads, norms[0], norms[1], at["epsilon"], angle[t], factor)
        qg = query_gate[t].reshape(heads, 2, dim)
        new_key = np.stack(
            [
                attention.rotate(attention.rms_norm(k, norms[1], at["epsilon"]), 1, angle[t], factor)
                for k in key[t].reshape(kv_heads, dim)
            ]
        )
        new = np.stack([new_key, value[t].reshape(kv_heads, dim)])
        cache[:, first + t] = int8_rows.encode(new) if at["cache_type"] else new
        rows = cache[:, : first + t + 1]
        y[t] = _attend(layer, qg, int8_rows.decode(rows) if at["cache_type"] else rows, angle[t])
    return [y, cache]


def _attend(layer: attention.Layer, query_gate: F64, cache: F64, angle: F64) -> F64:
    """One token over the keys and values [2, n, KV, D] up to itself."""
    out = np.empty((layer.heads, layer.dim))
    for head in range(layer.heads):
        keys, values = cache[:, :, head // (layer.heads // layer.kv_heads)]
        query = attention.rms_norm(query_gate[head, 0], layer.q_norm, layer.eps)
        scores = keys @ attention.rotate(query, 1, angle, layer.factor) / np.sqrt(layer.dim)
        weights = np.exp(scores - scores.max())
        out[head] = weights @ values / weights.sum() * sigmoid(query_gate[head, 1])
    return out.ravel()


def _split_pack(pack: np.ndarray, types: list[int], shapes: list[tuple[int, int]]) -> list[F64]:
    """The matrices of a pack, of these rows and columns: each from the next multiple of 256 bytes on."""
    matrices, at, raw = [], 0, pack.ravel()
    for kind, (rows, columns) in zip(types, shapes, strict=True):
        values, block = ops.BLOCKS[kind]
        nbytes = rows * columns // values * block
        matrices.append(_matrix(raw[at : at + nbytes].reshape(rows, columns // values, block), kind))
        at += -(-nbytes // 256) * 256
    assert at == raw.size, "bytes left over in a pack"
    return matrices


def _layer(
    inputs: list[np.ndarray],
    at: Attributes,
    rows_in: list[int],
    width: int,
    mixer: Callable[[F64, np.ndarray], list[np.ndarray]],
) -> list[np.ndarray]:
    """A layer around ``mixer``, which turns the rows of its input products and its parameters into ``width`` values a
    row, and its state."""
    (x, pack, parameters), ffn, hidden = inputs[:3], at["ffn_size"], inputs[0].shape[1]
    shapes = [(n, hidden) for n in rows_in] + [(hidden, width), (ffn, hidden), (ffn, hidden), (hidden, ffn)]
    *products, output, gate, up, down = _split_pack(pack, at["types"], shapes)
    mixer_norm, ffn_norm, own = np.split(parameters.astype(np.float64), [hidden, 2 * hidden])
    normed = _rms_norm(x, mixer_norm, at["epsilon"])
    mixed, state = mixer(np.concatenate([normed @ w.T for w in products], axis=1), own)
    r = x + mixed @ output.T
    normed = _rms_norm(r, ffn_norm, at["epsilon"])
    gated = normed @ gate.T
    return [r + (gated * sigmoid(gated) * (normed @ up.T)) @ down.T, state]


def _gated_delta_net_layer(inputs: list[np.ndarray], at: Attributes) -> list[np.ndarray]:
    slot, pool = inputs[3:]
    width = at["v_heads"] * at["head_dim"]
    channels = 2 * at["k_heads"] * at["head_dim"] + width
    return _layer(
        inputs,
        at,
        [channels, width, at["v_heads"], at["v_heads"]],
        width,
        lambda rows, own: _gated_delta_net([rows, pool, slot, own], at),
    )


def _gated_attention_layer(inputs: list[np.ndarray], at: Attributes) -> list[np.ndarray]:
    position, rope, cache = inputs[3:]
    dim, width = at["head_dim"], at["heads"] * at["head_dim"]
    return _layer(
        inputs,
        at,
        [2 * width, at["kv_heads"] * dim, at["kv_heads"] * dim],
        width,
        lambda rows, own: _gated_attention([rows, position, rope, own.reshape(2, dim), cache], at),
    )


def _rms_norm_rows(inputs: list[np.ndarray], epsilon: float) -> list[np.ndarray]:
    x, weight, rows = inputs
    y = _rms_norm(x, weight, epsilon)
    return [y, y[rows]]


_Kernel = Callable[[list[np.ndarray], Attributes], list[np.ndarray]]
_PLUGINS: dict[str, _Kernel] = {
    "KQuantMatmul": _matmul,
    "KQuantEmbedding": _embedding,
    "RmsNorm": lambda inputs, at: [_rms_norm(inputs[0], inputs[1], at["epsilon"])],
    "RmsNormRows": lambda inputs, at: _rms_norm_rows(inputs, at["epsilon"]),
    "RmsNormPair": lambda inputs, at: [
        np.concatenate([_rms_norm(x, weight, at["epsilon"]) for x, weight in (inputs[:2], inputs[2:])], axis=1)
    ],
    "RopeTables": _rope_tables,
    "GatedDeltaNet": _gated_delta_net,
    "GatedAttention": _gated_attention,
    "GatedDeltaNetLayer": _gated_delta_net_layer,
    "GatedAttentionLayer": _gated_attention_layer,
}
_NATIVE: dict[str, _Kernel] = {
    "Add": lambda inputs, at: [inputs[0] + inputs[1]],
    "Mul": lambda inputs, at: [inputs[0] * inputs[1]],
    "Sigmoid": lambda inputs, at: [sigmoid(inputs[0])],
    "Concat": lambda inputs, at: [np.concatenate(inputs, axis=at["axis"])],
    "Split": lambda inputs, at: np.split(inputs[0], np.cumsum(inputs[1])[:-1], axis=at["axis"]),
    "Gather": lambda inputs, at: [np.take(inputs[0], inputs[1], axis=at["axis"])],
}
