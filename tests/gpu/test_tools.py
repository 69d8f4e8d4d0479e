"""Accuracy and profiles on a real GPU: of good builds, and of one with a single damaged byte."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import pytest

from engines.accuracy.plan import LOWERED
from runtime.profiling.kinds import LAYERS, OTHER
from tests.documented import POLYGRAPHY, ROOT, variables_and_words
from tests.faults import EH_PROJ, GRAPH, ROPE
from tests.gpu.prepare import ACCURACY, SINGLE_OPS, model_file

COMMANDS = (
    "import sys; from pathlib import Path; from engines.accuracy.commands import commands, use_rtx_switch; "
    "from engines.accuracy.plan import load_plan; use_rtx_switch(); folder = Path(sys.argv[1]); "
    "print(*commands(folder, *load_plan(folder)), sep=chr(10))"
)

pytestmark = [pytest.mark.gpu, pytest.mark.trt]


def run(*words: str | Path, expect: int = 0, **variables: str) -> str:
    """stdout of a module's command line."""
    command = [sys.executable, *map(str, words)]
    ran = subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True)
    assert ran.returncode == expect, (
        f"{shlex.join(command)}: {ran.returncode}\n{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"
    )
    return ran.stdout


def compared(prepared: Path, folder: Path, lowering: str = "ops") -> Path:
    """A copy of the folder that was prepared, to be looked at after other nodes."""
    pytest.importorskip("polygraphy")
    shutil.copytree(prepared / ACCURACY, folder)
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps({**plan, "lowering": lowering}))
    return folder


@pytest.mark.parametrize("lowering", ["ops", "layers"])
def test_accuracy_of_a_good_build(prepared: Path, tmp_path: Path, lowering: str) -> None:
    folder, report = compared(prepared, tmp_path / "x", lowering), tmp_path / "report.json"
    shown = run("-m", "engines.accuracy", folder, "--json", report)
    print(shown)
    assert shown.rstrip().endswith("passed") and ": tensorrt against ONNX Runtime" in shown
    assert json.loads(report.read_text())["backend"] == "tensorrt"


def test_accuracy_of_the_trained_model(prepared: Path, tmp_path: Path) -> None:
    """As `make accuracy` does it."""
    pytest.importorskip("onnxruntime", "1.32")
    shown = run("-m", "engines.accuracy", model_file(prepared, "trained"), "-o", tmp_path / "x")
    print(shown)
    assert shown.rstrip().endswith("passed") and ": tensorrt against ONNX Runtime" in shown


@pytest.mark.parametrize("lowering", ["ops", "layers"])
@pytest.mark.parametrize("mask", [0x01, 0xFF])
def test_accuracy_of_one_flipped_scale_byte(prepared: Path, tmp_path: Path, lowering: str, mask: int) -> None:
    """Of the sixth superblock, in the file that the engine's weights come from. Where only layers are seen, a change
    of one step in one scale is no more than what is rounded, and only the bytes tell."""
    folder, name = compared(prepared, tmp_path / "x", lowering), "blk.1.ffn_gate.weight"
    damaged = folder / "lowered" / "model.gguf"
    tensor = next(each for each in gguf.GGUFReader(damaged).tensors if each.name == name)
    assert tensor.tensor_type.name == "Q4_K"
    at, content = int(tensor.data_offset) + 144 * 5 + 4, bytearray(damaged.read_bytes())
    content[at] ^= mask
    damaged.write_bytes(content)
    shown = run("-m", "engines.accuracy", folder, expect=1)
    print(shown)
    verdict = shown.rstrip().splitlines()[-1]
    assert "other bytes than the model's in blk.1.ffn_gate.weight, row 5, superblock 0, byte 4" in verdict
    if lowering == "ops" or mask == 0xFF:
        assert verdict.startswith("FAILED: first off at blk.1/")
        assert "weights: row 5 of what makes blk.1/swiglu" in verdict


def test_accuracy_by_the_commands_of_polygraphy(prepared: Path, tmp_path: Path) -> None:
    folder = compared(prepared, tmp_path / "x")
    lines = run("-c", COMMANDS, folder).splitlines()
    assert len(lines) == 4
    for line in lines[1::2]:  # the others are ONNX Runtime's
        variables, words = variables_and_words(line)
        assert words[:2] == ["polygraphy", "run"] and "--trt" in words
        shown = run("-c", POLYGRAPHY, *words[1:], **variables)
        assert "Pass Rate: 100.00%" in shown and "max error" in shown
    print(shown[-1500:])


@pytest.mark.parametrize("fault", [EH_PROJ, ROPE])
def test_accuracy_of_a_broken_export(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    folder, export = compared(prepared, tmp_path / "x"), pytest.importorskip("export.exporter")
    with monkeypatch.context() as patch:
        GRAPH[fault](patch)
        export.export_model(model_file(prepared, ACCURACY), folder / LOWERED, target="tensorrt")
    verdict = run("-m", "engines.accuracy", folder, expect=1).rstrip().splitlines()[-1]
    place, suspect = {
        EH_PROJ: ("blk.4/concat", "enorm and hnorm, and which of them comes first"),
        ROPE: ("blk.3.key_cache", "rope (position, frequencies, pairs)"),
    }[fault]
    assert verdict.startswith(f"FAILED: first off at {place} (") and suspect in verdict


def test_builds_against_the_equations(prepared: Path) -> None:
    """`runtime.profile` does it below."""
    model, build = model_file(prepared, "trained"), prepared / "trained"
    shown = run("-m", "runtime.check", build, "--n-prompts", "1", "-n", "32", "--against", model)
    assert re.search(r"equations +equal   worst NMSE \S+ at 36 places", shown)
    shown = run("-m", "runtime.inspect", model, "--build", build)
    assert "as the model's equations have it, at 36 places" in shown and "NVIDIA" in shown
    shown = run("-m", "runtime.eval", build, "--per-category", "1", "-n", "16", "--temps", "0", "--against", model)
    assert "build: as the model's equations have it, at 36 places" in shown


@pytest.mark.parametrize("name", ["trained", f"q4_k_m{SINGLE_OPS}", "mixed_types"])
def test_profile(prepared: Path, tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    report, chart = tmp_path / "profile.json", tmp_path / "profile.png"
    flags = ["--json", report, "--chart", chart, "--position", "100", "--against", model_file(prepared, name)]
    shown = run("-m", "runtime.profile", prepared / name, *flags)
    print(shown)
    assert "build: as the model's equations have it" in shown
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
