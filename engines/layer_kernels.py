"""How many kernels a layer node is in a decode pass on compute capability 9.0, by its shapes.

Mirrors `layer_fusion` of plugins/kernels/layer_decode.cu, whose constants a test compares with these.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from onnx import ModelProto, NodeProto, helper

SUPERBLOCK = 256
MAX_SUPERS, MAX_DOWN_CHUNKS = 16, 4
NET_HEAD_DIM, NET_CONV_KERNEL, NET_PARTS = 128, 4, 4
MULTIPROCESSORS = 132  # of an H100 SXM or H200
_Q4_K, _Q5_K, _Q6_K = 12, 13, 14

WHOLE = "one kernel on compute capability 9.0"
AROUND_MIXER = "one kernel before the mixer and one behind it on compute capability 9.0"
AFTER_MIXER = "one kernel behind the mixer on compute capability 9.0"
SEPARATE = "its parts' own kernels everywhere"


def layer_kernels(model: ModelProto, hidden_size: int) -> dict[str, int]:
    """Layer nodes of a graph in TensorRT form by what they run as."""
    return dict(Counter(_kernels(node, hidden_size) for node in model.graph.node if _is_layer(node)))


def _is_layer(node: NodeProto) -> bool:
    return any(each.name == "ffn_size" for each in node.attribute)


def _kernels(node: NodeProto, hidden: int) -> str:
    values: dict[str, Any] = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    *inputs, output, gate, _, down = values["types"]
    attention = "kv_heads" in values
    mixer = values["heads" if attention else "v_heads"] * values["head_dim"]
    fits = (
        hidden >= MAX_SUPERS // 2 * SUPERBLOCK
        and _takes(output, mixer)
        and _takes(gate, hidden)
        and _takes(down, values["ffn_size"], MAX_SUPERS * MAX_DOWN_CHUNKS)
    )
    if not fits:
        return SEPARATE
    if not all(_takes(each, hidden) for each in inputs):
        return AFTER_MIXER
    net = (
        not attention
        and values["head_dim"] == NET_HEAD_DIM
        and values["conv_kernel"] == NET_CONV_KERNEL
        and values["v_heads"] * NET_PARTS <= MULTIPROCESSORS
    )
    return WHOLE if net else AROUND_MIXER


def _takes(kind: int, columns: int, most: int = MAX_SUPERS) -> bool:
    """Whether a matrix of ``columns`` and GGML type ``kind`` goes through the ring of bulk copies."""
    supers, rest = divmod(columns, SUPERBLOCK)
    ring = supers % 8 == 0 if kind == _Q6_K else kind in (_Q4_K, _Q5_K)
    return not rest and ring and supers <= most
