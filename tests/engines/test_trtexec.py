"""Command lines of trtexec and tensorrt_rtx: shapes of each profile, files for what must not be random."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engines.description import describe
from engines.engine_manifest import EngineManifest
from engines.trtexec import commands, main

Tiny = Callable[[str], Path]


@pytest.fixture
def embedded(tiny: Tiny, tmp_path: Path) -> EngineManifest:
    """As built with --embed-weights by TensorRT-RTX."""
    engines = describe(tiny("q4_k_m"), 256).engines["f16"]
    options = replace(engines.options, embed_weights=True)
    made = replace(engines, options=options, tensorrt="tensorrt_rtx")
    made.save(tmp_path)
    (tmp_path / "lib.so").touch()
    return made


def flags_of(line: str) -> dict[str, str]:
    program, *words = shlex.split(line)
    return {"program": program} | dict(
        word.lstrip("-").split("=", 1) if "=" in word else (word[2:], "") for word in words
    )


def test_a_command_per_engine_profile_and_size(embedded: EngineManifest, tmp_path: Path) -> None:
    found = [flags_of(line) for line in commands(tmp_path, 20, tmp_path / "lib.so")]
    assert [(each["useProfile"], each["shapes"]) for each in found] == [
        ("0", "tokens:1,rows:1"),
        ("0", "tokens:4,rows:4"),
        ("1", "tokens:256,rows:1"),
        ("0", "tokens:1,hidden:1x256,rows:1"),
        ("0", "tokens:4,hidden:4x256,rows:1"),
        ("1", "tokens:256,hidden:256x256,rows:1"),
    ]
    for each in found:
        assert each["program"] == "tensorrt_rtx"
        assert each["dynamicPlugins"] == str(tmp_path / "lib.so")
        role = "draft" if "hidden" in each["shapes"] else "trunk"
        assert each["loadEngine"] == str(tmp_path / f"{role}.engine")
        assert {
            "separateProfileRun",
            "dumpProfile",
            "profilingVerbosity",
            "exportProfile",
            "exportLayerInfo",
        } <= each.keys()
        inputs = dict(part.split(":", 1) for part in each["loadInputs"].split(","))
        assert inputs.keys() == {"tokens", "position", "rows"} | ({"slot"} if role == "trunk" else set())
        tokens = int(re.findall(r"tokens:(\d+)", each["shapes"])[0])
        numbers = {name: np.fromfile(path, np.int32).tolist() for name, path in inputs.items()}
        rows = int(re.findall(r"rows:(\d+)", each["shapes"])[0])
        assert numbers["tokens"] == [0] * tokens and numbers["rows"] == list(range(tokens - rows, tokens))
        assert numbers["position"] == [20 if tokens < 256 else 0]
        if role == "trunk":
            assert numbers["slot"] == [0 if tokens < 256 else -1]


def test_full_tensorrt_has_another_tool(embedded: EngineManifest, tmp_path: Path) -> None:
    replace(embedded, tensorrt="tensorrt").save(tmp_path)
    assert all(line.startswith("trtexec ") for line in commands(tmp_path, 0, tmp_path / "lib.so"))


def test_refusals(embedded: EngineManifest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library = str(tmp_path / "lib.so")
    assert main([str(tmp_path), "--plugins", library]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 6
    assert main([str(tmp_path), "--plugins", library, "--position", "256"]) == 2
    assert "--position 256: wanted 0 to 255" in capsys.readouterr().err
    replace(embedded, tensorrt="").save(tmp_path)
    assert main([str(tmp_path), "--plugins", library]) == 4
    assert "built by '', wanted tensorrt or tensorrt_rtx" in capsys.readouterr().err
    replace(embedded, options=replace(embedded.options, embed_weights=False)).save(tmp_path)
    assert main([str(tmp_path), "--plugins", library]) == 4
    assert "would fill with random bytes; build others with" in capsys.readouterr().err
