"""A Polygraphy runner without a GPU: the TensorRT form, node by node, by what each op means (`semantics`).

A float16 cache is kept as float32 here: rounding of the new rows, on this side alone, would hide what is looked for."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any

import numpy as np
from onnx import helper, numpy_helper
from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata

from engines.accuracy.graphs import EngineGraph
from engines.accuracy.semantics import OPS, STANDARD
from plugins import ops


class SemanticsRunner(BaseRunner):
    """Runs an `EngineGraph` in NumPy float64."""

    def __init__(self, graph: EngineGraph, name: str = "oracle") -> None:
        super().__init__(name=name)
        self._graph = graph

    def activate_impl(self) -> None:
        model = self._graph.model.graph
        self._constants: dict[str, np.ndarray] = {
            each.name: self._graph.weights[each.name]
            if each.name in self._graph.weights
            else numpy_helper.to_array(each)
            for each in model.initializer
        }
        self._nodes = [
            (
                (OPS if node.domain == ops.DOMAIN else STANDARD)[node.op_type],
                list(node.input),
                list(node.output),
                {each.name: helper.get_attribute_value(each) for each in node.attribute},
            )
            for node in model.node
        ]

    def deactivate_impl(self) -> None:
        del self._constants, self._nodes

    def get_input_metadata_impl(self) -> TensorMetadata:
        metadata = TensorMetadata()
        for value in self._graph.model.graph.input:
            kind = value.type.tensor_type
            shape = [dim.dim_value or None for dim in kind.shape.dim]
            dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
            metadata.add(value.name, np.dtype(np.float32) if dtype == np.float16 else dtype, shape)
        return metadata

    def infer_impl(self, feed_dict: dict[str, Any]) -> OrderedDict[str, np.ndarray]:
        began = time.perf_counter()
        values: dict[str, np.ndarray] = {**self._constants, **feed_dict}
        for compute, inputs, outputs, attributes in self._nodes:
            results = compute([values[name] for name in inputs], attributes)
            values.update(zip(outputs, results, strict=True))
        self.inference_time = time.perf_counter() - began
        return OrderedDict((value.name, values[value.name]) for value in self._graph.model.graph.output)
