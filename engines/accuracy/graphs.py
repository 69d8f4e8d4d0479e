"""The two graphs of a role with the same places marked as outputs: after every op or layer of the TensorRT form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from engines.accuracy.plan import CANONICAL, LOWERED, Plan
from engines.errors import EngineError
from engines.manifest import Manifest
from engines.network import fix_sizes, load_graph
from engines.weight_places import weight_places
from export.int8_caches import with_int8_caches
from export.lower_layers import LayerForm, merge_layers
from plugins import ops

# A result of several products of one input, side by side, is named after all of them.
JOINED = "+"


@dataclass(frozen=True)
class EngineGraph:
    """The TensorRT form, marked, and its weights as int8 arrays by name."""

    model: onnx.ModelProto
    weights: dict[str, np.ndarray]


def engine_graph(folder: Path, role: str, plan: Plan, manifest: Manifest) -> EngineGraph:
    """Of a prepared folder."""
    lowered = folder / LOWERED
    model = load_graph(manifest.file(lowered, role))
    form = merge_layers(model, f"{role}.packs") if plan.lowering == "layers" else LayerForm(model)
    changed = with_int8_caches(form.model) if plan.kv_cache == "int8" else form.model
    changed = fix_sizes(changed, plan.sizes(manifest.geometry))
    _mark(changed, _results(changed))
    return EngineGraph(changed, _weights(form, lowered))


def write_marked_reference(folder: Path, role: str, marked: onnx.ModelProto) -> Path:
    """The canonical graph with what ``marked`` has marked; beside the weights that it names."""
    canonical = folder / CANONICAL
    model = onnx.load(str(canonical / f"{role}.onnx"), load_external_data=False)
    made = {name for node in model.graph.node for name in node.output}
    wanted = [part for value in marked.graph.output for part in value.name.split(JOINED)]
    _mark(model, [name for name in wanted if name in made])
    path = canonical / f"{role}.marked.onnx"
    onnx.save_model(model, path)
    return path


def _results(model: onnx.ModelProto) -> Iterator[str]:
    """What plugin nodes compute, in order; no state and no tables."""
    for node in model.graph.node:
        if node.domain == ops.DOMAIN and node.op_type != ops.ROPE_TABLES.name:
            yield node.output[0]


def _mark(model: onnx.ModelProto, names: Iterator[str] | list[str]) -> None:
    known = {value.name for value in model.graph.output}
    for name in names:
        if name not in known:
            model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
            known.add(name)


def _weights(form: LayerForm, folder: Path) -> dict[str, np.ndarray]:
    """Mapped from their files; packs are put together in memory."""
    arrays = {}
    for name, place in weight_places(form).items():
        pieces = []
        for piece in place.pieces:
            try:
                raw = np.memmap(folder / piece.file, np.int8, "r", piece.offset, (piece.nbytes,))
            except (OSError, ValueError) as error:
                raise EngineError(f"{folder / piece.file}: {piece.tensor} cannot be read ({error})") from error
            pieces.append((piece.at, raw))
        if len(pieces) == 1 and pieces[0][1].size == place.nbytes:
            arrays[name] = pieces[0][1].reshape(place.shape)
            continue
        whole = np.zeros(place.nbytes, np.int8)
        for at, raw in pieces:
            whole[at : at + raw.size] = raw
        arrays[name] = whole.reshape(place.shape)
    return arrays
