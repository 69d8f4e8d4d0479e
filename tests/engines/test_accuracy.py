"""`python -m engines.accuracy`: passes on a good build, and names what is wrong with a bad one. Without a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from engines.accuracy import __main__ as accuracy
from export.exporter import export_model

ROOT = Path(__file__).parents[2]
Tiny = Callable[[str], Path]
SMALL = ["--tokens", "12", "--max-draft", "2", "--backend", "oracle"]


@pytest.fixture(scope="module")
def prepared(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("accuracy") / "x"
    assert accuracy.main([str(tiny("q4_k_m")), "-o", str(folder), *SMALL, "--json", str(folder) + ".json"]) == 0
    return folder


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    code = accuracy.main(arguments)
    return code, capsys.readouterr().out


def test_a_good_build_passes(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = run([str(prepared), "--backend", "oracle", "--all"], capsys)
    assert code == 0 and shown.rstrip().endswith("passed")
    report = json.loads(prepared.with_suffix(".json").read_text())
    assert report["passed"] and report["first_off"] is None
    assert [(each["role"], each["tokens"]) for each in report["passes"]] == [
        (role, n) for role in ("trunk", "draft") for n in (12, 3, 1)
    ]
    for each in report["passes"]:
        names = [place["name"] for place in each["places"]]
        assert names[-2:] == ["hidden.out", "logits"]
        assert all(place["nmse"] < 1e-10 for place in each["places"])
        assert {"kl_mean", "top1", "max_abs", "nmse"} <= each["places"][-1].keys() and each["places"][-1]["top1"] == 1
    trunk = [place["name"] for place in report["passes"][0]["places"]]
    assert trunk[0] == "token_embd"
    # In the order of the model, with all state.
    order = [int(name.split("blk.")[1].split(".")[0].split("/")[0]) for name in trunk if name.startswith("blk.")]
    assert order == sorted(order) and set(order) == {0, 1, 2, 3}
    assert {"blk.0.state", "blk.0.conv", "blk.3.key_cache", "blk.3.value_cache"} <= set(trunk)


@pytest.mark.parametrize("options", [["--lowering", "layers"], ["--kv-cache", "int8"]])
def test_other_forms_pass(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    code, shown = run([str(tiny("q4_k_m")), "-o", str(tmp_path / "x"), *SMALL, *options], capsys)
    assert code == 0, shown


@pytest.mark.parametrize("name", ["mixed_types", "other_types", "tied_no_head_norm", "yarn", "split_kinds_in_pair"])
def test_other_models_pass(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    code, shown = run([str(tiny(name)), "-o", str(tmp_path / "x"), *SMALL], capsys)
    assert code == 0, shown


# (tensor, superblock, byte of it): bytes of scales and minima of Q4_K begin at 4, those of Q6_K at 192.
FLIPS = [
    ("blk.0.ffn_gate.weight", 7, 4, 1, "row 7 of what makes blk.0/swiglu"),
    ("blk.1.attn_gate.weight", 5, 9, 0xFF, "row 5 of what makes blk.1/attn_gate"),
    ("blk.3.attn_output.weight", 3, 5, 2, "row 3 of what makes blk.3/mixer_residual"),
    ("blk.4.nextn.eh_proj.weight", 9, 6, 0x80, "row 4 of what makes blk.4/eh_proj"),
]


@pytest.mark.parametrize("lowering", ["ops", "layers"])
@pytest.mark.parametrize(("tensor", "superblock", "byte", "mask", "named"), FLIPS)
def test_one_flipped_scale_byte(
    tiny: Tiny,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    tensor: str,
    superblock: int,
    byte: int,
    mask: int,
    named: str,
    lowering: str,
) -> None:
    """In the file that the engine's weights come from; its row is named where single ops are seen."""
    model = tiny("q4_k_m")
    export_model(model, tmp_path / "engines", target="tensorrt")
    damaged = tmp_path / "engines" / "model.gguf"
    content = bytearray(damaged.read_bytes())
    damaged.unlink()  # it is the model's own file under another name
    found = next(each for each in gguf.GGUFReader(model).tensors if each.name == tensor)
    assert found.tensor_type.name == "Q4_K"
    content[int(found.data_offset) + 144 * superblock + byte] ^= mask
    damaged.write_bytes(content)
    options = ["--export", str(tmp_path / "engines"), "--lowering", lowering]
    code, shown = run([str(model), "-o", str(tmp_path / "x"), *SMALL, *options], capsys)
    assert code == accuracy.EXIT_FAILED
    verdict = shown.rstrip().splitlines()[-1]
    assert verdict.startswith("FAILED: first off at " + ".".join(tensor.split(".")[:2]))
    if lowering == "ops":
        assert named in verdict
