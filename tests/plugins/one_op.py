"""Networks of one custom op, imported by the TensorRT at hand."""

from __future__ import annotations

from typing import Any

import onnx
from onnx import TensorProto, helper

from export.rtx16_dialect import to_rtx16
from plugins import ops
from plugins.load import load_plugins, prepare_parser, tensorrt
from plugins.log import logger

TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
    "int8": TensorProto.INT8,
}
Shape = tuple[int | str, ...]
POOL = (
    4 * 32 * 32 + 2 * 4 * (32 + 64) + 3 * 3 * 256
)  # three slots: a state of 4 heads, two steps, windows of 256 channels

# A node of every op that fits its contract: attributes, and the shapes of inputs and outputs.
SAMPLES: dict[str, tuple[dict[str, Any], list[Shape], list[Shape]]] = {
    "KQuantMatmul": (
        {"types": [12, 14], "has_norm": 1, "has_residual": 0, "swiglu": 0, "epsilon": 1e-6},
        [("T", 512), (96, 2, 144), (40, 2, 210), (512,)],
        [(-1, 136)],
    ),
    "KQuantEmbedding": ({"type": 8}, [("T",), (50, 4, 34)], [(-1, 128)]),
    "RmsNorm": ({"epsilon": 1e-6}, [("T", 96), (96,)], [(-1, 96)]),
    "RmsNormRows": ({"epsilon": 1e-6}, [("T", 96), (96,), (5,)], [(-1, 96), (5, 96)]),
    "RmsNormPair": ({"epsilon": 1e-6}, [("T", 96), (96,), ("T", 64), (64,)], [(-1, 160)]),
    "RopeTables": ({"factor": 1.5}, [("T", 96), (1,), (16,)], [(2, -1, 16)]),
    "GatedDeltaNet": (
        {"k_heads": 2, "v_heads": 4, "head_dim": 32, "conv_kernel": 4, "epsilon": 1e-6},
        [("T", 392), (POOL,), (1,), (256 * 4 + 8 + 32,)],
        [(-1, 128), (POOL,)],
    ),
    "GatedAttention": (
        {"heads": 4, "kv_heads": 2, "head_dim": 64, "rope_dim": 32, "cache_type": 0, "epsilon": 1e-6},
        [("T", 768), (1,), (2, "T", 16), (2, 64), (2, 128, 2, 64)],
        [(-1, 256), (2, 128, 2, 64)],
    ),
    # Hidden size 256: qkv [256, 256], z [128, 256], alpha, beta [4, 256], output [256, 128], gate, up [512, 256], down.
    "GatedDeltaNetLayer": (
        {
            "types": [12, 12, 0, 30, 8, 12, 12, 14],
            "ffn_size": 512,
            "k_heads": 2,
            "v_heads": 4,
            "head_dim": 32,
            "conv_kernel": 4,
            "epsilon": 1e-6,
        },
        [
            ("T", 256),
            (1, 144 + 72 + 16 + 8 + 136 + 2 * 288 + 420, 256),
            (512 + 256 * 4 + 8 + 32,),
            (1,),
            (POOL,),
        ],
        [(-1, 256), (POOL,)],
    ),
    # Hidden size 256: query and gate [512, 256], key, value [128, 256], output [256, 256], gate, up [512, 256], down.
    "GatedAttentionLayer": (
        {
            "types": [12, 1, 14, 13, 8, 8, 12],
            "ffn_size": 512,
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 64,
            "rope_dim": 32,
            "cache_type": 0,
            "epsilon": 1e-6,
        },
        [
            ("T", 256),
            (1, 288 + 256 + 105 + 176 + 2 * 544 + 288, 256),
            (512 + 128,),
            (1,),
            (2, "T", 16),
            (2, 128, 2, 64),
        ],
        [(-1, 256), (2, 128, 2, 64)],
    ),
}


# Those with a cache, an int8 one.
INT8_SAMPLES: dict[str, tuple[dict[str, Any], list[Shape], list[Shape]]] = {
    name: ({**attributes, "cache_type": 1}, [*inputs[:-1], (2, 128, 2, 80)], [outputs[0], (2, 128, 2, 80)])
    for name, (attributes, inputs, outputs) in SAMPLES.items()
    if "cache_type" in attributes
}


def dtype_of(tensor: ops.Tensor, attributes: dict[str, Any]) -> str:
    """The one that the attributes choose."""
    dtypes = tensor.dtype.split(", ")
    return dtypes[attributes["cache_type"]] if len(dtypes) > 1 else dtypes[0]


def input_types(name: str, attributes: dict[str, Any]) -> list[str]:
    """The contract's dtypes of a node's inputs, optional and repeated ones unfolded."""
    kinds: list[str] = []
    for tensor in ops.OPS[name].inputs:
        if tensor.name.endswith("*"):
            kinds += [dtype_of(tensor, attributes)] * len(attributes["types"])
        elif not tensor.name.endswith("?") or attributes[f"has_{tensor.name[:-1]}"]:
            kinds.append(dtype_of(tensor, attributes))
    return kinds


def model_of(
    name: str, attributes: dict[str, Any], shapes: list[Shape], dtypes: list[str] | None = None
) -> onnx.ModelProto:
    """A model whose inputs are the op's and whose outputs are its own."""
    op, dtypes = ops.OPS[name], dtypes or input_types(name, attributes)
    inputs = [
        helper.make_tensor_value_info(f"in{i}", TYPES[dtype], shape)
        for i, (dtype, shape) in enumerate(zip(dtypes, shapes, strict=True))
    ]
    outputs = [
        helper.make_tensor_value_info(f"out{i}", TYPES[dtype_of(each, attributes)], None)
        for i, each in enumerate(op.outputs)
    ]
    node = helper.make_node(
        name, [i.name for i in inputs], [o.name for o in outputs], "node", domain=ops.DOMAIN, **attributes
    )
    graph = helper.make_graph([node], "one_op", inputs, outputs)
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 27), helper.make_opsetid(ops.DOMAIN, 1)], ir_version=13
    )


class Network:
    """The imported network. ``errors``: what import and build had to say."""

    def __init__(self, model: onnx.ModelProto) -> None:
        trt = tensorrt()
        load_plugins()
        prepare_parser()
        self.module = trt.module
        model = model if trt.imports_by_name else to_rtx16(model)
        self._builder = self.module.Builder(logger())
        self.network = self._builder.create_network()
        self._parser = self.module.OnnxParser(self.network, logger())
        self.imported = self._parser.parse(model.SerializeToString())

    def build(self, max_tokens: int = 8) -> bool:
        """Whether an engine comes out of it."""
        config = self._builder.create_builder_config()
        config.set_preview_feature(self.module.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
        profile = self._builder.create_optimization_profile()
        for index in range(self.network.num_inputs):
            tensor = self.network.get_input(index)
            low, high = ([size if dim < 0 else dim for dim in tensor.shape] for size in (1, max_tokens))
            profile.set_shape(tensor.name, low, high, high)
        config.add_optimization_profile(profile)
        return self._builder.build_serialized_network(self.network, config) is not None
