"""engines.json comes back as it was written, and what is wrong with one is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engines.engine_manifest import (
    ENGINES_NAME,
    Binding,
    Engine,
    EngineManifest,
    EngineOptions,
    Profile,
    WeightPiece,
    WeightPlace,
    load_engine_manifest,
)
from engines.errors import EngineError
from engines.sealed_json import write_sealed


def manifest() -> EngineManifest:
    engine = Engine(
        "trunk.engine",
        4,
        "00ff",
        (Binding("tokens", "int32", ("T",)), Binding("blk.0.pool", "float32", (640,))),
        (Binding("blk.0.pool.out", "float32", (640,), "blk.0.pool"),),
        (Profile("decode", 4, 4), Profile("prefill", 64, 1)),
        ("output.weight",),
        ("blk.2 is built of single ops",),
    )
    pieces = WeightPiece("a", "model.gguf", 96, 2, 0), WeightPiece("b", "weights.bin", 0, 3, 256)
    place = WeightPlace((1, 2, 256), pieces)
    options = EngineOptions(4, 256, 64, False, "ops")
    return EngineManifest("k", "c", "tensorrt_rtx", "1.7.1", "p", options, {"trunk": engine}, {"output.weight": place})


def test_round_trip(tmp_path: Path) -> None:
    manifest().save(tmp_path)
    assert load_engine_manifest(tmp_path) == manifest()
    assert [path.name for path in tmp_path.iterdir()] == [ENGINES_NAME]


def test_engine_files_are_checked(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"trunk\.engine: missing.*engines\.build"):
        manifest().file(tmp_path, "trunk")
    (tmp_path / "trunk.engine").write_bytes(b"12345")
    with pytest.raises(EngineError, match=r"5 bytes, engines\.json says 4 bytes"):
        manifest().file(tmp_path, "trunk")
    with pytest.raises(EngineError, match=r"has no 'draft' engine \(has trunk\)"):
        manifest().file(tmp_path, "draft")
    (tmp_path / "trunk.engine").write_bytes(b"1234")
    assert manifest().file(tmp_path, "trunk") == tmp_path / "trunk.engine"


def test_unusable_manifests(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no engines\.json; build engines"):
        load_engine_manifest(tmp_path)
    manifest().save(tmp_path)
    path = tmp_path / ENGINES_NAME
    good = json.loads(path.read_text())
    for text, says in (
        ("{", "unreadable"),
        ("[]", "format None"),
        (json.dumps({**good, "content_key": "d"}), "damaged, not what was written"),
        ({**good, "format_version": 99}, "format 99, wanted 3"),
        ({key: value for key, value in good.items() if key != "weights"}, "incomplete .*weights"),
        ({**good, "options": {"max_rows": 1}}, "incomplete"),
        ({**good, "engines": {"trunk": {"file": "x"}}}, "incomplete"),
    ):
        if isinstance(text, dict):
            write_sealed(path, text)
        else:
            path.write_text(text)
        with pytest.raises(EngineError, match=f"{says}.*engines.build"):
            load_engine_manifest(tmp_path)


@pytest.mark.parametrize("name", ["../model.gguf", "/etc/passwd", "..", "sub/model.gguf", ""])
@pytest.mark.parametrize("where", ["engine", "weight"])
def test_files_stay_in_their_folder(tmp_path: Path, where: str, name: str) -> None:
    manifest().save(tmp_path)
    path = tmp_path / ENGINES_NAME
    raw = json.loads(path.read_text())
    if where == "engine":
        raw["engines"]["trunk"]["file"] = name
    else:
        raw["weights"] = {
            "w": {"shape": [4], "pieces": [{"tensor": "t", "file": name, "offset": 0, "nbytes": 4, "at": 0}]}
        }
    write_sealed(path, raw)
    with pytest.raises(EngineError, match="is not the name of a file in the folder"):
        load_engine_manifest(tmp_path)


@pytest.mark.parametrize(("offset", "nbytes", "at"), [(-1, 4, 0), (0, -1, 0), (0, 4, -1), (0, 4, 1), (0, 5, 0)])
def test_weights_stay_in_their_memory(tmp_path: Path, offset: int, nbytes: int, at: int) -> None:
    manifest().save(tmp_path)
    path = tmp_path / ENGINES_NAME
    raw = json.loads(path.read_text())
    piece = {"tensor": "t", "file": "model.gguf", "offset": offset, "nbytes": nbytes, "at": at}
    raw["weights"] = {"w": {"shape": [4], "pieces": [piece]}}
    write_sealed(path, raw)
    with pytest.raises(EngineError, match=r"a piece of 'w' lies outside of it|'w': pieces: .* is -1"):
        load_engine_manifest(tmp_path)
