"""TensorRT form, a step on request: KV caches of int8 rows with their scales, instead of float16."""

from __future__ import annotations

import onnx
from onnx import TensorProto

from plugins import ops

_CACHE_TYPE = "cache_type"


def with_int8_caches(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a model in TensorRT form whose attention nodes keep keys and values in int8 (see `plugins.ops`).

    Its inputs and outputs for caches become int8, their rows longer by the scales."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    caches = {name for node in changed.graph.node for name in _make_int8(node)}
    for value in (*changed.graph.input, *changed.graph.output, *changed.graph.value_info):
        if value.name in caches:
            kind = value.type.tensor_type
            kind.elem_type = TensorProto.INT8
            kind.shape.dim[-1].dim_value += ops.CACHE_SCALE_BYTES
    return changed


def _make_int8(node: onnx.NodeProto) -> list[str]:
    """The names of a node's caches, which are int8 from now on."""
    wanted = [attribute for attribute in node.attribute if attribute.name == _CACHE_TYPE]
    if node.domain != ops.DOMAIN or not wanted:
        return []
    wanted[0].i = ops.CACHE_DTYPES.index("int8")
    op = ops.OPS[node.op_type]
    outputs = [index for index in range(len(op.outputs)) if op.outputs[index].alias == "cache"]
    return [name for index in outputs for name in (node.output[index], node.input[op.alias_of(index)])]
