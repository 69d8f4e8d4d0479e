"""What an export of a file would hold, without reading its matrices: graphs in TensorRT form, a table of tensors."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gguf.constants import GGMLQuantizationType as GGMLType
from onnx import ModelProto, helper

from export.blocks import BLOCK_FORMS
from export.config import ModelConfig
from export.gguf_file import GGUFFile, GGUFTensor
from export.lower import lower
from export.lower_layers import LayerForm, merge_layers
from export.model_graphs import draft_graph, trunk_graph
from export.raw_weights import RawWeightStore
from export.tensor_types import needs_dequantized_copy
from export.weights import Matrix
from plugins import ops

_ROLES = {
    "token_embd": "embedding",
    "embed_tokens": "embedding",
    "output": "LM head",
    "shared_head_head": "LM head",
    "attn_q": "attention inputs",
    "attn_k": "attention inputs",
    "attn_v": "attention inputs",
    "attn_output": "attention output",
    "attn_qkv": "delta net inputs",
    "attn_gate": "delta net inputs",
    "ssm_alpha": "delta net inputs",
    "ssm_beta": "delta net inputs",
    "ssm_out": "delta net output",
    "ffn_gate": "ffn gate and up",
    "ffn_up": "ffn gate and up",
    "ffn_down": "ffn down",
    "eh_proj": "input projection",
}
_VECTORS = "norms and vectors"


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of one role and type. onnx_bytes: in an export for ONNX Runtime. onnx, tensorrt: the form they take."""

    role: str
    type: str
    tensors: int
    bytes: int
    onnx_bytes: int
    onnx: str
    tensorrt: str


class _ShapesOnlyStore(RawWeightStore):
    """Looks at vectors alone; of matrices it takes names, types and places. Writes nothing."""

    def __init__(self, file: GGUFFile) -> None:
        super().__init__(Path("weights.bin"), file)

    def matrix(self, tensor: GGUFTensor) -> Matrix:
        if needs_dequantized_copy(tensor):
            tensor = as_float32(tensor)
        return super().matrix(tensor)

    def _check(self, tensor: GGUFTensor) -> None:
        """Finding numbers that are not finite takes reading all of the file: an export does."""


def as_float32(tensor: GGUFTensor) -> GGUFTensor:
    """The float32 copy that stands for a tensor, as if the file held it."""
    return replace(tensor, ggml_type=GGMLType.F32, nbytes=4 * tensor.num_rows * tensor.shape[-1])


def layer_forms(file: GGUFFile, config: ModelConfig) -> dict[str, LayerForm]:
    """By role, trunk and draft, the graph that an engine would be built from. Raises ModelFileError."""
    store = _ShapesOnlyStore(file)
    graphs = {"trunk": trunk_graph(file, config, store)}
    if config.draft is not None:
        graphs["draft"] = draft_graph(file, config, store)
    return {role: merge_layers(lower(graph, config, store), f"{role}.packs") for role, graph in graphs.items()}


def node_counts(model: ModelProto) -> tuple[dict[str, int], dict[str, int]]:
    """(plugin nodes by op, standard operators by op) of a graph in TensorRT form."""
    plugins, standard = Counter[str](), Counter[str]()
    for node in model.graph.node:
        (plugins if node.domain == ops.DOMAIN else standard)[node.op_type] += 1
    return dict(plugins), dict(standard)


def row_widths(model: ModelProto) -> dict[str, list[int]]:
    """Columns of the float32 rows that each layer node works with, by its name: between its matrices, which stay in
    its workspace."""
    widths = {}
    dims = {each.name: each.dims for each in model.graph.initializer}
    for node in model.graph.node:
        values: dict[str, Any] = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        if "ffn_size" in values:
            widths[node.name] = [values["ffn_size"], *_mixer_widths(values)]
        elif node.op_type == ops.KQUANT_MATMUL.name:
            matrices = [dims[name] for name in node.input[1 : 1 + len(values["types"])]]
            widths[node.name] = [sum(shape[0] for shape in matrices)]
    return widths


def _mixer_widths(values: dict[str, Any]) -> list[int]:
    if "kv_heads" in values:
        width = values["heads"] * values["head_dim"]
        return [2 * width + 2 * values["kv_heads"] * values["head_dim"], width]
    value_dim = values["v_heads"] * values["head_dim"]
    return [2 * values["k_heads"] * values["head_dim"] + 2 * value_dim + 2 * values["v_heads"], value_dim]


def tensor_groups(file: GGUFFile, config: ModelConfig) -> list[TensorGroup]:
    """All tensors of the file by role and type; those that the model does not use come last."""
    groups: dict[tuple[str, str], list[GGUFTensor]] = defaultdict(list)
    for role, name in _roles(config):
        tensor = file.tensors[name]
        groups[role, tensor.ggml_type.name].append(tensor)
    found = [_group(role, type_name, tensors) for (role, type_name), tensors in groups.items()]
    unused: dict[str, list[GGUFTensor]] = defaultdict(list)
    for name in sorted(file.tensors.keys() - set(config.tensor_names())):
        unused[file.tensors[name].ggml_type.name].append(file.tensors[name])
    for type_name, tensors in unused.items():
        nbytes = sum(each.nbytes for each in tensors)
        found.append(TensorGroup("not used", type_name, len(tensors), nbytes, 0, "-", "-"))
    return found


def _roles(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """(role, tensor name) of each tensor once; one that has two tasks, as a tied head, has the first one's role."""
    seen = set()
    for (leaf, layer), name in config.names.items():
        if name in seen:
            continue
        seen.add(name)
        role = _ROLES.get(leaf, _VECTORS)
        yield (f"draft: {role}" if config.draft is not None and layer == config.draft.layer else role), name


def _group(role: str, type_name: str, tensors: list[GGUFTensor]) -> TensorGroup:
    copied, vector = needs_dequantized_copy(tensors[0]), role.endswith(_VECTORS)
    if vector:
        onnx, tensorrt = "float32", "float32, in the engine"
    elif copied:
        onnx, tensorrt = "float32, dequantised", "plugin, float32 copy"
    else:
        blocks = tensors[0].ggml_type in BLOCK_FORMS
        onnx, tensorrt = "native blocks" if blocks else "as it is", "plugin, as it is"
    return TensorGroup(
        role,
        type_name,
        len(tensors),
        sum(each.nbytes for each in tensors),
        sum(as_float32(each).nbytes if vector or copied else _stored_nbytes(each) for each in tensors),
        onnx,
        tensorrt,
    )


def _stored_nbytes(tensor: GGUFTensor) -> int:
    """Of a matrix of a native type in an export for ONNX Runtime."""
    form = BLOCK_FORMS.get(tensor.ggml_type)
    if form is None:
        return tensor.nbytes
    blocks = tensor.num_rows * tensor.shape[-1] // form.block_size
    return blocks * (form.block_bytes + (8 if form.has_offset else 4))
