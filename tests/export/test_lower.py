"""The TensorRT form says the same as the model file: values by oracles, weights byte by byte, nodes by contract."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import onnx
import pytest
from onnx import TensorProto

from engines.errors import ModelFileError, ResourceError
from engines.manifest import load_manifest
from engines.weight_places import packed
from export import raw_weights
from export.exporter import export_model
from export.lower_layers import merge_layers
from export.weight_inputs import external_weights, weights_as_inputs
from plugins import ops
from tests.compare import HIDDEN_MAX_ABS, STATE_MAX_ABS, assert_close, logits_max_abs
from tests.lowered import Lowered
from tests.oracle.model import Model
from tests.tiny_gguf import Spec, build

Tiny = Callable[[str], Path]
MODELS = [
    "f32",
    "heads_256",
    "yarn",
    "tied_no_head_norm",
    "q4_k_m",
    "mixed_types",
    "split_kinds_in_pair",
    "other_types",
]
MAX_ROWS = 4
_NATIVE_OPS = ("Gather", "Concat", "Split", "Sigmoid", "Mul", "Add")


def exported(model: Path, folder: Path) -> Path:
    export_model(model, folder, target="tensorrt")
    return folder


def load(folder: Path, role: str = "trunk") -> onnx.ModelProto:
    return onnx.load(str(folder / f"{role}.onnx"), load_external_data=False)


def attributes(node: onnx.NodeProto) -> dict[str, object]:
    return {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}


def evaluator(folder: Path, role: str, lowering: str, capacity: int) -> Lowered:
    """A graph of an exported folder, as it is or with a node a layer, whose packs are then written beside it."""
    path = folder / f"{role}.onnx"
    if lowering == "ops":
        return Lowered(path, MAX_ROWS, capacity)
    form = merge_layers(load(folder, role), f"{role}.packs")
    with packed(form, folder):
        return Lowered(path, MAX_ROWS, capacity, form.model)


@pytest.mark.parametrize("lowering", ["ops", "layers"])
@pytest.mark.parametrize("name", MODELS)
def test_means_what_the_model_file_says(tiny: Tiny, tmp_path: Path, name: str, lowering: str) -> None:
    """Prefill of more tokens than slots, then a verify pass that starts from slot 0, then one from a later slot."""
    tokens = np.random.default_rng(3).integers(0, 256, 14)
    folder = exported(tiny(name), tmp_path / "x")
    lowered = evaluator(folder, "trunk", lowering, capacity=32)
    logits, hidden = [], []
    for first, count, slot in ((0, 6, -1), (6, 4, 0), (8, 2, 1), (10, 1, 1), (11, 3, 0)):
        out = lowered.run(list(tokens[first : first + count]), first, slot)
        keep = 2 if (first, count) == (6, 4) else count  # the third pass takes up after the second row of this one
        logits.append(out["logits"][:keep])
        hidden.append(out["hidden.out"][:keep])
    want = Model(tiny(name)).trunk(tokens)
    assert_close(np.concatenate(logits), want.logits, what="logits", max_abs=logits_max_abs(want.logits))
    assert_close(np.concatenate(hidden), want.hidden, what="hidden", max_abs=HIDDEN_MAX_ABS)
    for layer in load_manifest(folder).geometry.gdn_layers:
        window, state = lowered.slot_state(layer, 2)
        assert_close(state, want.state[f"blk.{layer}.state"], what=f"state {layer}", max_abs=STATE_MAX_ABS)
        assert_close(window, want.state[f"blk.{layer}.conv"], what=f"window {layer}", max_abs=STATE_MAX_ABS)


@pytest.mark.parametrize("lowering", ["ops", "layers"])
@pytest.mark.parametrize("name", ["f32", "q4_k_m", "mixed_types"])
def test_draft_head_means_what_the_model_file_says(tiny: Tiny, tmp_path: Path, name: str, lowering: str) -> None:
    tokens = np.random.default_rng(4).integers(0, 256, 9)
    model = Model(tiny(name))
    hidden = model.trunk(tokens).hidden
    before = np.concatenate([np.zeros_like(hidden[:1]), hidden[:-1]])
    lowered = evaluator(exported(tiny(name), tmp_path / "x"), "draft", lowering, capacity=16)
    parts = [lowered.run(list(tokens[a:b]), a, -1, hidden=before[a:b]) for a, b in ((0, 5), (5, 6), (6, 9))]
    want = model.head(tokens, before)
    got = {key: np.concatenate([part[key] for part in parts]) for key in ("logits", "hidden.out")}
    assert_close(got["logits"], want.logits, what="logits", max_abs=logits_max_abs(want.logits))
    assert_close(got["hidden.out"], want.hidden, what="hidden", max_abs=HIDDEN_MAX_ABS)


@pytest.mark.parametrize("name", ["f32", "q4_k_m", "mixed_types", "tied", "split_first"])
def test_weights_are_the_files_own_bytes(tiny: Tiny, tmp_path: Path, name: str) -> None:
    folder = exported(tiny(name), tmp_path / "x")
    stored: dict[str, bytes] = {}
    for shard in sorted(tiny(name).parent.glob(f"{tiny(name).name[:11]}*") if name == "split_first" else [tiny(name)]):
        for tensor in gguf.GGUFReader(shard).tensors:
            stored[tensor.name] = tensor.data.tobytes()
    seen = set()
    for role in ("trunk", "draft"):
        lowered = Lowered(folder / f"{role}.onnx", MAX_ROWS, capacity=1)
        for weight in external_weights(lowered.model):
            assert weight.data_type == TensorProto.INT8 and len(weight.dims) == 3
            assert lowered.constants[weight.name].tobytes() == stored[weight.name]
            seen.add(weight.name)
    matrices = {n for n in stored if n.endswith(".weight") and not n.endswith("norm.weight") and "conv1d" not in n}
    assert seen == matrices


@pytest.mark.parametrize("name", ["f32", "mixed_types", "split_kinds_in_pair"])
def test_every_plugin_node_keeps_its_contract(tiny: Tiny, tmp_path: Path, name: str) -> None:
    folder = exported(tiny(name), tmp_path / "x")
    canonical = tmp_path / "canonical"
    export_model(tiny(name), canonical)
    for role in ("trunk", "draft"):
        model = load(folder, role)
        nodes_of = {node.name for node in load(canonical, role).graph.node}
        taken: list[str] = []
        for node in model.graph.node:
            if node.domain == "":
                assert node.op_type in _NATIVE_OPS
                continue
            op, values = ops.OPS[node.op_type], attributes(node)
            assert node.domain == ops.DOMAIN
            assert set(values) == {each.name for each in op.attributes}
            assert len(node.input) <= ops.MAX_INPUTS and len(node.output) == len(op.outputs) <= ops.MAX_OUTPUTS
            (stands_for,) = [each.value for each in node.metadata_props if each.key == "stands_for"]
            taken += stands_for.split(" ")
        assert set(taken) <= nodes_of
        assert len(taken) == len(set(taken)), "two plugin nodes stand for one canonical node"
        functions = {n.name for n in load(canonical, role).graph.node if n.domain == "nextn"}
        glue = {n for n in functions if n.rpartition("/")[2].startswith(("split", "mask", "swiglu"))}
        assert functions - glue <= set(taken)


def test_a_layer_is_five_plugin_nodes(tiny: Tiny, tmp_path: Path) -> None:
    """Norms, residuals, SwiGLU and the choice of rows are fused; nothing is left beside plugins."""
    model = load(exported(tiny("q4_k_m"), tmp_path / "x"))
    kinds = [node.op_type for node in model.graph.node]
    layers, attention = 4, 1
    assert kinds.count("KQuantMatmul") == 4 * layers + 1
    assert kinds.count("RmsNormRows") == 1, "the last one, whose result is an output"
    assert kinds.count("GatedDeltaNet") == layers - attention and kinds.count("GatedAttention") == attention
    assert all(node.domain for node in model.graph.node)
    draft = load(exported(tiny("q4_k_m"), tmp_path / "y"), "draft")
    assert all(node.domain for node in draft.graph.node)


def test_state_enters_one_plugin_and_leaves_by_it(tiny: Tiny, tmp_path: Path) -> None:
    model = load(exported(tiny("f32"), tmp_path / "x"))
    for name in [each.name for each in model.graph.input if each.name.endswith((".pool", ".cache"))]:
        (reader,) = [node for node in model.graph.node if name in node.input]
        (output,) = [i for i in range(len(reader.output)) if reader.output[i] == name + ".out"]
        alias = ops.OPS[reader.op_type].alias_of(output)
        assert reader.input[alias] == name
        assert name + ".out" in {each.name for each in model.graph.output}
    types = {each.name: each.type.tensor_type.elem_type for each in model.graph.input}
    assert types["blk.0.pool"] == TensorProto.FLOAT, "recurrent state is float32"


def test_what_a_pass_is_told_is_read_once(tiny: Tiny, tmp_path: Path) -> None:
    """TensorRT copies an input that two plugins outside the layers read, with a kernel of its own in every pass."""
    export_model(tiny("q4_k_m"), tmp_path / "x", target="tensorrt")
    for role in ("trunk", "draft"):
        graph = onnx.load(str(tmp_path / "x" / f"{role}.onnx"), load_external_data=False).graph
        read = [name for node in graph.node for name in node.input]
        assert all(read.count(name) == 1 for name in ("tokens", "rows", "hidden") if name in read)
        assert "tokens" in read and "rows" in read


def test_weights_as_inputs(tiny: Tiny, tmp_path: Path) -> None:
    model = load(exported(tiny("q4_k_m"), tmp_path / "x"))
    changed = weights_as_inputs(model)
    names = [each.name for each in external_weights(model)]
    assert names and [each.name for each in changed.graph.input][-len(names) :] == names
    assert not external_weights(changed)
    onnx.checker.check_model(changed, full_check=True)


def test_folder_holds_the_model_as_a_link_or_a_copy(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(Spec()).write(tmp_path / "m.gguf")
    folder = exported(model, tmp_path / "x")
    assert os.path.samefile(model, folder / "model.gguf")
    manifest = load_manifest(folder)
    assert manifest.target == "tensorrt"
    assert set(manifest.files) == {"trunk", "draft", "blocks.0", "tokenizer", "chat_template"}

    def no_link(*_: object, **__: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", no_link)
    copied = exported(model, tmp_path / "y")
    assert not os.path.samefile(model, copied / "model.gguf")
    assert (copied / "model.gguf").read_bytes() == model.read_bytes()
    onnx.checker.check_model(str(copied / "trunk.onnx"), full_check=True)

    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(raw_weights.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ResourceError, match=r"a copy needs .* MB, 0\.0 MB are free"):
        exported(model, tmp_path / "z")
    assert not (tmp_path / "z").exists()


def test_a_link_to_the_model_is_followed(tmp_path: Path) -> None:
    model = build(Spec()).write(tmp_path / "m.gguf")
    (tmp_path / "link.gguf").symlink_to(model)
    folder = exported(tmp_path / "link.gguf", tmp_path / "x")
    assert not (folder / "model.gguf").is_symlink() and os.path.samefile(model, folder / "model.gguf")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (Spec(head_dim=48, rope_dim=16), "attention heads of 48"),
        (Spec(state=16), "Gated DeltaNet heads of 16"),
        (Spec(heads=16, kv_heads=1), "16 query heads to a KV head"),
        (Spec(k_heads=1, v_heads=3), "3 value heads"),
        (Spec(conv_kernel=9), "a convolution over 9 tokens"),
        (Spec(embd=66), "rows of 66 values"),
    ],
)
def test_geometry_without_kernels(tmp_path: Path, spec: Spec, says: str) -> None:
    model = build(spec).write(tmp_path / "m.gguf")
    with pytest.raises(ModelFileError, match=says) as caught:
        exported(model, tmp_path / "x")
    assert caught.value.kind == "unsupported" and "--target onnxruntime" in str(caught.value)
    assert not (tmp_path / "x").exists()
