"""A cut draft head holds the file's own rows, in both forms of the export, and means what the model file says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from gguf import GGMLQuantizationType as T
from gguf.quants import dequantize

from engines.draft_head import DraftHeadOptions
from engines.errors import ModelFileError, UsageError
from engines.manifest import Manifest, load_manifest
from export import draft_head
from export.__main__ import main
from export.config import load_config
from export.exporter import count_weights, export_model
from export.gguf_file import GGUFFile
from tests.compare import HIDDEN_MAX_ABS, assert_close, logits_max_abs
from tests.exported import export, head_rows, shifted
from tests.lowered import Lowered
from tests.named_inputs import BLOCK_SPEC
from tests.oracle.model import Model
from tests.tiny_gguf import Spec, TinyModel, build

Tiny = Callable[[str], Path]
ROWS = 293
OPTIONS = DraftHeadOptions(rows=ROWS)
TOKENS = np.random.default_rng(4).integers(0, 256, 9)
_DRAFT = "blk.4.nextn.shared_head_head.weight"


def head_model(kind: str) -> TinyModel:
    """A model by the kind of the draft's LM head: a GGML type, "tied", or "own" for one that is not the trunk's."""
    if kind == "tied":
        return build(replace(BLOCK_SPEC, tied=True))
    model = build(BLOCK_SPEC)
    name = "output.weight"
    if kind == "own":
        name, kind = _DRAFT, "Q6_K"
        rng = np.random.default_rng(8)
        model.tensors[name] = (rng.standard_normal(model.tensors["output.weight"].shape) * 0.2).astype(np.float32)
    model.types[name] = T[kind]
    return model


def head_name(kind: str) -> str:
    return {"tied": "token_embd.weight", "own": _DRAFT}.get(kind, "output.weight")


def kept_ids(folder: Path, manifest: Manifest) -> np.ndarray:
    return np.fromfile(manifest.file(folder, "draft_ids"), np.int32)


def logits_shape(model: onnx.ModelProto) -> list[int | str]:
    (logits,) = [each for each in model.graph.output if each.name == "logits"]
    return [dim.dim_param or dim.dim_value for dim in logits.type.tensor_type.shape.dim]


KINDS = ["Q6_K", "Q4_K", "Q5_K", "Q8_0", "F32", "F16", "BF16", "Q4_0", "tied", "own"]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_rows_of_the_whole_heads(tmp_path: Path, kind: str) -> None:
    """On ONNX Runtime: those of the full export, at the kept tokens, but for kernels that sum the last columns of an
    odd number of rows in another order; masked elsewhere."""
    path = head_model(kind).write(tmp_path / "model.gguf")
    whole = export(path, tmp_path / "whole")
    cut = export(path, tmp_path / "cut", OPTIONS)
    assert (tmp_path / "whole" / "trunk.onnx").read_bytes() == (tmp_path / "cut" / "trunk.onnx").read_bytes()
    before = shifted(Model(path).trunk(TOKENS).hidden).astype(np.float32)
    want = head_rows(whole.engines()[1], TOKENS, before)
    got = head_rows(cut.engines()[1], TOKENS, before)
    ids = kept_ids(cut.folder, cut.manifest)
    assert len(ids) == ROWS and (np.diff(ids) > 0).all()
    assert_close(got[:, ids], want[:, ids], what=f"logits of a {kind} head", max_abs=logits_max_abs(want) / 10)
    assert (np.delete(got, ids, axis=1) == -np.inf).all()
    assert sorted(load_manifest(cut.folder).files) == sorted([*load_manifest(whole.folder).files, "draft_ids"])
    assert not (cut.folder / draft_head.HEAD_NAME).exists()


@pytest.mark.parametrize("kind", KINDS)
def test_tensorrt_form_reads_the_files_own_rows(tmp_path: Path, kind: str) -> None:
    model = head_model(kind)
    path, folder = model.write(tmp_path / "model.gguf"), tmp_path / "x"
    manifest = export_model(path, folder, target="tensorrt", draft_head=OPTIONS)
    ids, name = kept_ids(folder, manifest), head_name(kind)
    draft = Lowered(folder / "draft.onnx", 4, capacity=16)
    assert logits_shape(draft.model) == ["R", ROWS]
    stored = next(value for each, value in draft.constants.items() if each.endswith("draft_head.weight"))
    if kind == "Q4_0":  # has no kernel: written anew as float32
        assert stored.tobytes() == model.values(name)[ids].tobytes()
        assert "draft_head" not in manifest.files and not (folder / draft_head.HEAD_NAME).exists()
    else:
        assert stored.tobytes() == model.packed(name)[ids].tobytes()
        assert manifest.file(folder, "draft_head").read_bytes() == stored.tobytes()
    oracle = Model(path)
    before = shifted(oracle.trunk(TOKENS).hidden)
    want = oracle.head(TOKENS, before)
    got = draft.run(list(TOKENS), 0, -1, hidden=before)
    assert_close(got["logits"], want.logits[:, ids], what="logits", max_abs=logits_max_abs(want.logits))
    assert_close(got["hidden.out"], want.hidden, what="hidden", max_abs=HIDDEN_MAX_ABS)
    trunk = onnx.load(str(folder / "trunk.onnx"), load_external_data=False)
    assert logits_shape(trunk) == ["R", 320], "the verify keeps every token"


@pytest.mark.parametrize("rows", [0, ROWS])
@pytest.mark.parametrize("kind", ["Q6_K", "F16", "own"])
def test_requantised(tmp_path: Path, kind: str, rows: int) -> None:
    """Rows near the file's in Q4_K, and logits that are exactly theirs."""
    model = head_model(kind)
    path, folder = model.write(tmp_path / "model.gguf"), tmp_path / "x"
    manifest = export_model(path, folder, target="tensorrt", draft_head=DraftHeadOptions(rows, "q4_k"))
    ids = kept_ids(folder, manifest) if rows else np.arange(320)
    assert ("draft_ids" in manifest.files) == bool(rows)
    values = dequantize(np.fromfile(folder / draft_head.HEAD_NAME, np.uint8).reshape(len(ids), -1), T.Q4_K)
    want = model.values(head_name(kind))[ids].astype(np.float64)
    assert np.sqrt(np.square(values - want).mean() / np.square(want).mean()) < 0.08
    assert any("as Q4_K" in note for note in manifest.notes)

    model.tensors[_DRAFT], model.types[_DRAFT] = np.zeros((320, 256), np.float32), T.F32
    model.tensors[_DRAFT][ids] = values
    oracle = Model(model.write(tmp_path / "requantised.gguf"))
    before = shifted(oracle.trunk(TOKENS).hidden)
    logits = oracle.head(TOKENS, before).logits[:, ids]
    got = Lowered(folder / "draft.onnx", 4, capacity=16).run(list(TOKENS), 0, -1, hidden=before)["logits"]
    assert_close(got, logits, what="logits", max_abs=logits_max_abs(logits))
    cut = export(path, tmp_path / "y", DraftHeadOptions(rows, "q4_k"))
    got = head_rows(cut.engines()[1], TOKENS, before.astype(np.float32))[:, ids]
    assert_close(got, logits, what="logits on ONNX Runtime", max_abs=logits_max_abs(logits))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Q4_K", DraftHeadOptions(head_type="q4_k")),
        ("Q6_K", DraftHeadOptions(rows=320)),
        ("Q6_K", DraftHeadOptions(4000)),
    ],
)
def test_nothing_to_cut(tmp_path: Path, kind: str, options: DraftHeadOptions) -> None:
    """A head that has no more than asked for is left as it is, and that is said."""
    path = head_model(kind).write(tmp_path / "model.gguf")
    manifest = export_model(path, tmp_path / "x", target="tensorrt", draft_head=options)
    whole = export_model(path, tmp_path / "y", target="tensorrt")
    assert manifest.digests == whole.digests
    assert any("left whole" in note for note in manifest.notes) and not whole.notes


