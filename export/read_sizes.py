"""How many bytes of weights a pass of an exported graph reads."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import onnx
from onnx import ModelProto, TensorProto

# These read the rows of a few tokens only.
_LOOK_UPS = ("BlockEmbedding", "KQuantEmbedding", "Gather")


def read_nbytes(path: Path) -> int:
    """Of an exported graph."""
    return read_nbytes_of(onnx.load(path, load_external_data=False))


def read_nbytes_of(model: ModelProto) -> int:
    """Of the weights in external data that a node other than an embedding look-up takes."""
    graph = model.graph
    takers: dict[str, list[str]] = defaultdict(list)
    for node in graph.node:
        for name in node.input:
            takers[name].append(node.op_type)
    return sum(
        _nbytes(weight)
        for weight in graph.initializer
        if weight.data_location == TensorProto.EXTERNAL
        and not all(taker.startswith(_LOOK_UPS) for taker in takers[weight.name])
    )


def _nbytes(weight: TensorProto) -> int:
    return next(int(entry.value) for entry in weight.external_data if entry.key == "length")
