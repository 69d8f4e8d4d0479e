"""A build against its model's equations: sound ones of every kind pass, and what is off first is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engines.draft_head import DraftHeadOptions
from engines.errors import EngineError
from engines.evidence import LOGITS, Evidence, first_off, rounded_state
from engines.witness import BEHIND, give_evidence
from export.exporter import WHOLE_HEAD, export_model
from runtime import check, eval, inspect
from runtime.diagnosis import Diagnosis, diagnose
from runtime.engine_onnxruntime import OnnxTrunkEngine
from runtime.session import open_session
from tests.named_inputs import GEOMETRIES
from tests.runtime.command import run_main
from tests.tiny_gguf import Spec, build
from tests.vocabulary_files import TRAINED_MODEL

Tiny = Callable[[str], Path]


def diagnosis(
    build: Path, folder: Path, against: Path, context: int = 64, head: DraftHeadOptions = WHOLE_HEAD
) -> Diagnosis:
    export_model(build, folder, draft=build.stem != "nextn_promised", draft_head=head)
    return diagnose(open_session(folder, context_size=context, threads=1), against)


@pytest.mark.parametrize(
    "name", ["heads_256", "heads_odd", "yarn", "mixed_types", "tied_no_head_norm", "nextn_absent", "nextn_promised"]
)
def test_sound_builds(tiny: Tiny, tmp_path: Path, name: str) -> None:
    found = diagnosis(tiny(name), tmp_path / "x", tiny(name))
    assert found.faults == () and found.worst < 1e-10
    assert found.places[-1].name == ("logits" if name.startswith("nextn") else "head logits")


def test_a_short_context_and_a_cut_head(tiny: Tiny, tmp_path: Path) -> None:
    for context in (1, 2, 3):
        assert diagnosis(tiny("f32"), tmp_path / "x", tiny("f32"), context=context).faults == ()
    found = diagnosis(tiny("q4_k_m"), tmp_path / "y", tiny("q4_k_m"), head=DraftHeadOptions(300, "q4_k"))
    assert found.faults == () and found.places[-1].name == "logits"  # another head by intent


def value_heads_by_key_head(spec: Spec, target: Path) -> Path:
    """The model as a converter writes it that leaves the value heads in the order of the original checkpoints."""
    model = build(spec)
    order = np.arange(spec.v_heads).reshape(-1, spec.k_heads).T.reshape(-1)
    values = (order[:, None] * spec.state + np.arange(spec.state)).reshape(-1)
    channels = np.concatenate([np.arange(2 * spec.k_heads * spec.state), 2 * spec.k_heads * spec.state + values])
    picks = {"attn_qkv.weight": channels, "ssm_conv1d.weight": channels, "attn_gate.weight": values}
    picks |= dict.fromkeys(("ssm_alpha.weight", "ssm_beta.weight", "ssm_a", "ssm_dt.bias"), order)
    for name, tensor in model.tensors.items():
        leaf = name.split(".", 2)[-1]
        if leaf in picks:
            model.tensors[name] = tensor[picks[leaf]]
        elif leaf == "ssm_out.weight":
            model.tensors[name] = tensor[:, values]
    model.write(target)
    return target


def test_a_file_with_its_heads_in_another_order(tiny: Tiny, tmp_path: Path) -> None:
    altered = value_heads_by_key_head(GEOMETRIES["heads_256"], tmp_path / "altered.gguf")
    (fault,) = diagnosis(altered, tmp_path / "x", tiny("heads_256")).faults
    assert fault.startswith("blk.0.conv is not what the model's equations give")
    assert "suspect the order of value heads: rows of the file are in another order (by key head)" in fault


@pytest.mark.parametrize(
    ("tensor", "place", "suspect"),
    [
        (
            "blk.0.attn_norm.weight",
            "blk.0.conv",
            "what the delta net is given: its input products or norm, or the embedding",
        ),
        ("blk.0.ssm_a", "blk.0.state", "the delta rule (which key head a value head reads, decay, rate) or the conv"),
        ("blk.0.ssm_norm.weight", "blk.1.conv", "or what comes after blk.0.state"),
        ("blk.2.ffn_down.weight", "blk.3.value_cache", "or what comes after blk.2.state"),
        ("blk.3.attn_k_norm.weight", "blk.3.key_cache", "rope (position, frequencies, pairs) or the key norm"),
        ("blk.3.attn_output.weight", "logits", "the last norm or the LM head, or what comes after blk.3.key_cache"),
        ("blk.4.nextn.enorm.weight", "head logits", "the draft head: eh_proj (the order of its halves), its norms"),
    ],
)
def test_the_first_place_that_is_off(tiny: Tiny, tmp_path: Path, tensor: str, place: str, suspect: str) -> None:
    """A tensor that is another in the build."""
    model = build(GEOMETRIES["f32"])
    model.tensors[tensor] = model.tensors[tensor] * np.linspace(0.5, 1.5, model.tensors[tensor].shape[-1], dtype="f4")
    model.write(tmp_path / "altered.gguf")
    (fault,) = diagnosis(tmp_path / "altered.gguf", tmp_path / "x", tiny("f32")).faults
    assert fault.startswith(f"{place} is not what the model's equations give") and suspect in fault
    assert fault.endswith("; or f32.gguf: the build was made from another file")


def test_a_fault_of_passes_over_prompts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds go on from it with and without drafts, and the tokens one by one are right."""
    keep = OnnxTrunkEngine._keep_convs
    monkeypatch.setattr(OnnxTrunkEngine, "_keep_convs", lambda self, count: keep(self, count - (count > 4)))
    (fault,) = diagnosis(TRAINED_MODEL, tmp_path / "x", TRAINED_MODEL).faults
    assert fault.startswith("of a prompt in 2 passes, blk.0.conv is not what the model's equations give")
    assert fault.endswith(f"suspect {BEHIND} (which explains it)")


