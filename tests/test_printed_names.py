"""What a model file calls itself and its parts is shown on a terminal, not obeyed by it."""

from __future__ import annotations

from pathlib import Path

import pytest

import export.__main__
from engines.errors import printable
from engines.manifest import load_manifest
from runtime import generate, inspect
from tests.runtime.command import run_main
from tests.tiny_gguf import Spec, TinyModel, build

EVIL = "\x1b[2J\x1b]0;owned\x07\r\nerror: all is well\u202e"


def evil_model(key: str = "general.name") -> TinyModel:
    model = build(Spec())
    model.metadata["general.name"] = EVIL
    model.metadata[key] = EVIL
    return model


def test_names_are_not_obeyed(tmp_path: Path) -> None:
    model = evil_model(f"qwen35.{EVIL}").write(tmp_path / "evil.gguf")
    runs = [
        run_main(export.__main__.main, model, "-o", tmp_path / "x"),
        run_main(inspect.main, model, "--gpu", "L4"),
        run_main(generate.main, tmp_path / "x", "--prompt-ids", "4", "-n", 1, "--spec-type", "draft-mtp", "-c", 9999),
        run_main(generate.main, model, "--cache-dir", tmp_path / "cache", "--prompt-ids", "4", "-n", 1, "--json"),
    ]
    assert [run.code for run in runs] == [0, 0, 2, 0], runs
    for run in runs:
        assert not any(control in run.out + run.err for control in "\x1b\x07\r\u202e"), run
    assert "owned" in load_manifest(tmp_path / "x").model_name


@pytest.mark.parametrize("key", ["qwen35.block_count", "general.architecture", "qwen35.rope.scaling.type"])
def test_nor_in_errors(tmp_path: Path, key: str) -> None:
    model = evil_model()
    model.metadata[key] = EVIL
    run = run_main(export.__main__.main, model.write(tmp_path / "evil.gguf"), "-o", tmp_path / "x")
    run.refused(3, "evil.gguf")
    assert not any(control in run.err for control in "\x1b\x07\r\u202e"), run


def test_long_names_keep_both_ends() -> None:
    text = printable("a" * 5000 + "b" * 5000)
    assert len(text) < 2100 and text.startswith("aaa") and text.endswith("bbb")
    assert printable("é \t\n\x00") == "é   \\x00"
