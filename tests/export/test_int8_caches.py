"""Int8 KV caches: what the graphs say of them, and what they change of the model's numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from engines.manifest import load_manifest
from export.exporter import export_model
from export.int8_caches import with_int8_caches
from export.lower_layers import merge_layers
from export.weight_inputs import weights_as_inputs
from plugins import ops
from tests.compare import kl_divergence
from tests.exported import Exported, append, greedy, prefill, trunk_rows
from tests.lowered import Lowered
from tests.peer.speculation import recorded
from tests.rounded_caches import with_rounded_caches

Tiny = Callable[[str], Path]
Export = Callable[[str], Exported]
# nats a position on the trained model; measured 1.3e-5 (docs/performance.md)
KL_MEAN_MAX = 5e-5


def load(folder: Path, role: str) -> onnx.ModelProto:
    return onnx.load(str(folder / f"{role}.onnx"), load_external_data=False)


@pytest.mark.parametrize("lowering", ["ops", "layers"])
@pytest.mark.parametrize("role", ["trunk", "draft"])
def test_caches_are_int8_and_nothing_else_changes(tiny: Tiny, tmp_path: Path, role: str, lowering: str) -> None:
    export_model(tiny("q4_k_m"), tmp_path / "x", target="tensorrt")
    before = load(tmp_path / "x", role)
    before = merge_layers(before, "packs").model if lowering == "layers" else before
    kept = before.SerializeToString()
    model = with_int8_caches(before)
    assert before.SerializeToString() == kept, "the given model is left as it is"
    onnx.checker.check_model(weights_as_inputs(model), full_check=True)
    dim = load_manifest(tmp_path / "x").geometry.head_dim
    caches = [value for value in (*model.graph.input, *model.graph.output) if ".cache" in value.name]
    assert len(caches) == 2
    for value in caches:
        kind = value.type.tensor_type
        assert kind.elem_type == TensorProto.INT8
        assert kind.shape.dim[-1].dim_value == dim + ops.CACHE_SCALE_BYTES
    attention = [node for node in model.graph.node if node.op_type.startswith("GatedAttention")]
    assert len(attention) == 1
    for node in attention:
        (cache_type,) = [each for each in node.attribute if each.name == "cache_type"]
        assert ops.CACHE_DTYPES[helper.get_attribute_value(cache_type)] == "int8"
        cache_type.i = 0
    for value in caches:
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
        value.type.tensor_type.shape.dim[-1].dim_value = dim
    assert model == before


@pytest.mark.parametrize("name", ["q4_k_m", "heads_256"])
def test_means_rows_rounded_to_int8(tiny: Tiny, exported: Export, tmp_path: Path, name: str) -> None:
    """The TensorRT form's logits, by float64 oracles, are those of a canonical graph that rounds keys and values. One
    row may round the other way in float32, which changes far less than rounding does."""
    tokens = np.random.default_rng(4).integers(0, 256, 12).tolist()
    export_model(tiny(name), tmp_path / "x", target="tensorrt")
    lowered = Lowered(tmp_path / "x" / "trunk.onnx", 4, 16, with_int8_caches(load(tmp_path / "x", "trunk")))
    parts = [lowered.run(tokens[:6], 0, -1), lowered.run(tokens[6:9], 6, 0), lowered.run(tokens[9:], 9, 2)]
    got = np.concatenate([part["logits"] for part in parts])
    assert all(cache.dtype == np.int8 for cache in lowered.state.values() if cache.ndim == 4)
    rounded = with_rounded_caches(exported(name), tmp_path / "rounded", "int8")
    exact, want = (trunk_rows(each.trunk(), tokens)[0] for each in (exported(name), rounded))
    cost = kl_divergence(exact, got).mean()
    assert cost > 0
    assert kl_divergence(want, got).mean() < cost / 10


def test_rounded_rows_are_the_same_for_any_number_of_tokens(exported: Export, tmp_path: Path) -> None:
    trunk = with_rounded_caches(exported("trained"), tmp_path / "rounded", "int8").trunk()
    text = recorded()[0].prompt[:40]
    prefill(trunk, text[:16])
    single, _ = append(trunk, text[16:], 1)
    for rows in (3, 8):
        prefill(trunk, text[:16])
        assert np.array_equal(append(trunk, text[16:], rows)[0], single)


def test_cost_on_the_trained_model(exported: Export, tmp_path: Path) -> None:
    models = exported("trained"), with_rounded_caches(exported("trained"), tmp_path / "rounded", "int8")
    texts = [run.prompt + run.greedy[:32] for run in recorded()[:4]]
    exact, rounded = (np.concatenate([trunk_rows(each.trunk(), text)[0] for text in texts]) for each in models)
    kl = kl_divergence(exact, rounded)
    print(f"KL mean {kl.mean():.2e}, largest {kl.max():.2e}")
    assert 0 < kl.mean() < KL_MEAN_MAX


def test_heads_draft_from_rounded_rows_too(exported: Export, tmp_path: Path) -> None:
    exact, rounded = exported("trained"), with_rounded_caches(exported("trained"), tmp_path / "rounded", "int8")
    text, logits = recorded()[0].prompt[:24], []
    for each in (exact, rounded):
        trunk, draft = each.engines()
        hidden = prefill(trunk, text)
        draft.start(greedy)
        draft.prefill(text[1:], hidden[:-1])
        logits.append(draft.logits.copy())
    assert 0 < kl_divergence(*logits).mean() < KL_MEAN_MAX * 10
