"""Faults that such a product is known for, built in on purpose: each leaves a program that runs and gives fluent text.

``GRAPH``: in what the exporter writes, so that its graphs are self-consistent and wrong. ``STATE``: in what ONNX
Runtime's engine keeps between passes. ``SEMANTICS``: in what runs the TensorRT form. Each takes a MonkeyPatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engines.accuracy import semantics
from export import layers
from export.graph import Function, Graph
from plugins import ops
from runtime.engine_onnxruntime import OnnxTrunkEngine

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]


def v_heads_in_groups(patch: Patch) -> None:
    """Value head h reads key head h div 2, the order of the original checkpoints, not h mod 2, that of GGUF files."""
    op = Function.op

    def grouped(self: Function, op_type: str, inputs: list[str], *args: Any, **attributes: Any) -> Any:
        if self.name == "GatedDeltaNet" and op_type == "Tile":
            # Each key head twice in a row, instead of all of them twice.
            return op(self, "Concat", [inputs[0]] * 2, *args, axis=3, **attributes)
        return op(self, op_type, inputs, *args, **attributes)

    patch.setattr(Function, "op", grouped)


def eh_proj_halves_swapped(patch: Patch) -> None:
    op = Graph.op

    def swapped(self: Graph, op_type: str, inputs: list[str], *args: Any, **attributes: Any) -> Any:
        is_pair = op_type == "Concat" and self.name == "draft"
        return op(self, op_type, inputs[::-1] if is_pair else inputs, *args, **attributes)

    patch.setattr(Graph, "op", swapped)


def rope_one_pair_off(patch: Patch) -> None:
    """Pair i turns with the frequency of pair i + 1."""
    frequencies = layers.rope_frequencies

    def shifted(rope: Any) -> tuple[np.ndarray, float]:
        values, factor = frequencies(rope)
        return values * values[1] / values[0], factor

    patch.setattr(layers, "rope_frequencies", shifted)


def state_in_half_precision(patch: Patch) -> None:
    commit = OnnxTrunkEngine.commit

    def rounding(self: OnnxTrunkEngine, n_keep: int) -> None:
        commit(self, n_keep)
        for state in self._states[self._current]:
            state[:] = state.astype(np.float16)

    patch.setattr(OnnxTrunkEngine, "commit", rounding)


def conv_window_not_restored(patch: Patch) -> None:
    keep = OnnxTrunkEngine._keep_convs
    patch.setattr(OnnxTrunkEngine, "_keep_convs", lambda self, count: keep(self, max(count, self._pending)))


def _delta_net(change: Callable[[list[np.ndarray], semantics.Attributes], list[np.ndarray]]) -> Fault:
    """``change`` in the place of the op; it may call `semantics.gated_delta_net` itself."""

    def fault(patch: Patch) -> None:
        patch.setitem(semantics.OPS, ops.GATED_DELTA_NET.name, change)

    return fault


def _half(inputs: list[np.ndarray], at: semantics.Attributes) -> list[np.ndarray]:
    y, pool = semantics.gated_delta_net(inputs, at)
    state, steps, _ = semantics.split_pool(pool, at)
    state[:], steps[:] = state.astype(np.float16), steps.astype(np.float16)
    return [y, pool]


def _last_window(inputs: list[np.ndarray], at: semantics.Attributes) -> list[np.ndarray]:
    """The window of the last slot, with the state of the one asked for."""
    rows, pool, slot, parameters = inputs
    pool = pool.copy()
    _, _, windows = semantics.split_pool(pool, at)
    windows[slot[0]] = windows[-1]
    return semantics.gated_delta_net([rows, pool, slot, parameters], at)


def _grouped(patch: Patch) -> None:
    patch.setattr(semantics, "for_value_heads", lambda x, heads: np.repeat(x, heads // x.shape[1], axis=1))


def _one_position_off(patch: Patch) -> None:
    def off(inputs: list[np.ndarray], at: semantics.Attributes) -> list[np.ndarray]:
        rows, position, bits = inputs
        return semantics.rope_tables([rows, position + 1, bits], at)

    patch.setitem(semantics.OPS, ops.ROPE_TABLES.name, off)


V_HEADS, EH_PROJ, HALF, CONV, ROPE = "v-head order", "eh_proj halves", "half-precision state", "conv window", "rope"
GRAPH: dict[str, Fault] = {
    V_HEADS: v_heads_in_groups,
    EH_PROJ: eh_proj_halves_swapped,
    ROPE: rope_one_pair_off,
}
STATE: dict[str, Fault] = {HALF: state_in_half_precision, CONV: conv_window_not_restored}
SEMANTICS: dict[str, Fault] = {
    V_HEADS: _grouped,
    HALF: _delta_net(_half),
    CONV: _delta_net(_last_window),
    ROPE: _one_position_off,
}
