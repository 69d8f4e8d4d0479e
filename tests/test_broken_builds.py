"""The checks can fail: each fault that such a product is known for, built in on purpose, is reported by name.

Every fault here leaves a program that runs and gives fluent text.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from export import layers
from export.exporter import export_model
from export.graph import Function, Graph
from runtime.engine_onnxruntime import OnnxTrunkEngine
from tests.exported import Exported, export, generate_tokens
from tests.known_text import RING
from tests.model_checks import check_head, check_long_memory, check_rollback, check_rows_agree, check_trunk
from tests.named_inputs import GEOMETRIES, NAMED
from tests.peer.speculation import recorded
from tests.tiny_gguf import build

Export = Callable[[str], Exported]
Tiny = Callable[[str], Path]
Patch = pytest.MonkeyPatch


@pytest.fixture
def rebuilt(tiny: Tiny, tmp_path: Path) -> Callable[[str], Exported]:
    """``rebuilt(name)``: export the named model anew, with whatever has been patched."""
    return lambda name: export(tiny(name), tmp_path / name)


def test_recurrent_state_not_restored(exported: Export, monkeypatch: Patch) -> None:
    """The refused drafts' share stays in the GDN state; conv window and KV length are right."""
    commit = OnnxTrunkEngine.commit

    def without_replay(self: OnnxTrunkEngine, n_keep: int) -> None:
        replay, self._replay = self._replay, None
        commit(self, n_keep)
        self._replay = replay

    monkeypatch.setattr(OnnxTrunkEngine, "commit", without_replay)
    with pytest.raises(AssertionError, match=r"state with 1 of 5 rows kept at position 9: blk\.0\.state: .* differ"):
        check_rollback(exported("f32"), start=9, rows=5)
    trunk, draft = exported("trained").engines()
    prompts = [run.prompt for run in recorded()[:2]]
    texts = [generate_tokens(trunk, draft, prompt, 48, 3)[0] for prompt in prompts]
    assert texts != [generate_tokens(trunk, None, prompt, 48, 0)[0] for prompt in prompts]


def test_conv_window_not_restored(exported: Export, monkeypatch: Patch) -> None:
    keep = OnnxTrunkEngine._keep_convs
    monkeypatch.setattr(OnnxTrunkEngine, "_keep_convs", lambda self, count: keep(self, max(count, self._pending)))
    with pytest.raises(AssertionError, match=r"state with 1 of 5 rows kept at position 9: blk\.0\.conv: .* differ"):
        check_rollback(exported("f32"), start=9, rows=5)


def test_kv_rows_written_one_late(exported: Export, monkeypatch: Patch) -> None:
    """The kept length is one short after a rejection: the next token takes the place of the last accepted one."""
    commit = OnnxTrunkEngine.commit

    def one_short(self: OnnxTrunkEngine, n_keep: int) -> None:
        refused = self._pending - n_keep
        commit(self, n_keep)
        self._position -= refused > 0

    monkeypatch.setattr(OnnxTrunkEngine, "commit", one_short)
    with pytest.raises(AssertionError, match="key_cache: shape"):
        check_rollback(exported("f32"), start=9, rows=5)


@pytest.mark.parametrize("half", [np.float16, "bfloat16"])
def test_state_in_half_precision(exported: Export, monkeypatch: Patch, half: Any) -> None:
    """State rounded after every pass: too little to see in a short text."""

    def rounded(values: np.ndarray) -> np.ndarray:
        if half == "bfloat16":
            return (values.view(np.uint32) + 0x8000 & 0xFFFF0000).astype(np.uint32).view(np.float32)
        return values.astype(half).astype(np.float32)

    commit = OnnxTrunkEngine.commit

    def rounding(self: OnnxTrunkEngine, n_keep: int) -> None:
        commit(self, n_keep)
        for state in self._states[self._current]:
            state[:] = rounded(state)

    monkeypatch.setattr(OnnxTrunkEngine, "commit", rounding)
    with pytest.raises(AssertionError, match="trunk logits: off by"):
        check_trunk(exported("gdn_no_decay"))
    with pytest.raises(AssertionError, match="logits after 400 tokens: off by"):
        check_long_memory(exported("gdn_no_decay"))
    with pytest.raises(AssertionError, match="of 2 rows at position 0"):
        check_rows_agree(exported("f32"), start=0, n=8)