def test_options_that_the_model_cannot_serve(tiny: Tiny, tmp_path: Path) -> None:
    for name, options, says in (
        ("nextn_absent", OPTIONS, "the model has none"),
        ("f32", DraftHeadOptions(head_type="q4_k"), "rows of 64 values; Q4_K takes multiples of 256"),
        ("f32", DraftHeadOptions(rows=10), "--draft-head-rows 10: wanted 261 or more"),
        ("f32", DraftHeadOptions(rows=-3), "--draft-head-rows -3"),
    ):
        with pytest.raises(UsageError, match=says):
            export_model(tiny(name), tmp_path / "x", draft_head=options)
        with pytest.raises(UsageError, match=says):
            export_model(tiny(name), tmp_path / "x", target="tensorrt", draft_head=options)
    with pytest.raises(UsageError, match="left out"):
        export_model(tiny("f32"), tmp_path / "x", draft=False, draft_head=OPTIONS)
    assert list(tmp_path.iterdir()) == []


def test_a_head_with_an_infinite_scale_is_not_requantised_away(tmp_path: Path) -> None:
    model = head_model("own")
    raw = model.packed(_DRAFT).copy()
    raw[319, 208:210] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    model.raw[_DRAFT] = raw
    path = model.write(tmp_path / "model.gguf")
    with pytest.raises(ModelFileError, match="row 319"):
        export_model(path, tmp_path / "x", draft_head=DraftHeadOptions(head_type="q4_k"))


