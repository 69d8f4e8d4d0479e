"""Accuracy and profiles on a real GPU: of good builds, and of one with a single damaged byte."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import gguf
import pytest

from export.exporter import export_model
from runtime.profiling.kinds import LAYERS, OTHER
from tests.documented import POLYGRAPHY, ROOT
from tests.gpu.prepare import SINGLE_OPS, model_file

pytestmark = [pytest.mark.gpu, pytest.mark.trt]


def run(*words: str | Path, expect: int = 0, **variables: str) -> str:
    """stdout of a module's command line."""
    command = [sys.executable, *map(str, words)]
    ran = subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True)
    assert ran.returncode == expect, (
        f"{shlex.join(command)}: {ran.returncode}\n{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"
    )
    return ran.stdout


@pytest.mark.parametrize("name", ["trained", "q4_k_m"])
@pytest.mark.parametrize("lowering", ["ops", "layers"])
def test_accuracy_of_a_good_build(prepared: Path, tmp_path: Path, name: str, lowering: str) -> None:
    pytest.importorskip("onnxruntime")
    report = tmp_path / "report.json"
    flags = ["-o", tmp_path / "x", "--lowering", lowering, "--json", report]
    shown = run("-m", "engines.accuracy", model_file(prepared, name), *flags)
    print(shown)
    assert shown.rstrip().endswith("passed") and ": tensorrt against ONNX Runtime" in shown
    assert json.loads(report.read_text())["backend"] == "tensorrt"


@pytest.mark.parametrize("lowering", ["ops", "layers"])
def test_accuracy_of_one_flipped_scale_byte(prepared: Path, tmp_path: Path, lowering: str) -> None:
    pytest.importorskip("onnxruntime")
    model, name = model_file(prepared, "trained"), "blk.1.ffn_gate.weight"
    export_model(model, tmp_path / "engines", target="tensorrt")
    damaged = tmp_path / "engines" / "model.gguf"
    content = bytearray(damaged.read_bytes())
    damaged.unlink()  # it is the model's own file under another name
    tensor = next(each for each in gguf.GGUFReader(model).tensors if each.name == name)
    assert tensor.tensor_type.name == "Q4_K"
    content[int(tensor.data_offset) + 144 * 5 + 4] ^= 0xFF  # a byte of the sixth superblock's scales
    damaged.write_bytes(content)
    flags = ["-o", tmp_path / "x", "--export", tmp_path / "engines", "--lowering", lowering]
    shown = run("-m", "engines.accuracy", model, *flags, expect=1)
    print(shown)
    verdict = shown.rstrip().splitlines()[-1]
    assert verdict.startswith("FAILED: first off at blk.1/")
    if lowering == "ops":
        assert "weights: row 5 of what makes blk.1/swiglu" in verdict


def test_accuracy_by_the_commands_of_polygraphy(prepared: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    flags = ["-o", tmp_path / "x", "--prepare-only"]
    lines = run("-m", "engines.accuracy", model_file(prepared, "q4_k_m"), *flags).splitlines()[1:]
    assert len(lines) == 4
    for line in lines:
        words = shlex.split(line)
        variables = dict(word.split("=") for word in words if word.startswith("POLYGRAPHY"))
        words = words[len(variables) :]
        assert words[0] == "polygraphy"
        shown = run("-c", POLYGRAPHY, *words[1:], "--verbosity", "INFO", **variables)
        if "--compare-func-script" in words:
            assert "Pass Rate: 100.00%" in shown and "max error" in shown
    print(shown[-1500:])


@pytest.mark.parametrize("name", ["trained", f"q4_k_m{SINGLE_OPS}", "mixed_types"])
def test_profile(prepared: Path, tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    report, chart = tmp_path / "profile.json", tmp_path / "profile.png"
    flags = ["--json", report, "--chart", chart, "--position", "100"]
    print(run("-m", "runtime.profile", prepared / name, *flags))
    assert chart.read_bytes().startswith(b"\x89PNG")
    found = json.loads(report.read_text())
    assert [(each["role"], each["tokens"]) for each in found["passes"]] == [("trunk", 1), ("trunk", 4), ("draft", 1)]
    for entry in found["passes"]:
        kinds = {kind["kind"]: kind for kind in entry["kinds"]}
        print(entry["role"], [layer["layer"] for layer in entry["layers"]])
        assert {"embedding", "LM head", "norms"} <= kinds.keys()
        if name == "trained":
            assert LAYERS["attention"] in kinds
        assert (
            entry["graph"]["launches"] >= sum(kind["layers"] for kind in kinds.values() if kind["kind"] != OTHER) // 2
        )
        assert entry["graph"]["ms"] > 0 and entry["layers_ms"] > 0
        assert all(0 < kind["roofline"] < 1.5 for kind in kinds.values() if kind["roofline"] is not None)
    one, four, _ = found["passes"]
    assert one["bytes"] < four["bytes"] < 2 * one["bytes"]
