"""Which products of a canonical graph share a KQuantMatmul node, and which neighbours that node takes over."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_graphsurgeon as gs

from export.graph import FUNCTION_DOMAIN
from export.raw_weights import RawMatrix
from plugins.ops import MAX_INPUTS, MAX_MATRICES


@dataclass(frozen=True)
class Linear:
    """One product: ``node`` makes ``y`` from ``x`` [T, K] by the matrix ``raw``."""

    node: gs.Node
    x: gs.Variable
    raw: RawMatrix
    reader: gs.Node  # of x: the node itself, or the one that prepares x for it
    y: gs.Variable


@dataclass(frozen=True)
class MatmulGroup:
    """Products of one ``x``, and the nodes before (norm) and behind (residual Add, SwiGLU) that become part of it."""

    x: gs.Variable
    linears: tuple[Linear, ...]
    norm: gs.Node | None
    residual: gs.Node | None
    swiglu: gs.Node | None

    @property
    def residual_input(self) -> gs.Tensor:
        assert self.residual is not None
        first, second = self.residual.inputs
        return second if first is self.linears[0].y else first


def find_groups(graph: gs.Graph, raw: dict[str, RawMatrix]) -> list[MatmulGroup]:
    """All products of the graph, grouped; ``raw`` tells the matrices by the names of their parts."""
    by_input: dict[str, list[Linear]] = {}
    for node in graph.nodes:
        linear = _linear(node, raw)
        if linear is not None:
            by_input.setdefault(linear.x.name, []).append(linear)
    groups = []
    for linears in by_input.values():
        norm = _norm(graph, linears)
        for start in range(0, len(linears), MAX_MATRICES):
            groups.append(_group(graph, tuple(linears[start : start + MAX_MATRICES]), norm))
    return groups


def _linear(node: gs.Node, raw: dict[str, RawMatrix]) -> Linear | None:
    if node.domain == FUNCTION_DOMAIN and node.op in ("BlockMatMul", "AffineBlockMatMul"):
        split = node.inputs[0].inputs[0]
        return Linear(node, split.inputs[0], raw[node.inputs[1].name], split, node.outputs[0])
    if node.op != "Gemm":
        return None
    x, weight = node.inputs
    name = weight.inputs[0].inputs[0].name if weight.inputs else weight.name
    return Linear(node, x, raw[name], node, node.outputs[0])


def _group(graph: gs.Graph, linears: tuple[Linear, ...], norm: gs.Node | None) -> MatmulGroup:
    residual = _residual(graph, linears[0]) if len(linears) == 1 else None
    group = MatmulGroup(linears[0].x, linears, norm, residual, _swiglu(graph, linears))
    assert 1 + len(linears) + bool(norm) + bool(residual) <= MAX_INPUTS
    return group


def _norm(graph: gs.Graph, linears: list[Linear]) -> gs.Node | None:
    """The norm that makes x, when nothing but these products reads x and one node holds them all."""
    x = linears[0].x
    if len(linears) > MAX_MATRICES or not x.inputs or x.inputs[0].op != "RMSNormalization" or _is_output(graph, x):
        return None
    readers = {id(linear.reader) for linear in linears}
    return x.inputs[0] if all(id(node) in readers for node in x.outputs) else None


def _residual(graph: gs.Graph, linear: Linear) -> gs.Node | None:
    y = linear.y
    add = _only_reader(graph, y)
    return add if add is not None and add.op == "Add" and add.inputs[0] is not add.inputs[1] else None


def _swiglu(graph: gs.Graph, linears: tuple[Linear, ...]) -> gs.Node | None:
    if len(linears) != 2:
        return None
    gate, up = linears
    node, other = _only_reader(graph, gate.y), _only_reader(graph, up.y)
    if node is None or other is None or node.name != other.name:
        return None
    if node.domain != FUNCTION_DOMAIN or node.op != "SwiGLU":
        return None
    alike = gate.raw.ggml_type == up.raw.ggml_type and gate.raw.rows == up.raw.rows
    return node if alike and node.inputs[0] is gate.y and node.inputs[1] is up.y else None


def _only_reader(graph: gs.Graph, tensor: gs.Variable) -> gs.Node | None:
    readers = tensor.outputs
    return readers[0] if len(readers) == 1 and not _is_output(graph, tensor) else None


def _is_output(graph: gs.Graph, tensor: gs.Variable) -> bool:
    return any(tensor is output for output in graph.outputs)
