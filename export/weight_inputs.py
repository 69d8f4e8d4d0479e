"""Weights of a model in TensorRT form as graph inputs: what an engine that shares its weights is built from."""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper


def external_weights(model: onnx.ModelProto) -> list[TensorProto]:
    """The int8 initialisers in external data, in order."""
    return [each for each in model.graph.initializer if each.data_location == TensorProto.EXTERNAL]


def weights_as_inputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of ``model`` in which every initialiser in external data is an input of the same name."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for weight in external_weights(model):
        changed.graph.input.append(helper.make_tensor_value_info(weight.name, weight.data_type, weight.dims))
    inside = [each for each in model.graph.initializer if each.data_location != TensorProto.EXTERNAL]
    del changed.graph.initializer[:]
    changed.graph.initializer.extend(inside)
    return changed