def test_v_heads_in_groups(rebuilt: Export, monkeypatch: Patch) -> None:
    """Value head h reads key head h div 2, the order of the original checkpoints, not h mod 2, that of GGUF files."""
    op = Function.op

    def grouped(self: Function, op_type: str, inputs: list[str], *args: Any, **attributes: Any) -> Any:
        if self.name == "GatedDeltaNet" and op_type == "Tile":
            # Each key head twice in a row, instead of all of them twice.
            return op(self, "Concat", [inputs[0]] * 2, *args, axis=3, **attributes)
        return op(self, op_type, inputs, *args, **attributes)

    monkeypatch.setattr(Function, "op", grouped)
    with pytest.raises(AssertionError, match="trunk logits: off by"):
        check_trunk(rebuilt("f32"))


def test_eh_proj_halves_swapped(rebuilt: Export, exported: Export, monkeypatch: Patch) -> None:
    """Invisible in the text; the head's logits show it, and so does acceptance."""
    whole = exported("draft_perfect")  # made before anything is patched: it is shared
    op = Graph.op

    def swapped(self: Graph, op_type: str, inputs: list[str], *args: Any, **attributes: Any) -> Any:
        is_pair = op_type == "Concat" and self.name == "draft"
        return op(self, op_type, inputs[::-1] if is_pair else inputs, *args, **attributes)

    monkeypatch.setattr(Graph, "op", swapped)
    with pytest.raises(AssertionError, match="head logits: off by"):
        check_head(rebuilt("f32"))
    broken = rebuilt("draft_perfect")
    check_trunk(broken)
    acceptance = []
    for model in (whole, broken):
        trunk, draft = model.engines()
        text, _, stats = generate_tokens(trunk, draft, list(RING[:5]), 60, 3)
        assert text == generate_tokens(trunk, None, list(RING[:5]), 60, 0)[0]
        acceptance.append(stats.acceptance_rate)
    assert acceptance[0] == 1.0 and acceptance[1] < 0.5


def test_rope_one_pair_off(rebuilt: Export, monkeypatch: Patch) -> None:
    """Pair i turns with the frequency of pair i + 1."""
    frequencies = layers.rope_frequencies

    def shifted(rope: Any) -> tuple[np.ndarray, float]:
        values, factor = frequencies(rope)
        return values * values[1] / values[0], factor

    monkeypatch.setattr(layers, "rope_frequencies", shifted)
    with pytest.raises(AssertionError, match="trunk logits: off by"):
        check_trunk(rebuilt("f32"))


def test_yarn_ignored(rebuilt: Export, monkeypatch: Patch) -> None:
    """The factor on cos and sin forgotten, then the scaled frequencies: trunk and head both show it."""
    frequencies = layers.rope_frequencies
    plain = 10000.0 ** (-np.arange(0, 16, 2) / 16)
    faults: list[Callable[[Any], tuple[np.ndarray, float]]] = [
        lambda rope: (frequencies(rope)[0], 1.0),
        lambda rope: (plain, frequencies(rope)[1]),
    ]
    for fault in faults:
        monkeypatch.setattr(layers, "rope_frequencies", fault)
        broken = rebuilt("yarn")
        with pytest.raises(AssertionError, match="trunk logits: off by"):
            check_trunk(broken)
        with pytest.raises(AssertionError, match="head logits: off by"):
            check_head(broken)


def test_one_added_to_norms(tiny: Tiny, tmp_path: Path) -> None:
    """The file's norm weights already hold the 1."""
    model = build(GEOMETRIES["f32"])
    model.tensors = {
        name: values + 1 if name.endswith("_norm.weight") and "ssm" not in name else values
        for name, values in model.tensors.items()
    }
    altered = tmp_path / "altered.gguf"
    model.write(altered)
    with pytest.raises(AssertionError, match="trunk logits: off by"):
        check_trunk(_passed_off(altered, tiny("f32"), tmp_path))


def test_one_scale_bit_flipped(tiny: Tiny, tmp_path: Path) -> None:
    """The lowest bit of one 6-bit scale of one Q4_K superblock, in a model of every type."""
    path = NAMED["mixed_types"](tmp_path / "altered.gguf")
    content = bytearray(path.read_bytes())
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_gate.weight")
    assert tensor.tensor_type.name == "Q4_K"
    content[int(tensor.data_offset) + 144 * 7 + 4] ^= 1
    path.write_bytes(content)
    with pytest.raises(AssertionError, match="trunk logits: off by"):
        check_trunk(_passed_off(path, tiny("mixed_types"), tmp_path))


def _passed_off(altered: Path, original: Path, folder: Path) -> Exported:
    """The export of one file, to be held against the reference of another."""
    return Exported(original, folder / "export", export_model(altered, folder / "export"))
