"""`python -m export` from the outside: what it says, and how it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

import export.__main__ as command
from engines.manifest import load_manifest
from tests.runtime.command import run_main


def test_it_says_what_it_wrote(tiny: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "out"
    assert command.main([str(tiny("draft_perfect")), "-o", str(folder)]) == 0
    out, err = capsys.readouterr()
    manifest = load_manifest(folder)
    assert out.startswith(f"{folder}: {manifest.model_name}, {len(manifest.files)} files, ")
    assert f"draft head at block {manifest.geometry.draft_layer}" in out
    assert (out.count("\n"), err) == (1, ""), "the progress bar is for terminals"


def test_without_the_draft_head(
    tiny: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([str(tiny("draft_perfect")), "-o", str(tmp_path), "--no-draft"]) == 0
    assert "no draft head" in capsys.readouterr().out
    assert not load_manifest(tmp_path).has_draft


def test_refusals_are_one_line(tiny: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, text, full = tiny("draft_perfect"), tmp_path / "text.gguf", tmp_path / "full"
    text.write_text("no model")
    full.mkdir()
    (full / "mine.txt").write_text("keep me")
    for given, folder, code, says in (
        (tmp_path / "absent.gguf", tmp_path / "out", 2, "no such file"),
        (text, tmp_path / "out", 3, "not a GGUF file"),
        (model, text, 2, "is a file"),
        (model, full, 2, "no export"),
        (model, text / "out", 6, "cannot write"),
    ):
        assert command.main([str(given), "-o", str(folder)]) == code, says
        out, err = capsys.readouterr()
        assert (out, err.count("\n"), err.startswith("error: ")) == ("", 1, True), err
        assert says in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "text.gguf"]
    assert (full / "mine.txt").read_text() == "keep me"


def test_an_interrupted_export_leaves_nothing(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*given: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("export.exporter.write_tokenizer", interrupt)
    outcome = run_main(command.main, tiny("draft_perfect"), "-o", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "")


def test_folders_that_cannot_be_replaced(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for folder, says in ((".", "current folder"), ("..", "current folder"), ("b\udcff", "not UTF-8")):
        assert command.main([str(tiny("draft_perfect")), "-o", folder]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n"), err.startswith("error: ")) == ("", 1, True), err
        assert says in err
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


def test_a_link_to_a_folder(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """What it points to is replaced, the link stays."""
    assert command.main([str(tiny("draft_perfect")), "-o", str(tmp_path / "real")]) == 0
    (tmp_path / "link").symlink_to("real")
    assert command.main([str(tiny("nextn_absent")), "-o", str(tmp_path / "link")]) == 0
    assert (tmp_path / "link").is_symlink()
    assert not load_manifest(tmp_path / "real").has_draft
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]
