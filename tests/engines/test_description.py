"""What a .gguf would become: the same graphs, weights and sizes as an export and a build of it have."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from engines import layer_kernels
from engines.description import describe
from engines.errors import ModelFileError, UsageError
from engines.network import load_graph
from engines.planned_model import PlannedModel
from engines.weight_places import weight_places
from export.exporter import export_model
from export.lower_layers import merge_layers
from tests.exported import Exported
from tests.vocabulary_files import TRAINED_MODEL

Tiny = Callable[[str], Path]
KERNELS = Path(__file__).parents[2] / "plugins" / "kernels"


def odd(description: PlannedModel) -> str:
    return "\n".join(description.facts["odd"])


@pytest.mark.parametrize("name", ["q4_k_m", "split_kinds_in_pair", "other_types", "tied_no_head_norm", "heads_9b"])
def test_weights_and_layers_are_those_of_an_export(name: str, tiny: Tiny, tmp_path: Path) -> None:
    described = describe(tiny(name))
    manifest = export_model(tiny(name), tmp_path / "out", target="tensorrt")
    for role in ("trunk", "draft"):
        form = merge_layers(load_graph(manifest.file(tmp_path / "out", role)), f"{role}.packs")
        built = {name: place.nbytes for name, place in weight_places(form).items()}
        engines = described.engines["f16"]
        assert {name: engines.weights[name].nbytes for name in engines.engines[role].weights} == built
        facts = described.facts["tensorrt"][role]
        assert facts["layer_nodes"] == len(form.packs) and facts["notes"] == list(form.notes)
        assert sum(facts["plugin_nodes"].values()) + sum(facts["standard_nodes"].values()) == len(form.model.graph.node)


@pytest.mark.parametrize("name", ["trained", "q4_k_m", "other_types", "mixed_types"])
def test_sizes_of_an_export_for_onnxruntime(name: str, tiny: Tiny, exported: Callable[[str], Exported]) -> None:
    """Every byte of external data is foreseen. Counted by place, as trunk and draft share weights."""
    export = exported(name)
    places = {}
    for role in ("trunk", "draft"):
        graph = onnx.load(export.manifest.file(export.folder, role), load_external_data=False).graph
        for tensor in graph.initializer:
            if tensor.external_data:
                entries = {entry.key: int(entry.value) for entry in tensor.external_data if entry.key != "location"}
                places[entries["offset"]] = entries["length"]
    model = TRAINED_MODEL if name == "trained" else tiny(name)
    assert sum(group["onnx_bytes"] for group in describe(model).facts["tensors"]) == sum(places.values())


def test_what_a_pass_reads(tiny: Tiny) -> None:
    """All matrices but the embedding, which counts where it is the LM head too."""
    untied, tied = describe(tiny("f32")), describe(tiny("tied_no_head_norm"))
    assert untied.reads == tied.reads
    total = sum(g["bytes"] for g in untied.facts["tensors"] if g["role"] != "embedding" and "vectors" not in g["role"])
    head = next(g["bytes"] for g in untied.facts["tensors"] if g["role"] == "LM head")
    assert untied.reads["trunk"] + untied.reads["draft"] == total + head


def test_context_and_kind_of_cache(tiny: Tiny) -> None:
    short, long = describe(tiny("f32"), 1024), describe(tiny("f32"), 2048)
    assert (short.context, long.context) == (1024, 2048)
    for description in (short, long):
        for kind, width in (("f16", 64), ("int8", 48)):
            bindings = description.engines[kind].engines["trunk"].inputs
            (cache,) = [each for each in bindings if each.name.endswith(".cache")]
            assert cache.shape[1] == description.context
            assert cache.shape[3] * (2 if kind == "f16" else 1) == width
    assert describe(tiny("f32")).context == 4096
    for wrong in (-1, 4097, 3):
        with pytest.raises(UsageError, match="ctx-size"):
            describe(tiny("f32"), wrong)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("yarn", ["YaRN: positions scaled by 4 from a context of 64 tokens"]),
        ("tied_no_head_norm", ["tied LM head", "output_norm stands in"]),
        ("nextn_promised", ["NextN head stripped", "blk.4"]),
        ("nextn_absent", ["no NextN head"]),
        ("mixed_types", ["mixed types, "]),
        ("split_kinds_in_pair", ["gate and up of different types in blk.0, blk.1", "1 Q6_K, 1 Q8_0, 1 Q5_K"]),
        ("other_types", ["has no kernel", "become float32 copies"]),
        ("split_first", ["split into "]),
        ("no_template", ["no chat template"]),
    ],
)
def test_what_is_odd(name: str, says: list[str], tiny: Tiny) -> None:
    for words in says:
        assert words in odd(describe(tiny(name)))


def test_nothing_odd(tiny: Tiny) -> None:
    assert describe(tiny("f32")).facts["odd"] == []


def test_a_stripped_head_leaves_the_trunk(tiny: Tiny) -> None:
    description = describe(tiny("nextn_promised"))
    assert description.geometry.draft_layer is None and set(description.reads) == {"trunk"}


@pytest.mark.parametrize(
    ("name", "kind"), [("html_page", "format"), ("mmproj", "unsupported"), ("trunc_data_mid", "format")]
)
def test_refused_as_by_an_export(name: str, kind: str, tiny: Tiny) -> None:
    with pytest.raises(ModelFileError) as caught:
        describe(tiny(name))
    assert caught.value.kind == kind


def test_matrices_are_not_read(tiny: Tiny) -> None:
    """One with an infinite scale is for an export to find."""
    assert describe(tiny("inf_block")).reads["trunk"] > 0


def test_layer_kernels_follow_the_launcher() -> None:
    text = "\n".join(
        (KERNELS / name).read_text() for name in ("layer_decode.cu", "layer_decode.cuh", "weight_ring.cuh")
    )
    constants = dict(re.findall(r"\b(k\w+) = (\w+)[,;]", text))
    assert constants["kMAX_SUPERS"] == "kWARPS" and int(constants["kWARPS"]) == layer_kernels.MAX_SUPERS
    assert int(constants["kMAX_DOWN_CHUNKS"]) == layer_kernels.MAX_DOWN_CHUNKS
    assert int(constants["kGDN_DIM"]) == layer_kernels.NET_HEAD_DIM
    assert int(constants["kGDN_KERNEL"]) == layer_kernels.NET_CONV_KERNEL
    assert int(constants["kGDN_DIM"]) // int(constants["kGDN_COLUMNS"]) == layer_kernels.NET_PARTS
    body = re.search(r"LayerFusion layer_fusion\(.*?\n}\n", text, re.DOTALL)
    assert body is not None
    for condition in (
        "limits.capability < 90",
        "p.d < kMAX_SUPERS / 2 * kSUPER",
        "takes(p.output, mixer, kMAX_SUPERS)",
        "takes(p.gate, p.d, kMAX_SUPERS)",
        "takes(p.down, p.gate.n, kMAX_SUPERS * kMAX_DOWN_CHUNKS)",
        "takes(p.input[i], p.d, kMAX_SUPERS)",
        "g.v_heads * kGDN_PARTS <= blocks",
    ):
        assert condition in body[0]


def test_the_wide_model_runs_as_whole_layers(tiny: Tiny) -> None:
    """On which the GPU tests of engines meet the layer kernel."""
    facts = describe(tiny("wide")).facts["tensorrt"]
    assert facts["trunk"]["layer_kernels"] == {layer_kernels.WHOLE: 2, layer_kernels.AROUND_MIXER: 1}
    assert facts["draft"]["layer_kernels"] == {layer_kernels.AROUND_MIXER: 1}


def _node(**changes: object) -> onnx.ModelProto:
    """A delta net layer of the 9B geometry with attributes changed, None: left out."""
    values = {"types": [12] * 8, "ffn_size": 12288, "v_heads": 32, "head_dim": 128, "conv_kernel": 4} | changes
    node = onnx.helper.make_node("Layer", [], [], **{k: v for k, v in values.items() if v is not None})
    return onnx.helper.make_model(onnx.helper.make_graph([node], "one", [], []))


@pytest.mark.parametrize(
    ("changes", "hidden", "how"),
    [
        ({}, 4096, layer_kernels.WHOLE),
        ({"types": [12, 12, 12, 12, 12, 12, 12, 14]}, 4096, layer_kernels.WHOLE),
        ({"types": [12] * 7, "kv_heads": 4, "heads": 16, "head_dim": 256}, 4096, layer_kernels.AROUND_MIXER),
        ({"v_heads": 48, "head_dim": 64}, 4096, layer_kernels.AROUND_MIXER),
        ({"types": [8, 12, 12, 12, 12, 12, 12, 12]}, 4096, layer_kernels.AFTER_MIXER),
        ({"types": [12, 12, 12, 12, 12, 12, 12, 8]}, 4096, layer_kernels.SEPARATE),
        ({"types": [12, 12, 12, 12, 12, 12, 12, 14], "ffn_size": 12288 - 256}, 4096, layer_kernels.SEPARATE),
        ({}, 5120, layer_kernels.SEPARATE),
        ({}, 1024, layer_kernels.SEPARATE),
    ],
)
def test_layer_kernels(changes: dict[str, object], hidden: int, how: str) -> None:
    assert layer_kernels.layer_kernels(_node(**changes), hidden) == {how: 1}
