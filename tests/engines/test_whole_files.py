"""Every byte of an export counts when engines are built: damage is refused, or the model exported anew."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engines import whole_files
from engines.build import build_engines, main
from engines.engine_manifest import EngineOptions
from engines.errors import EngineError
from engines.fresh_export import exported_folder
from engines.manifest import load_manifest
from engines.whole_files import verify_whole, whole_digest
from export.exporter import WHOLE_HEAD, export_model

Tiny = Callable[[str], Path]
OPTIONS = EngineOptions(max_rows=4, context=128, prefill_chunk=32, embed_weights=False)


@pytest.fixture
def folder(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An export whose files count as large, with a .gguf of its own."""
    monkeypatch.setattr(whole_files, "SAMPLED_FROM_BYTES", 0)
    export_model(tiny("q4_k_m"), tmp_path / "x", target="tensorrt")
    of_its_own(tmp_path / "x" / "model.gguf")
    return tmp_path / "x"


def of_its_own(path: Path) -> None:
    """The file may be the model's own by another name."""
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 65536, 65537, 3 << 20])
def test_any_byte_and_the_size_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(whole_files, "_PIECE_BYTES", 1 << 20)
    file = tmp_path / "file"
    file.write_bytes(np.random.default_rng(size).bytes(size))
    whole = whole_digest(file)
    for place in {0, size // 3, size // 2, size - 1}:
        flip(file, place)
        assert whole_digest(file) != whole
        flip(file, place)
    assert whole_digest(file) == whole
    os.truncate(file, size + 1)  # zeros take part
    assert whole_digest(file) != whole


def test_a_damaged_export_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though samples, which is what is looked at when it is loaded, do not show it."""
    manifest = load_manifest(folder)
    assert manifest.whole.keys() == manifest.files.keys()
    verify_whole(folder, manifest)
    flip(folder / "model.gguf", 400_000)
    monkeypatch.setattr(type(manifest), "verify", lambda self, folder: None)
    for act in (verify_whole, lambda folder, manifest: build_engines(folder, OPTIONS)):
        with pytest.raises(
            EngineError, match=r"model\.gguf: its content is not .* give the \.gguf to `python -m engines\.build` again"
        ):
            act(folder, manifest)


def test_the_command_line_refuses_it_in_a_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(folder / "model.gguf", 400_000)
    assert main([str(folder), "--max-draft", "3", "--context", "128"]) == 4
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{folder / 'model.gguf'}: its content is not what was exported" in said


def test_with_its_model_it_is_exported_anew(tiny: Tiny, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny("q4_k_m")
    before = (folder / "manifest.json").stat().st_ino
    assert exported_folder(model, folder, True, WHOLE_HEAD) == folder
    assert (folder / "manifest.json").stat().st_ino == before and capsys.readouterr().err == ""
    flip(folder / "model.gguf", 400_000)
    assert exported_folder(model, folder, True, WHOLE_HEAD) == folder
    said = capsys.readouterr().err
    assert "model.gguf: its content is not what was exported; exporting the model anew" in said
    assert (folder / "model.gguf").read_bytes() == model.read_bytes()
    verify_whole(folder, load_manifest(folder))


def test_an_export_of_another_version_is_made_anew(tiny: Tiny, folder: Path) -> None:
    made = load_manifest(folder)
    replace(made, exporter="another").save(folder)
    exported_folder(tiny("q4_k_m"), folder, True, WHOLE_HEAD)
    assert load_manifest(folder) == made


def test_a_model_without_a_head_is_exported_once(tiny: Tiny, tmp_path: Path) -> None:
    made = []
    for _ in range(2):
        exported_folder(tiny("nextn_absent"), tmp_path / "x", True, WHOLE_HEAD)
        made.append((tmp_path / "x" / "manifest.json").stat().st_ino)
    assert made[0] == made[1]
