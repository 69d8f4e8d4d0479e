"""The plugin library keeps the contract of `plugins.ops`, as the TensorRT at hand sees it."""

from __future__ import annotations

from typing import Any

import pytest

from export.rtx16_dialect import to_rtx16
from plugins import ops
from plugins.load import load_plugins, tensorrt
from plugins.log import messages
from tests.plugins.one_op import INT8_SAMPLES, POOL, SAMPLES, Network, Shape, dtype_of, model_of

pytestmark = pytest.mark.trt


def test_registry_has_every_op_with_its_attributes() -> None:
    load_plugins()
    module = tensorrt().module
    registry = module.get_plugin_registry()
    kinds = {"int": "INT32", "ints": "INT32", "float": "FLOAT32"}
    for op in ops.OPS.values():
        creator = registry.get_creator(op.name, ops.VERSION, "")
        assert creator is not None, op.name
        fields = {field.name: str(field.type).rpartition(".")[2] for field in creator.field_names}
        assert fields == {each.name: kinds[each.kind] for each in op.attributes}
    carrier = registry.get_creator("LinearAttention", ops.VERSION, "")
    assert "update_rule" in {field.name for field in carrier.field_names}


@pytest.mark.parametrize(
    ("name", "sample"),
    [*SAMPLES.items(), *INT8_SAMPLES.items()],
    ids=[*SAMPLES, *(f"{name} int8" for name in INT8_SAMPLES)],
)
def test_outputs(name: str, sample: tuple[dict[str, Any], list[Shape], list[Shape]]) -> None:
    attributes, inputs, outputs = sample
    net = Network(model_of(name, attributes, inputs))
    assert net.imported
    kinds = {"float32": "FLOAT", "float16": "HALF", "int8": "INT8"}
    for i, shape in enumerate(outputs):
        tensor = net.network.get_output(i)
        assert tuple(tensor.shape) == shape
        assert str(tensor.dtype) == f"DataType.{kinds[dtype_of(ops.OPS[name].outputs[i], attributes)]}"
    assert net.build()


def changed(
    name: str, inputs: dict[int, Shape] | None = None, **attributes: Any
) -> tuple[str, dict[str, Any], list[Shape]]:
    before, shapes, _ = SAMPLES[name]
    return name, {**before, **attributes}, [(inputs or {}).get(i, shape) for i, shape in enumerate(shapes)]


REFUSED = {
    "unknown type": changed("KQuantMatmul", types=[12, 2]),
    "blocks of another type": changed("KQuantMatmul", types=[12, 13]),
    "rows not whole blocks": changed("KQuantMatmul", {0: ("T", 500), 3: (500,)}),
    "fewer blocks than x": changed("KQuantMatmul", {1: (96, 1, 144)}),
    "short norm": changed("KQuantMatmul", {3: (256,)}),
    "swiglu of two types": changed("KQuantMatmul", swiglu=1),
    "residual with two matrices": changed("KQuantMatmul", has_norm=0, has_residual=1),
    "table of another type": changed("KQuantEmbedding", type=12),
    "weight of another width": changed("RmsNorm", {1: (95,)}),
    "weight of another width, with rows": changed("RmsNormRows", {1: (95,)}),
    "pair of another width": changed("RmsNormPair", {3: (96,)}),
    "two positions": changed("RopeTables", {1: (2,)}),
    "head size": changed("GatedDeltaNet", head_dim=48),
    "heads not a multiple": changed("GatedDeltaNet", k_heads=3),
    "part of a slot": changed("GatedDeltaNet", {1: (POOL - 1,)}),
    "rows of another width": changed("GatedDeltaNet", {0: ("T", 391)}),
    "parameters of another size": changed("GatedDeltaNet", {3: (1065,)}),
    "odd rope": changed("GatedAttention", rope_dim=31),
    "cache type": changed("GatedAttention", cache_type=-1),
    "int8 cache without scales": changed("GatedAttention", {4: (2, 128, 2, 64)}, cache_type=1),
    "cache of other heads": changed("GatedAttention", {4: (2, 128, 4, 64)}),
    "tables of other width": changed("GatedAttention", {2: (2, "T", 8)}),
    "layer of seven types": changed("GatedDeltaNetLayer", types=[12, 12, 0, 30, 8, 12, 12]),
    "layer of an unknown type": changed("GatedDeltaNetLayer", types=[12, 12, 0, 2, 8, 12, 12, 14]),
    "gate and up of two types": changed("GatedAttentionLayer", types=[12, 1, 14, 13, 8, 12, 12]),
    "layer whose rows are not whole blocks": changed("GatedDeltaNetLayer", types=[12, 12, 0, 30, 12, 12, 12, 14]),
    "pack of another size": changed("GatedDeltaNetLayer", {1: (1, 1371, 256)}),
    "pack in one row": changed("GatedAttentionLayer", {1: (1, 1, 2201 * 256)}),
    "feed-forward of no rows": changed("GatedAttentionLayer", ffn_size=0),
    "layer's parameters of another size": changed("GatedAttentionLayer", {2: (641,)}),
    "layer with part of a slot": changed("GatedDeltaNetLayer", {4: (POOL - 1,)}),
    "layer's head size": changed("GatedDeltaNetLayer", head_dim=48),
    "layer's tables of other width": changed("GatedAttentionLayer", {4: (2, "T", 8)}),
    "layer's cache of other heads": changed("GatedAttentionLayer", {5: (2, 128, 4, 64)}),
    "nine query heads to one": changed("GatedAttention", {0: ("T", 1280), 4: (2, 128, 1, 64)}, heads=9, kv_heads=1),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_refuses(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    """No engine, and in the log what is wrong with which op in which layer. Nothing is printed past the log."""
    name, attributes, shapes = REFUSED[case]
    dtypes = ["float32", "int8", "int8", "float32"] if name == "KQuantMatmul" else None
    with messages() as log:
        net = Network(model_of(name, attributes, shapes, dtypes))
        assert not (net.imported and net.build())
    assert log.first_error.startswith(f"nextn plugin {name}: "), log.errors
    assert "node" in log.first_error.removeprefix(f"nextn plugin {name}: "), log.errors
    assert capfd.readouterr().err == ""


def test_refuses_a_float_weight() -> None:
    attributes, shapes, _ = SAMPLES["KQuantEmbedding"]
    net = Network(model_of("KQuantEmbedding", attributes, shapes, ["int32", "float32"]))
    assert not (net.imported and net.build())


def test_a_real_linear_attention_is_not_taken() -> None:
    """A foreign model's node of the carrier's name is refused by name, not misread."""
    model = to_rtx16(model_of(*changed("RopeTables")))
    (rule,) = [each for each in model.graph.node[0].attribute if each.name == "update_rule"]
    rule.s = b"gated_delta"
    with messages() as log:
        assert not Network(model).imported
    assert "'gated_delta': no op of this library" in log.first_error
