"""A small ONNX builder: graphs and local functions, with names, external weights and one way to save."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 27
IR_VERSION = 13
FUNCTION_DOMAIN = "nextn"
_OPSETS = {"": OPSET, "com.microsoft": 1, FUNCTION_DOMAIN: 1}

Dim = int | str


@dataclass(frozen=True)
class Weight:
    """An initialiser in an external file: where its bytes lie. ``data_type`` is a TensorProto type."""

    name: str
    data_type: int
    shape: tuple[int, ...]
    location: str
    offset: int
    nbytes: int

    def external_tensor(self) -> TensorProto:
        """The initialiser that says where the values lie."""
        tensor = TensorProto(name=self.name, data_type=self.data_type, dims=self.shape)
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", self.location), ("offset", self.offset), ("length", self.nbytes)):
            tensor.external_data.add(key=key, value=str(value))
        return tensor


class Body:
    """Nodes of a graph or function, in order. Every value gets the name of the node that makes it."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.value_infos: list[onnx.ValueInfoProto] = []
        self._prefix = ""
        self._used: dict[str, int] = {}

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix the node names made inside with ``name/``."""
        before, self._prefix = self._prefix, f"{self._prefix}{name}/"
        try:
            yield
        finally:
            self._prefix = before

    def unique(self, name: str) -> str:
        """``name`` under the current scope, numbered when taken."""
        full = self._prefix + name
        count = self._used.get(full, 0)
        self._used[full] = count + 1
        return f"{full}.{count}" if count else full

    def declare(self, value: str, data_type: int, shape: Sequence[Dim]) -> str:
        """State type and shape of the output of an op that the ONNX checker does not know."""
        self.value_infos.append(helper.make_tensor_value_info(value, data_type, list(shape)))
        return value

    def op(
        self, op_type: str, inputs: Sequence[str], name: str = "", outputs: int | Sequence[str] = 1, **attributes: Any
    ) -> Any:
        """Append a node; its output name, or a list of them when there are several.

        ``op_type`` may carry a domain ("com.microsoft::MatMulNBits"). ``outputs`` is a count or the names to give.
        """
        domain, _, kind = op_type.rpartition("::")
        base = self.unique(name or kind)
        if isinstance(outputs, int):
            names = [base] if outputs == 1 else [f"{base}:{index}" for index in range(outputs)]
        else:
            names = list(outputs)
        node = helper.make_node(kind, list(inputs), names, name=base, domain=domain)
        for key, value in attributes.items():
            known = isinstance(value, onnx.AttributeProto)
            node.attribute.append(value if known else helper.make_attribute(key, value))
        self.nodes.append(node)
        return names[0] if len(names) == 1 else names


class Function(Body):
    """A local function of domain ``nextn``: a named subgraph that ONNX Runtime inlines and a plugin can replace."""

    def __init__(
        self, name: str, inputs: Sequence[str], outputs: Sequence[str], attributes: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.name, self.inputs, self.outputs, self.attributes = name, list(inputs), list(outputs), list(attributes)
        self._used = dict.fromkeys([*inputs, *outputs], 1)

    def const(self, value: Any, dtype: Any = np.int64) -> str:
        """A constant of the body."""
        return self.op("Constant", [], value=numpy_helper.from_array(np.asarray(value, dtype)))

    def attribute(self, name: str, kind: int = onnx.AttributeProto.INTS, into: str = "value_ints") -> str:
        """A constant holding the function's attribute ``name`` (int64 [n])."""
        return self.op("Constant", [], ref=self.ref(name, into, kind))

    def ref(self, name: str, into: str = "", kind: int = onnx.AttributeProto.INT) -> onnx.AttributeProto:
        """A node attribute ``into`` (default: the same name) that takes the function's attribute ``name``."""
        assert name in self.attributes, name
        return _ref(into or name, kind, name)

    def proto(self) -> onnx.FunctionProto:
        used = {node.domain for node in self.nodes}
        return helper.make_function(
            FUNCTION_DOMAIN,
            self.name,
            self.inputs,
            self.outputs,
            self.nodes,
            [helper.make_opsetid(domain, version) for domain, version in _OPSETS.items() if domain in used | {""}],
            self.attributes,
            value_info=self.value_infos,
        )


def _ref(name: str, kind: int, source: str) -> onnx.AttributeProto:
    attribute = onnx.AttributeProto()
    attribute.name, attribute.type, attribute.ref_attr_name = name, kind, source  # type: ignore[assignment]
    return attribute


class Graph(Body):
    """A model graph. Inputs and outputs are declared with type and shape; calls of functions collect their bodies."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.initializers: dict[str, onnx.TensorProto] = {}
        self.functions: dict[str, Function] = {}

    def input(self, name: str, data_type: int, shape: Sequence[Dim]) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, data_type, list(shape)))
        return name

    def output(self, name: str, data_type: int, shape: Sequence[Dim]) -> str:
        """Declare that the value ``name`` is an output."""
        self.outputs.append(helper.make_tensor_value_info(name, data_type, list(shape)))
        return name

    def const(self, name: str, value: np.ndarray) -> str:
        """A small initialiser inside the file; equal names must hold equal values."""
        tensor = numpy_helper.from_array(np.ascontiguousarray(value), name)
        known = self.initializers.setdefault(name, tensor)
        assert known.raw_data == tensor.raw_data, f"two constants named {name}"
        return name

    def weight(self, weight: Weight) -> str:
        """An initialiser in the external weights file."""
        if weight.name not in self.initializers:
            self.initializers[weight.name] = weight.external_tensor()
        return weight.name

    def call(
        self,
        function: Function,
        inputs: Sequence[str],
        name: str = "",
        outputs: Sequence[str] | None = None,
        **attributes: Any,
    ) -> Any:
        """Call a local function, adding its body to the model. ``outputs``: names to give, else by the node's name."""
        self.functions.setdefault(function.name, function)
        op_type = f"{FUNCTION_DOMAIN}::{function.name}"
        return self.op(op_type, inputs, name or function.name, outputs or len(function.outputs), **attributes)

    def model(self, producer: str = "nextn-trt export") -> onnx.ModelProto:
        """The model as it stands, unchecked."""
        graph = helper.make_graph(
            self.nodes,
            self.name,
            self.inputs,
            self.outputs,
            list(self.initializers.values()),
            value_info=self.value_infos,
        )
        return helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid(domain, version) for domain, version in _OPSETS.items()],
            functions=[function.proto() for function in self.functions.values()],
            ir_version=IR_VERSION,
            producer_name=producer,
        )

    def save(self, path: Path) -> None:
        """Check the model and write it; weights stay where they are. The .onnx itself stays small."""
        temporary = path.with_name(path.name + ".part")
        onnx.save_model(self.model(), temporary)
        # On the path, not on bytes: the checker then looks at the external data too, and 2 GB is no limit.
        onnx.checker.check_model(str(temporary), full_check=True)
        os.replace(temporary, path)