def test_split_files(tmp_path: Path) -> None:
    path = build(Spec()).write(tmp_path / "split.gguf", max_tensors=20)
    manifest = export_model(path, tmp_path / "x", target="tensorrt", draft_head=OPTIONS)
    assert manifest.file(tmp_path / "x", "draft_head").stat().st_size == ROWS * 64 * 4
    assert {"blocks.0", "blocks.1"} < set(manifest.files)


def test_progress_reaches_its_end(tmp_path: Path) -> None:
    path = head_model("Q6_K").write(tmp_path / "model.gguf")
    for target in ("onnxruntime", "tensorrt"):
        seen: list[int] = []
        export_model(path, tmp_path / target, target=target, draft_head=OPTIONS, progress=seen.append)
        file = GGUFFile.open(path)
        assert sum(seen) == count_weights(file, load_config(file), OPTIONS)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, text = head_model("Q6_K").write(tmp_path / "model.gguf"), tmp_path / "text"
    text.write_text("to the end of the thing")
    flags = [str(path), "-o", str(tmp_path / "x"), "--draft-head-rows", "262"]
    assert main([*flags, "--draft-head-type", "q4_k", "--draft-head-text", str(text), str(text)]) == 0
    _, err = capsys.readouterr()
    assert "note: draft head: 262 of 320 rows, Q6_K as Q4_K, 0.0 instead of 0.1 MB, 0." in err
    manifest = load_manifest(tmp_path / "x")
    options = DraftHeadOptions(262, "q4_k", (text, text))
    assert manifest.draft_head_key == options.key()
    the = GGUFFile.open(path).get("tokenizer.ggml.tokens", list[str]).index("Ġthe")
    assert the in kept_ids(tmp_path / "x", manifest)
    assert main([*flags, "--draft-head-text", str(tmp_path / "absent")]) == 2
    assert "absent: cannot be read" in capsys.readouterr().err
    assert main([*flags, "--draft-head-rows", "many"]) == 2
    assert "'many': wanted a number of tokens, or full" in capsys.readouterr().err
    assert main([*flags, "--draft-head-rows", "full"]) == 0
    assert "draft_ids" not in load_manifest(tmp_path / "x").files
