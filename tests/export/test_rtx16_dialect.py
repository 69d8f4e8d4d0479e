"""The dialect carries every node whole: op, attributes and inputs come back out of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from export.exporter import export_model
from export.rtx16_dialect import to_rtx16
from plugins import ops

Tiny = Callable[[str], Path]


def unwrap(node: onnx.NodeProto) -> tuple[str, dict[str, object]]:
    """Op and attributes that a carrier node stands for, read from its text alone."""
    values = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    name, *parts = values["update_rule"].decode().split(";")
    kinds = {each.name: each.kind for each in ops.OPS[name].attributes}
    attributes: dict[str, object] = {}
    for part in parts:
        key, text = part.split("=")
        if kinds[key] == "ints":
            attributes[key] = [int(number) for number in text.split(",")]
        else:
            attributes[key] = float(np.float32(text)) if kinds[key] == "float" else int(text)
    return name, attributes


@pytest.mark.parametrize("name", ["f32", "mixed_types", "split_kinds_in_pair"])
def test_carries_every_node(tiny: Tiny, tmp_path: Path, name: str) -> None:
    export_model(tiny(name), tmp_path / "x", target="tensorrt")
    for role in ("trunk", "draft"):
        model = onnx.load(str(tmp_path / "x" / f"{role}.onnx"), load_external_data=False)
        dialect = to_rtx16(model)
        assert all(node.domain == "" for node in dialect.graph.node)
        assert {opset.domain for opset in dialect.opset_import} == {""}
        for before, after in zip(model.graph.node, dialect.graph.node, strict=True):
            if before.domain == "":
                assert before == after
                continue
            assert after.op_type == "LinearAttention"
            assert 4 <= len(after.input) <= 6 and len(after.output) == 2
            assert list(after.input)[: len(before.input)] == list(before.input)
            assert len(set(after.input)) == len(after.input)
            assert list(after.output)[: len(before.output)] == list(before.output)
            wanted = {each.name: onnx.helper.get_attribute_value(each) for each in before.attribute}
            assert unwrap(after) == (before.op_type, wanted)
        outputs = [name for node in dialect.graph.node for name in node.output]
        assert len(outputs) == len(set(outputs))
        kept = len(model.graph.initializer)
        assert dialect.graph.initializer[:kept] == model.graph.initializer
        absent = {each.name for each in dialect.graph.initializer[kept:]}
        new = [each for node in dialect.graph.node for each in node.input if each in absent]
        assert sorted(new) == sorted(absent)  # each read once: TensorRT would copy it otherwise