@pytest.mark.parametrize(("kind", "cleared"), [("float16", 13), ("bfloat16", 16)])
def test_half_precision_where_rounding_is_as_coarse(tiny: Tiny, kind: str, cleared: int) -> None:
    """As on TensorRT, whose activations are rounded to 16 bits: no error tells then, the values do."""
    evidence = give_evidence(tiny("f32"), [5, 9, 3])
    good = {name: values.astype(np.float32) for name, values in evidence.places.items()}
    assert first_off(evidence.compared(good, 1.0)) == []
    for name in ("blk.1.state", "blk.2.conv"):
        bits = good[name].view(np.uint32) >> cleared << cleared
        (said,) = first_off(evidence.compared({**good, name: bits.view(np.float32)}, 1.0))
        assert said.startswith(name) and f"every value of it is a {kind} (which explains it)" in said
    # Nothing is there yet, or it needs no more bits: no sign of it.
    assert first_off(evidence.compared({**good, "blk.1.state": np.zeros_like(good["blk.1.state"])}, 1.0)) == []
    assert rounded_state("blk.1.state", np.ones(4), np.ones(4)) == ""


def test_numbers_that_are_none(tiny: Tiny, tmp_path: Path) -> None:
    """No text comes of such a build; where they begin is told all the same."""
    model = build(GEOMETRIES["f32"])
    model.tensors["blk.1.ffn_down.weight"][:] = 3e38
    model.write(tmp_path / "altered.gguf")
    export_model(tmp_path / "altered.gguf", tmp_path / "x")
    begin = "blk.2.conv is not what the model's equations give (NaN or infinite); suspect what the delta net is given"
    looked = run_main(inspect.main, tiny("f32"), "--gpu", "L4", "--build", tmp_path / "x", "--json")
    found = json.loads(looked.out, parse_constant=pytest.fail)["build"]
    assert looked.code == 1 and found["faults"][0].startswith(begin) and found["worst_nmse"] is None
    for main, more in ((check.main, ("--n-prompts", 1, "-n", 4)), (eval.main, ("--per-category", 1, "-n", 4, "--raw"))):
        run_main(main, tmp_path / "x", *more, "--threads", 1).refused(5, "so no token can be chosen")
        run_main(main, tmp_path / "x", *more, "--threads", 1, "--against", tiny("f32")).refused(5, "no token", begin)


def test_rounding_adds_up_from_layer_to_layer() -> None:
    """Squared errors of sound builds of 32 layers come to more than what the first layer may be off by."""
    rng = np.random.default_rng(0)
    places = {f"blk.{layer}.state": rng.normal(size=(2, 64, 64)) for layer in (*range(31), 32)} | {
        LOGITS: rng.normal(size=(4, 64))
    }
    evidence = Evidence((1, 2, 3, 4), places, {})

    def off(nmse: float, limit: float) -> list[str]:
        error = 1 + np.sqrt(nmse)
        found = evidence.compared({name: values * error for name, values in places.items()}, limit)
        return [place.name for place in found if not place.ok]

    assert off(2.5e-9, 1e-9) == ["blk.0.state", "blk.1.state"] and off(0.9e-9, 1e-9) == []
    assert off(0.9 * 32e-9, 1e-9)[-1] == "blk.27.state"  # logits: as after the last layer
    assert LOGITS in off(1.1 * 32e-9, 1e-9) and off(6e-3, 1e-3) == list(places)  # not beyond what faults come to


def test_a_byte_that_no_token_reads(tmp_path: Path) -> None:
    """Loading looks at samples of large files; a row of the embedding that the text has not is looked at here."""
    export_model(TRAINED_MODEL, tmp_path / "x")
    session = open_session(tmp_path / "x", threads=1)
    weights = tmp_path / "x" / "weights.bin"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    with pytest.raises(EngineError, match="its content is not what was exported"):
        diagnose(session, TRAINED_MODEL)


def test_refusals(tiny: Tiny, tmp_path: Path) -> None:
    export_model(TRAINED_MODEL, tmp_path / "x")
    other = tiny("f32")
    run_main(inspect.main, other, "--gpu", "L4", "--build", tmp_path / "x").refused(2, "the build is of another model")
    run_main(inspect.main, other, "--gpu", "L4", "--build", tmp_path / "no").refused(2, "--build", "no such folder")
    run_main(check.main, tmp_path / "x", "--against", tmp_path).refused(2, "--against", "no such file")
    (tmp_path / "text").write_text("x")
    short = (tmp_path / "x", "--n-prompts", 1, "--prompt-length", 2, "-n", 3, "--threads", 1)
    run_main(check.main, *short, "--against", tmp_path / "text").refused(3, "text")
    run_main(eval.main, "--server", "http://127.0.0.1:9", "--against", other).refused(2, "give a MODEL too")
