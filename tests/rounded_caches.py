"""Canonical graphs whose KV caches round their rows, on ONNX Runtime: what int8 or f16 caches cost, without a GPU."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from engines.manifest import file_digest
from tests.exported import Exported
from tests.oracle.int8_rows import GROUP


def with_rounded_caches(exported: Exported, folder: Path, kind: str) -> Exported:
    """A copy of an export in ``folder`` whose keys and values are rounded to ``kind`` ("int8" or "f16") as they are put
    into the caches. Weights are hard links."""
    shutil.copytree(exported.folder, folder, copy_function=os.link)
    manifest, dim = exported.manifest, exported.manifest.geometry.head_dim
    files, digests = dict(manifest.files), dict(manifest.digests)
    for role in ("trunk", "draft"):
        path = folder / files[role][0]
        model = onnx.load(str(path), load_external_data=False)
        _round_rows(model, dim, kind)
        path.unlink()
        onnx.save_model(model, path)
        files[role], digests[role] = (path.name, path.stat().st_size), file_digest(path)
    manifest = replace(manifest, files=files, digests=digests)
    (folder / "manifest.json").unlink()
    manifest.save(folder)
    return replace(exported, folder=folder, manifest=manifest)


def _round_rows(model: onnx.ModelProto, dim: int, kind: str) -> None:
    (attention,) = [function for function in model.functions if function.name == "GatedAttention"]
    nodes: list[NodeProto] = []
    for node in attention.node:
        if node.op_type == "TensorScatter":
            nodes += _to_int8(node.input[1], dim) if kind == "int8" else _to_f16(node.input[1])
            node.input[1] += "/rounded"
        nodes.append(node)
    del attention.node[:]
    attention.node.extend(nodes)


def _to_f16(rows: str) -> list[NodeProto]:
    return [
        helper.make_node("Cast", [rows], [f"{rows}/f16"], to=TensorProto.FLOAT16),
        helper.make_node("Cast", [f"{rows}/f16"], [f"{rows}/rounded"], to=TensorProto.FLOAT),
    ]


def _to_int8(rows: str, dim: int) -> list[NodeProto]:
    """rows -> rows/rounded: steps of a 127th of the largest magnitude of each group."""
    nodes: list[NodeProto] = []

    def name(leaf: str) -> str:
        return f"{rows}/{leaf}"

    def constant(leaf: str, value: np.ndarray) -> str:
        nodes.append(helper.make_node("Constant", [], [name(leaf)], value=numpy_helper.from_array(value)))
        return name(leaf)

    def op(kind: str, inputs: list[str], leaf: str, keepdims: int | None = None) -> str:
        nodes.append(helper.make_node(kind, inputs, [name(leaf)], keepdims=keepdims))
        return name(leaf)

    groups = op("Reshape", [rows, constant("group", np.array([-1, min(GROUP, dim)]))], "groups")
    top = op("ReduceMax", [op("Abs", [groups], "size"), constant("last", np.array([-1]))], "top", keepdims=1)
    scale = op("Div", [top, constant("127", np.array(127, np.float32))], "scale")
    # Of an all-zero group the scale is 0; any other gives 0 steps.
    divisor = op("Max", [scale, constant("least", np.array(1e-38, np.float32))], "divisor")
    steps = op("Round", [op("Div", [groups, divisor], "quotient")], "steps")
    shape = op("Shape", [rows], "shape")
    op("Reshape", [op("Mul", [steps, scale], "values"), shape], "rounded")
    return nodes
