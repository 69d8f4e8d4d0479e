"""A node a layer: what it stands for, what its pack holds, and which layers keep their nodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from engines.errors import EngineError, ResourceError
from engines.weight_places import packed, weight_places
from export.exporter import export_model
from export.lower_layers import LayerForm, merge_layers
from export.weight_inputs import external_weights, weights_as_inputs
from plugins import ops

Tiny = Callable[[str], Path]
LAYER_OPS = ("GatedDeltaNetLayer", "GatedAttentionLayer")


def load(folder: Path, role: str = "trunk") -> onnx.ModelProto:
    return onnx.load(str(folder / f"{role}.onnx"), load_external_data=False)


@pytest.fixture
def folder(tiny: Tiny, tmp_path: Path) -> Path:
    export_model(tiny("q4_k_m"), tmp_path / "x", target="tensorrt")
    return tmp_path / "x"


def stands_for(model: onnx.ModelProto) -> list[str]:
    return [name for node in model.graph.node for each in node.metadata_props for name in each.value.split(" ")]


@pytest.mark.parametrize("name", ["f32", "mixed_types", "split_kinds_in_pair", "other_types", "heads_256"])
def test_layer_nodes_keep_their_contract(tiny: Tiny, tmp_path: Path, name: str) -> None:
    export_model(tiny(name), tmp_path / "x", target="tensorrt")
    for role in ("trunk", "draft"):
        before = load(tmp_path / "x", role)
        form = merge_layers(before, "packs")
        assert sorted(stands_for(form.model)) == sorted(stands_for(before)), "same canonical nodes, each once"
        assert load(tmp_path / "x", role) == before, "the given model is left as it is"
        for node in form.model.graph.node:
            if node.domain == ops.DOMAIN:
                op = ops.OPS[node.op_type]
                assert {each.name for each in node.attribute} == {each.name for each in op.attributes}
                assert len(node.input) <= ops.MAX_INPUTS and len(node.output) == len(op.outputs)
        onnx.checker.check_model(weights_as_inputs(form.model), full_check=True)
        names = {each.name for each in form.model.graph.initializer}
        assert names <= {name for node in form.model.graph.node for name in node.input}, "unused constants"


def test_a_layer_is_one_node(folder: Path) -> None:
    trunk, draft = (merge_layers(load(folder, role), "packs") for role in ("trunk", "draft"))
    assert [node.op_type for node in trunk.model.graph.node if node.op_type in LAYER_OPS] == [
        *["GatedDeltaNetLayer"] * 3,
        "GatedAttentionLayer",
    ]
    left = sorted(node.op_type for node in trunk.model.graph.node if node.op_type not in LAYER_OPS)
    assert left == ["KQuantEmbedding", "KQuantMatmul", "RmsNormRows", "RopeTables"]
    assert [node.name for node in draft.model.graph.node if node.op_type in LAYER_OPS] == ["blk.4/layer"]
    assert trunk.notes == draft.notes == ()
    assert set(trunk.packs) == {f"blk.{layer}.weights" for layer in range(4)} and set(draft.packs) == {"blk.4.weights"}


def test_inputs_and_outputs_stay(folder: Path) -> None:
    for role in ("trunk", "draft"):
        before, after = load(folder, role).graph, merge_layers(load(folder, role), "packs").model.graph
        assert list(after.input) == list(before.input) and list(after.output) == list(before.output)


@pytest.mark.parametrize("name", ["q4_k_m", "mixed_types", "split_first", "other_types"])
def test_a_pack_holds_the_files_own_bytes(tiny: Tiny, tmp_path: Path, name: str) -> None:
    """As pieces of the exported files, and as the file that is there while an engine is built with weights inside."""
    export_model(tiny(name), tmp_path / "x", target="tensorrt")
    folder = tmp_path / "x"
    stored = {
        tensor.name: (tensor.tensor_type, tensor.data.tobytes())
        for shard in folder.glob("model*.gguf")
        for tensor in gguf.GGUFReader(shard).tensors
    }
    form = merge_layers(load(folder), "trunk.packs")
    places = weight_places(form)
    with packed(form, folder):
        file = np.fromfile(folder / "trunk.packs", np.uint8)
    assert not (folder / "trunk.packs").exists()
    for tensor in external_weights(form.model):
        place = places[tensor.name]
        assert place.shape == tuple(tensor.dims) and place.nbytes == np.prod(tensor.dims)
        if tensor.name not in form.packs:
            assert [(piece.tensor, piece.at) for piece in place.pieces] == [(tensor.name, 0)]
            continue
        entries = {each.key: each.value for each in tensor.external_data}
        pack = file[int(entries["offset"]) :][: int(entries["length"])].tobytes()
        assert tensor.dims[0] == 1 and tensor.dims[2] == ops.PACK_BLOCK
        for piece in place.pieces:
            source = (folder / piece.file).read_bytes()[piece.offset : piece.offset + piece.nbytes]
            assert piece.at % ops.PACK_BLOCK == 0 and pack[piece.at : piece.at + piece.nbytes] == source
            kind, raw = stored[piece.tensor]
            if kind in ops.BLOCKS:
                assert source == raw
        assert len(place.pieces) == len(form.packs[tensor.name]) in (7, 8)


def test_matrices_come_in_the_contracts_order(folder: Path) -> None:
    form = merge_layers(load(folder), "packs")
    names = {
        "blk.0.weights": ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta", "ssm_out"),
        "blk.3.weights": ("attn_q", "attn_k", "attn_v", "attn_output"),
    }
    for pack, leaves in names.items():
        prefix = pack.removesuffix("weights")
        wanted = [f"{prefix}{leaf}.weight" for leaf in (*leaves, "ffn_gate", "ffn_up", "ffn_down")]
        assert [each.name for each in form.packs[pack]] == wanted


def test_parameters_come_in_the_contracts_order(folder: Path, tiny: Tiny) -> None:
    stored = {each.name: each.data for each in gguf.GGUFReader(tiny("q4_k_m")).tensors}
    form = merge_layers(load(folder), "packs")
    constants = {each.name: each for each in form.model.graph.initializer}
    leaves = {
        0: ("ssm_conv1d.weight", "ssm_a", "ssm_dt.bias", "ssm_norm.weight"),
        3: ("attn_q_norm.weight", "attn_k_norm.weight"),
    }
    for layer, own in leaves.items():
        names = [f"blk.{layer}.{leaf}" for leaf in ("attn_norm.weight", "post_attention_norm.weight", *own)]
        want = np.concatenate([stored[name].ravel() for name in names])
        np.testing.assert_array_equal(numpy_helper.to_array(constants[f"blk.{layer}.parameters"]), want)


def test_a_layer_with_gate_and_up_of_two_types_keeps_its_nodes(tiny: Tiny, tmp_path: Path) -> None:
    export_model(tiny("split_kinds_in_pair"), tmp_path / "x", target="tensorrt")
    before = load(tmp_path / "x")
    form = merge_layers(before, "packs")
    kept = {node.name.split("/")[0] for node in form.model.graph.node if node.op_type.startswith("Gated")} - {
        node.name.split("/")[0] for node in form.model.graph.node if node.op_type in LAYER_OPS
    }
    assert kept
    assert form.notes == tuple(
        f"{prefix} is built of single ops: its gate and up matrices are of two types, which the layer op does not take"
        for prefix in sorted(kept)
    )
    for prefix in kept:
        assert f"{prefix}.weights" not in form.packs
        names = [node.name for node in before.graph.node if node.name.startswith(prefix)]
        assert [node.name for node in form.model.graph.node if node.name.startswith(prefix)] == names


def edited(folder: Path, change: Callable[[onnx.GraphProto, dict[str, onnx.NodeProto]], None]) -> LayerForm:
    """The trunk with block 0 changed, merged."""
    model = load(folder)
    change(model.graph, {node.name.removeprefix("blk.0/"): node for node in model.graph.node})
    return merge_layers(model, "packs")


def expose(graph: onnx.GraphProto, name: str) -> None:
    graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["T", 256]))


NO_LAYERS = {
    "rows are an output": (lambda graph, at: expose(graph, at["gdn.1"].input[0]), "input rows"),
    "result is an output": (lambda graph, at: expose(graph, at["gdn.1"].output[0]), "mixer's result"),
    "residual of another value": (lambda graph, at: at["mixer_residual"].input.__setitem__(2, "x"), "mixer's result"),
    "middle is an output": (lambda graph, at: expose(graph, at["mixer_residual"].output[0]), "feed-forward"),
    "down adds another value": (lambda graph, at: at["ffn_residual"].input.__setitem__(2, "x"), "feed-forward"),
    "SwiGLU is an output": (lambda graph, at: expose(graph, at["ffn_residual"].input[0]), "feed-forward"),
    "middle is read elsewhere": (
        lambda graph, at: graph.node.append(
            helper.make_node("Add", [at["mixer_residual"].output[0]] * 2, ["more"], "more")
        ),
        "feed-forward",
    ),
}


@pytest.mark.parametrize("case", NO_LAYERS)
def test_what_is_no_layer_keeps_its_nodes(folder: Path, case: str) -> None:
    change, says = NO_LAYERS[case]
    form = edited(folder, change)
    (note,) = form.notes
    assert note.startswith("blk.0 is built of single ops") and says in note
    assert [node.name for node in form.model.graph.node if node.op_type in LAYER_OPS] == [
        f"blk.{layer}/layer" for layer in (1, 2, 3)
    ]


def test_no_room_for_packs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr("engines.weight_places.shutil.disk_usage", lambda path: usage)
    form = merge_layers(load(folder), "trunk.packs")
    with pytest.raises(ResourceError, match=r"trunk\.packs: .* MB for a while, 0\.0 MB are free"), packed(form, folder):
        pass
    assert not (folder / "trunk.packs").exists()


def test_an_exported_file_that_is_cut_off(folder: Path) -> None:
    form = merge_layers(load(folder), "trunk.packs")
    data = (folder / "model.gguf").read_bytes()
    (folder / "model.gguf").unlink()  # a link to a file that others read
    (folder / "model.gguf").write_bytes(data[: len(data) // 2])
    with pytest.raises(EngineError, match=r"model\.gguf: ends before blk\..* does; export again"), packed(form, folder):
        pass
    assert not (folder / "trunk.packs").exists()
