"""The last pass for TensorRT-RTX 1.6: each custom op travels inside a LinearAttention node.

That version's importer refuses every op it does not know, but hands LinearAttention to a plugin of that name with its
``update_rule`` string as it stands, whatever the inputs. So the string names our op and its attributes. The node must
have 4 to 6 inputs and 2 outputs: missing inputs are constants, a missing output is a value that nobody reads.

Constants, and not the first input once more: TensorRT copies an input that a node has twice, with a kernel of its own.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

from plugins import ops

_MIN_INPUTS = 4


def to_rtx16(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a model in TensorRT form, in the dialect."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    absent = [name for node in changed.graph.node if node.domain == ops.DOMAIN for name in _wrap(node)]
    changed.graph.initializer.extend(numpy_helper.from_array(np.zeros(1, np.float32), name) for name in absent)
    kept = [opset for opset in changed.opset_import if opset.domain != ops.DOMAIN]
    del changed.opset_import[:]
    changed.opset_import.extend(kept)
    return changed


def _wrap(node: onnx.NodeProto) -> list[str]:
    """The names of the inputs that it has beside its own."""
    rule = update_rule(node)
    absent = [f"{node.output[0]}/absent.{i}" for i in range(len(node.input), _MIN_INPUTS)]
    node.input.extend(absent)
    node.output.extend(f"{node.output[0]}/unused" for _ in range(ops.MAX_OUTPUTS - len(node.output)))
    node.op_type, node.domain = "LinearAttention", ""
    del node.attribute[:]
    for key, value in (("update_rule", rule), ("q_num_heads", 1), ("kv_num_heads", 1)):
        node.attribute.append(helper.make_attribute(key, value))
    return absent


def update_rule(node: onnx.NodeProto) -> str:
    """``OP;name=value;...``, lists with commas, floats with the 9 digits that bring a float32 back."""
    op = ops.OPS[node.op_type]
    values = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    parts = [op.name]
    for attribute in op.attributes:
        value = values[attribute.name]
        if attribute.kind == "ints":
            text = ",".join(map(str, value))
        else:
            text = f"{value:.9g}" if attribute.kind == "float" else str(value)
        parts.append(f"{attribute.name}={text}")
    return ";".join(parts)
