"""TensorRT form, second step: the five plugin nodes of a decoder layer become one.

What `export.lower` leaves of a layer is a chain that a layer op of `plugins.ops` stands for as a whole:

    KQuantMatmul(norm, W_in) -> mixer -> KQuantMatmul(W_output, + x) -> r
    r -> KQuantMatmul(norm, gate, up, swiglu) -> KQuantMatmul(down, + r)

Its matrices become one weight, a pack. A layer that is no such chain keeps its nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from export.graph import Weight
from export.lower import STANDS_FOR
from plugins import ops

_LAYER_OPS = {
    ops.GATED_DELTA_NET.name: ops.GATED_DELTA_NET_LAYER,
    ops.GATED_ATTENTION.name: ops.GATED_ATTENTION_LAYER,
}


@dataclass(frozen=True)
class LayerForm:
    """``packs``: by name, the stored matrices of a pack, in order; the model's initialiser of that name has its size,
    and as its place ``location``, a file that need not exist. ``notes``: which layers keep their nodes, and why."""

    model: onnx.ModelProto
    packs: dict[str, tuple[TensorProto, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class _NotALayer(Exception):
    """Why the nodes around a mixer are not what a layer op stands for."""


@dataclass(frozen=True)
class _Chain:
    """The nodes of a layer in order, and its matrices."""

    inputs: NodeProto
    mixer: NodeProto
    output: NodeProto
    gate_up: NodeProto
    down: NodeProto

    @property
    def nodes(self) -> tuple[NodeProto, ...]:
        return self.inputs, self.mixer, self.output, self.gate_up, self.down

    @property
    def matmuls(self) -> tuple[NodeProto, ...]:
        return self.inputs, self.output, self.gate_up, self.down


def merge_layers(model: onnx.ModelProto, location: str) -> LayerForm:
    """``model``, which is left as it is, with a node a layer; location: the file name that packs are said to lie in."""
    merging = _Merging(model, location)
    merging.run()
    return LayerForm(merging.model, merging.packs, tuple(merging.notes))


class _Merging:
    def __init__(self, model: onnx.ModelProto, location: str) -> None:
        self.model = onnx.ModelProto()
        self.model.CopyFrom(model)
        self.location, self.end = location, 0
        graph = self.model.graph
        self.constants = {each.name: each for each in graph.initializer}
        self.outputs = {each.name for each in graph.output}
        self.producers = {name: node for node in graph.node for name in node.output}
        self.readers: dict[str, list[NodeProto]] = {}
        for node in graph.node:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)
        self.packs: dict[str, tuple[TensorProto, ...]] = {}
        self.notes: list[str] = []

    def run(self) -> None:
        graph = self.model.graph
        merged: dict[str, NodeProto] = {}
        dropped: set[str] = set()
        for mixer in [node for node in graph.node if node.op_type in _LAYER_OPS]:
            try:
                chain = self._chain(mixer)
            except _NotALayer as reason:
                self.notes.append(f"{_prefix(mixer)} is built of single ops: {reason}")
                continue
            merged[chain.down.name] = self._layer(chain)
            dropped |= {node.name for node in chain.nodes}
        kept = [merged.get(node.name, node) for node in graph.node if node.name in merged or node.name not in dropped]
        _replace(graph.node, kept)
        used = {name for node in kept for name in node.input}
        _replace(graph.initializer, [each for each in self.constants.values() if each.name in used])
        made = {name for node in kept for name in node.output}
        _replace(graph.value_info, [each for each in graph.value_info if each.name in made])

    def _chain(self, mixer: NodeProto) -> _Chain:
        inputs = self.producers.get(mixer.input[0])
        if inputs is None or not _is_matmul(inputs, norm=1, residual=0) or self._only_reader(mixer.input[0]) != mixer:
            raise _NotALayer("other nodes read the mixer's input rows, or make them")
        x = inputs.input[0]
        output = self._only_reader(mixer.output[0])
        if output is None or not _is_matmul(output, norm=0, residual=1) or output.input[-1] != x:
            raise _NotALayer("the mixer's result is not added to the layer's input")
        r = output.output[0]
        gate_up, down = self._ffn(r)
        if down.input[-1] != r or self._only_reader(gate_up.output[0]) != down or r in self.outputs:
            raise _NotALayer("the feed-forward network's result is not added to its input")
        return _Chain(inputs, mixer, output, gate_up, down)

    def _ffn(self, r: str) -> tuple[NodeProto, NodeProto]:
        readers = self.readers[r]
        gate_up = next((node for node in readers if _is_matmul(node, norm=1, residual=0)), None)
        if gate_up is None or not _attributes(gate_up)["swiglu"]:
            raise _NotALayer("its gate and up matrices are of two types, which the layer op does not take")
        down = next((node for node in readers if _is_matmul(node, norm=0, residual=1)), None)
        if down is None or len(readers) != 2:
            raise _NotALayer("other nodes read the input of the feed-forward network")
        return gate_up, down

    def _layer(self, chain: _Chain) -> NodeProto:
        prefix, mixer, op = _prefix(chain.mixer), chain.mixer, _LAYER_OPS[chain.mixer.op_type]
        mixer_inputs = dict(zip([each.name for each in ops.OPS[mixer.op_type].inputs], mixer.input, strict=True))
        own = mixer_inputs.pop("parameters" if "parameters" in mixer_inputs else "norms")
        mixer_inputs.pop("rows")
        norms = [chain.inputs.input[-1], chain.gate_up.input[-1]]
        given = {
            "x": chain.inputs.input[0],
            "weights": self._pack(f"{prefix}.weights", chain),
            "parameters": self._parameters(f"{prefix}.parameters", [*norms, own]),
            **mixer_inputs,
        }
        gate = self.constants[chain.gate_up.input[1]]
        attributes = {
            **_attributes(mixer),
            "types": [kind for node in chain.matmuls for kind in _attributes(node)["types"]],
            "ffn_size": gate.dims[0],
        }
        assert set(attributes) == {each.name for each in op.attributes}, op.name
        node = helper.make_node(
            op.name,
            [given[each.name] for each in op.inputs],
            [chain.down.output[0], mixer.output[1]],
            f"{prefix}/layer",
            domain=ops.DOMAIN,
            **attributes,
        )
        stands_for = " ".join(each.value for part in chain.nodes for each in part.metadata_props)
        node.metadata_props.add(key=STANDS_FOR, value=stands_for)
        return node

    def _pack(self, name: str, chain: _Chain) -> str:
        matrices = [
            self.constants[each]
            for node in chain.matmuls
            for each in node.input[1 : 1 + len(_attributes(node)["types"])]
        ]
        _, blocks = ops.pack_offsets([int(np.prod(each.dims)) for each in matrices])
        shape, nbytes = (1, blocks, ops.PACK_BLOCK), blocks * ops.PACK_BLOCK
        pack = Weight(name, TensorProto.INT8, shape, self.location, self.end, nbytes)
        self.end += nbytes
        self.constants[name], self.packs[name] = pack.external_tensor(), tuple(matrices)
        return name

    def _parameters(self, name: str, parts: list[str]) -> str:
        values = np.concatenate([numpy_helper.to_array(self.constants[part]).ravel() for part in parts])
        self.constants[name] = numpy_helper.from_array(values, name)
        return name

    def _only_reader(self, name: str) -> NodeProto | None:
        readers = self.readers.get(name, [])
        return readers[0] if len(readers) == 1 and name not in self.outputs else None


def _prefix(mixer: NodeProto) -> str:
    prefix: str = mixer.name.split("/")[0]
    return prefix


def _is_matmul(node: NodeProto, *, norm: int, residual: int) -> bool:
    if node.op_type != ops.KQUANT_MATMUL.name:
        return False
    attributes = _attributes(node)
    return bool(attributes["has_norm"] == norm and attributes["has_residual"] == residual)


def _attributes(node: NodeProto) -> dict[str, Any]:
    return {each.name: helper.get_attribute_value(each) for each in node.attribute}


def _replace(field: Any, values: list[Any]) -> None:
    """Make ``values`` all that a repeated field holds; they may be its own."""
    copies = [type(value).FromString(value.SerializeToString()) for value in values]
    del field[:]
    field.extend(copies)
