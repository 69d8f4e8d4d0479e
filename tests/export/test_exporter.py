"""Exports are whole or not there, small where they must be, and stream."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from engines.errors import EngineError, ModelFileError, ResourceError, UsageError
from engines.manifest import MANIFEST_NAME, file_digest, load_manifest
from engines.sealed_json import write_sealed
from export import exporter, weights
from export.exporter import export_model
from export.gguf_file import GGUFFile
from export.graph import Graph, Weight
from tests.memory import needs_peak

Tiny = Callable[[str], Path]


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_an_export_is_complete_and_deterministic(tiny: Tiny, tmp_path: Path) -> None:
    for name in ("one", "two"):
        export_model(tiny("mixed_types"), tmp_path / name)
    assert _contents(tmp_path / "one") == _contents(tmp_path / "two")
    manifest = load_manifest(tmp_path / "one")
    assert set(manifest.files) == {"trunk", "draft", "replay", "weights", "tokenizer", "chat_template"}
    for role in manifest.files:
        assert manifest.file(tmp_path / "one", role).is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_graphs_pass_the_checker_and_hold_no_weights(tiny: Tiny, tmp_path: Path) -> None:
    export_model(tiny("mixed_types"), tmp_path / "x")
    for role in ("trunk", "draft", "replay"):
        path = tmp_path / "x" / f"{role}.onnx"
        onnx.checker.check_model(str(path), full_check=True)
        model = onnx.load(str(path), load_external_data=False)
        assert {opset.domain: opset.version for opset in model.opset_import}[""] == 27
        for tensor in model.graph.initializer:
            external = tensor.data_location == onnx.TensorProto.EXTERNAL
            assert external or len(tensor.raw_data) < 1024, tensor.name
        domains = {node.domain for function in model.functions for node in function.node}
        assert domains <= {"", "com.microsoft"}, "stock operators only"


def test_without_draft_head_the_trunk_is_the_same(tiny: Tiny, tmp_path: Path) -> None:
    export_model(tiny("agreeing"), tmp_path / "with")
    export_model(tiny("agreeing"), tmp_path / "without", draft=False)
    manifest = load_manifest(tmp_path / "without")
    assert not manifest.has_draft and "draft" not in manifest.files
    trunk = (tmp_path / "with" / "trunk.onnx").read_bytes()
    assert trunk == (tmp_path / "without" / "trunk.onnx").read_bytes()


def test_a_refused_file_leaves_nothing_behind(tiny: Tiny, tmp_path: Path) -> None:
    for name in ("trunc_data_mid", "nan_norm", "inf_block", "nextn_promised", "mmproj"):
        with pytest.raises(ModelFileError):
            export_model(tiny(name), tmp_path / "x")
        assert list(tmp_path.iterdir()) == []


def test_a_failed_export_keeps_the_old_one(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "x"
    export_model(tiny("agreeing"), target)
    before = _contents(target)

    def disk_is_full(self: weights.WeightStore, offset: int, array: np.ndarray) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights.WeightStore, "_write", disk_is_full)
    with pytest.raises(ResourceError, match="No space left"):
        export_model(tiny("mixed_types"), target)
    assert _contents(target) == before
    assert list(tmp_path.iterdir()) == [target]


def test_damage_that_keeps_the_size_is_noticed(tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "x"
    manifest = export_model(tiny("agreeing"), folder)
    manifest.verify(folder)
    for role, (name, size) in manifest.files.items():
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[: size // 2] + bytes([whole[size // 2] ^ 1]) + whole[size // 2 + 1 :])
        with pytest.raises(EngineError, match=f"{name}.*damaged"):
            manifest.verify(folder)
        (folder / name).write_bytes(whole)
        assert role in manifest.digests


def test_digest_of_a_large_file_samples_all_of_it(tmp_path: Path) -> None:
    """1 GiB, sparse: a swapped stretch of 8 MiB anywhere, or another size, gives another digest."""
    path, size = tmp_path / "large", 1 << 30
    with open(path, "wb") as file:
        file.truncate(size)
    before = file_digest(path)
    for offset in (0, size // 3, size - (8 << 20)):
        with open(path, "r+b") as file:
            file.seek(offset)
            file.write(b"\1" * (8 << 20))
        assert file_digest(path) != before
        with open(path, "r+b") as file:
            file.seek(offset)
            file.write(bytes(8 << 20))
        assert file_digest(path) == before
    with open(path, "ab") as file:
        file.truncate(size + 1)
    assert file_digest(path) != before


def test_a_mount_point_is_filled_in_place(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mounted"
    export_model(tiny("agreeing"), folder)
    rename = os.replace

    def busy(source: Path, target: Path) -> None:
        if Path(source) == folder:
            raise OSError(errno.EBUSY, "Device or resource busy")
        rename(source, target)

    monkeypatch.setattr(exporter.os, "replace", busy)
    export_model(tiny("mixed_types"), folder)
    load_manifest(folder).verify(folder)
    assert list(tmp_path.iterdir()) == [folder]


def test_a_folder_that_is_no_export_is_not_replaced(tiny: Tiny, tmp_path: Path) -> None:
    precious = tmp_path / "thesis.txt"
    precious.write_text("mine")
    with pytest.raises(UsageError, match="no export"):
        export_model(tiny("agreeing"), tmp_path)
    assert precious.read_text() == "mine"
    with pytest.raises(UsageError, match="is a file"):
        export_model(tiny("agreeing"), precious)


def test_too_little_disk_is_said_before_anything_is_written(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(ResourceError, match=r"needs .* MB, 0\.0 MB are free"):
        export_model(tiny("agreeing"), tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_export_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "x"
    export_model(tiny("agreeing"), folder)
    manifest = load_manifest(folder)
    with open(folder / "weights.bin", "r+b") as file:
        file.truncate(100)
    with pytest.raises(EngineError, match="damaged"):
        manifest.file(folder, "weights")
    raw = json.loads((folder / MANIFEST_NAME).read_text())
    for broken in (
        {**raw, "format_version": 0},
        {**raw, "geometry": {}},
        {k: v for k, v in raw.items() if k != "files"},
        {**raw, "files": {"trunk": 5}},
        {**raw, "files": {"trunk": ["trunk.onnx", "5"]}},
        {**raw, "geometry": {**raw["geometry"], "vocab_size": "320"}},
        {**raw, "geometry": {**raw["geometry"], "gdn_layers": 3}},
        {**raw, "tokenizer": {**raw["tokenizer"], "end_token_ids": []}},
        {**raw, "tokenizer": {**raw["tokenizer"], "end_token_ids": [None]}},
    ):
        write_sealed(folder / MANIFEST_NAME, broken)
        with pytest.raises(EngineError, match="manifest"):
            load_manifest(folder)
    (folder / MANIFEST_NAME).write_text("{")
    with pytest.raises(EngineError, match="unreadable"):
        load_manifest(folder)
    with pytest.raises(EngineError, match="not an exported model"):
        load_manifest(tmp_path)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "..", "sub/outside", ""])
def test_files_of_a_manifest_stay_in_their_folder(tiny: Tiny, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "x"
    export_model(tiny("agreeing"), folder)
    (tmp_path / "outside").write_bytes(b"12345")
    raw = json.loads((folder / MANIFEST_NAME).read_text())
    raw["files"]["trunk"] = [name, 5]
    write_sealed(folder / MANIFEST_NAME, raw)
    with pytest.raises(EngineError, match=rf"incomplete manifest \({name!r} is not the name of a file in the folder\)"):
        load_manifest(folder)


def test_a_tied_head_is_stored_once(tiny: Tiny, tmp_path: Path) -> None:
    sizes = {}
    for name in ("tied", "tied_copied"):
        export_model(tiny(name), tmp_path / name)
        sizes[name] = (tmp_path / name / "weights.bin").stat().st_size
    file = GGUFFile.open(tiny("tied_copied"))
    assert sizes["tied_copied"] - sizes["tied"] >= file.tensors["output.weight"].nbytes


def test_types_without_native_form_are_noted(tiny: Tiny, tmp_path: Path) -> None:
    manifest = export_model(tiny("other_types"), tmp_path / "x")
    assert manifest.notes and all("stored as float32" in note for note in manifest.notes)


def test_graphs_over_two_gigabytes_of_weights_save(tmp_path: Path) -> None:
    """Five sparse 512 MiB tensors: the .onnx stays small and the checker runs on the path."""
    each = 512 << 20
    with open(tmp_path / "weights.bin", "wb") as file:
        file.truncate(5 * each)
    graph = Graph("big")
    x = graph.input("x", onnx.TensorProto.FLOAT, ["T", 4096])
    for index in range(5):
        shape = (4096, each // 4 // 4096)
        name = graph.weight(Weight(f"w{index}", onnx.TensorProto.FLOAT, shape, "weights.bin", index * each, each))
        graph.output(graph.op("MatMul", [x, name], f"y{index}"), onnx.TensorProto.FLOAT, ["T", shape[1]])
    graph.save(tmp_path / "big.onnx")
    assert (tmp_path / "big.onnx").stat().st_size < 64 << 20


@needs_peak
def test_export_streams(tmp_path: Path) -> None:
    """Peak memory does not grow with a tensor's size: 256 MB of float32 embedding within 200 MB over the imports."""
    script = f"""
from pathlib import Path
import numpy as np
from onnx import TensorProto
from export.gguf_file import GGUFTensor
from export.weights import WeightStore
from gguf.constants import GGMLQuantizationType
from tests.memory import peak_bytes, reset_peak
source = Path({str(tmp_path)!r}) / "source.bin"
with open(source, "wb") as file:
    file.truncate(256 << 20)
tensor = GGUFTensor("t", (65536, 1024), GGMLQuantizationType.F32, source, 0, 256 << 20)
before = reset_peak()
with WeightStore(Path({str(tmp_path)!r}) / "weights.bin") as store:
    store.matrix(tensor)
print(peak_bytes() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    # Pages of the mapped source count as resident while it is read; they belong to the page cache.
    assert int(done.stdout) < (256 + 200) << 20
