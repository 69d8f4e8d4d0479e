"""The exported graphs compute what the architecture's equations say: every geometry, type and kind of head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from export.config import load_config
from export.gguf_file import GGUFFile
from export.layers import rope_frequencies
from tests import compare
from tests.exported import Exported, trunk_rows
from tests.model_checks import check_chain, check_head, check_long_memory, check_trunk, oracle, oracle_rows, token_ids
from tests.named_inputs import GEOMETRIES

Export = Callable[[str], Exported]
Tiny = Callable[[str], Path]

MODELS = [
    *GEOMETRIES,
    "tied",
    "mixed_types",
    "split_kinds_in_pair",
    "other_types",
    "norms_all_one",
    "yarn_keys",
    "yarn_keys_small",
    "trained",
]


@pytest.mark.parametrize("name", MODELS)
def test_trunk(exported: Export, name: str) -> None:
    check_trunk(exported(name))


@pytest.mark.parametrize("name", MODELS)
def test_head(exported: Export, name: str) -> None:
    check_head(exported(name))


@pytest.mark.parametrize("name", ["f32", "yarn", "tied_no_head_norm", "trained"])
def test_chained_drafts(exported: Export, name: str) -> None:
    check_chain(exported(name), n=3)


def test_memory_without_decay(exported: Export) -> None:
    check_long_memory(exported("gdn_no_decay"))


def test_fast_decay_stays_finite(exported: Export) -> None:
    """Decays of exp(-1200): the state is gone after every token, and nothing becomes NaN."""
    model = exported("gdn_fast_decay")
    trunk = model.trunk()
    logits, _ = trunk_rows(trunk, token_ids(320, 400))
    assert np.isfinite(logits).all()
    assert all(np.isfinite(values).all() for values in trunk.state().values())
    want = oracle_rows(model.model, 320, 400).logits
    # A head whose output is nearly zero is normed to rms 1, its rounding with it; hence the wide bound.
    compare.assert_close(logits, want, what="logits with fast decay", max_rel=compare.LONG_MEMORY_MAX_REL)


@pytest.mark.parametrize("name", ["f32", "mixed_types", "trained"])
def test_recurrent_state_is_float32(exported: Export, name: str) -> None:
    """In the graphs, in and out, and nowhere on the way: no float of fewer bits but stored weights."""
    folder = exported(name).folder
    for role in ("trunk", "replay"):
        graph = onnx.load(folder / f"{role}.onnx", load_external_data=False).graph
        states = [value for value in (*graph.input, *graph.output) if "state" in value.name]
        assert states
        assert {value.type.tensor_type.elem_type for value in states} == {onnx.TensorProto.FLOAT}
        for node in graph.node:
            lowered = [a.i for a in node.attribute if a.name == "to" and a.i in (10, 16)]  # float16, bfloat16
            assert not lowered, f"{node.name} casts to a half-precision type"


def test_tied_head(exported: Export) -> None:
    """A file without output.weight gives the very logits of one that repeats its embedding, and stores it once."""
    tied, copied = exported("tied"), exported("tied_copied")
    ids = token_ids(320)
    compare.assert_same_bits(trunk_rows(tied.trunk(), ids)[0], trunk_rows(copied.trunk(), ids)[0], "tied logits")
    matrix = 320 * 64 * 4
    sizes = [(model.folder / "weights.bin").stat().st_size for model in (tied, copied)]
    assert sizes[1] - sizes[0] == matrix
    values = sum(int(np.prod(tensor.shape)) for tensor in GGUFFile.open(tied.model).tensors.values())
    assert sizes[0] < 4 * values + 4096 * len(GGUFFile.open(tied.model).tensors)


@pytest.mark.parametrize(
    ("name", "low", "high"), [("yarn_keys", 14, 22), ("yarn_keys_small", 0, 6), ("yarn", 0, 5), ("f32", None, None)]
)
def test_rope_frequencies(tiny: Tiny, name: str, low: int | None, high: int | None) -> None:
    """Frequencies and factor follow the YaRN formula; below ``low`` they are kept, from ``high`` on divided."""
    rope = load_config(GGUFFile.open(tiny(name))).rope
    got, factor = rope_frequencies(rope)
    want, want_factor = oracle(tiny(name)).rope
    compare.assert_close(got / want, np.ones_like(want), what="frequencies", max_abs=compare.FREQUENCY_MAX_REL)
    assert factor == pytest.approx(want_factor, rel=compare.FREQUENCY_MAX_REL)
    plain = rope.theta ** (-np.arange(0, rope.dim, 2) / rope.dim)
    if low is None or high is None:
        np.testing.assert_allclose(got, plain)
        assert factor == 1
        return
    np.testing.assert_allclose(got[: low + 1], plain[: low + 1])
    np.testing.assert_allclose(got[high:], plain[high:] / rope.yarn_factor)
    assert (got[low + 1 : high] < plain[low + 1 : high]).all()
    if name == "yarn_keys":
        assert factor == pytest.approx(1.1386294361)  # 1 + 0.1 ln 4


@pytest.mark.parametrize("name", ["heads_256", "yarn_keys"])
@pytest.mark.parametrize("role", ["trunk", "draft"])
def test_angles_at_long_positions(exported: Export, name: str, role: str) -> None:
    """A key far out is rotated as exactly as one at the start: undoing the turn gives the key at position 0."""
    model, position = exported(name), 100_000
    geometry = model.manifest.geometry
    layer = geometry.draft_layer if role == "draft" else geometry.attention_layers[0]
    keys = [_key_at(model, role, f"blk.{layer}.key_cache", at) for at in (0, position)]
    frequencies, factor = oracle(model.model).rope
    half = len(frequencies)
    # Keys are rotated pairwise: as complex numbers, times factor * exp(i * angle).
    turned = [key[:, :half] + 1j * key[:, half : 2 * half] for key in keys]
    undone = turned[1] * np.exp(-1j * position * frequencies)
    off = np.abs(undone - turned[0]).max()
    assert off < 1e-5, f"{role}: rotated part of the key at {position} off by {off:.2g} (factor {factor})"
    compare.assert_close(keys[1][:, 2 * half :], keys[0][:, 2 * half :], what="dims left alone", max_abs=1e-6)


def _key_at(model: Exported, role: str, cache: str, position: int) -> np.ndarray:
    """The key [KV, head_dim] that a first token with all-zero state gets at ``position``; attention to zero keys and
    values in between leaves the earlier layers alone."""
    session = ort.InferenceSession(model.folder / f"{role}.onnx", providers=["CPUExecutionProvider"])
    feeds = {}
    for value in session.get_inputs():
        if value.type == "tensor(int64)":
            feeds[value.name] = np.array([{"tokens": 7, "positions": position, "rows": 0}[value.name]])
        else:
            sizes = {"T": 1, "L": position + 1}
            feeds[value.name] = np.zeros([sizes.get(size, size) for size in value.shape], np.float32)
    (keys,) = session.run([f"{cache}.out"], feeds)
    return keys[0, :, position].astype(np.float64)
