"""Files that hold a model otherwise than usual: any alignment, order, gaps, foreign keys; the same model comes out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from gguf import GGUFValueType as V
from onnx.external_data_helper import ExternalDataInfo

from export.exporter import TARGETS, export_model
from export.gguf_file import GGUFFile
from tests.export.gguf_bytes import refusal
from tests.fuzz.header import Parts, Value, parse

Tiny = Callable[[str], Path]
Keys = list[tuple[bytes, Value]]
ALIGNMENT = b"general.alignment"
# Alignment, bytes before the first tensor and after each, keys beside the model's.
LAYOUTS: dict[str, tuple[int, int, int, Keys]] = {
    "alignment 1, odd offsets": (1, 7, 3, [(ALIGNMENT, Value(V.UINT32, [1]))]),
    "alignment 2": (2, 0, 0, [(ALIGNMENT, Value(V.UINT64, [2]))]),
    "alignment 2^20": (1 << 20, 0, 0, [(ALIGNMENT, Value(V.INT32, [1 << 20]))]),
    "gaps": (32, 64, 32, []),
    "a large array": (32, 0, 0, [(b"x", Value(V.ARRAY, [7] * 1_000_000, V.INT32))]),
    "many strings": (32, 0, 0, [(b"x", Value(V.ARRAY, [b"a"] * 100_000, V.STRING))]),
    "names of all scripts": (32, 0, 0, [("x.\u202ee\u0301\U0001f600".encode(), Value(V.STRING, [b"\x1b[31m\n"]))]),
}


def laid_out(source: Path, path: Path, name: str, version: int, reverse: bool) -> Path:
    """The model of ``source`` in another layout."""
    content = source.read_bytes()
    parts, end = parse(content) or pytest.fail()
    start = -(-end // parts.alignment()) * parts.alignment()
    alignment, first, gap, keys = LAYOUTS[name]
    tensors = GGUFFile.open(source).tensors
    data = bytearray(first)
    for each in parts.tensors[::-1] if reverse else parts.tensors:
        found = tensors[each.name.decode()]
        assert found.offset == start + each.offset
        data += b"\xee" * (-len(data) % alignment)
        each.offset = len(data)
        data += content[found.offset : found.offset + found.nbytes] + b"\xee" * gap
    header = Parts(version, [each for each in parts.keys if each[0] != ALIGNMENT] + keys, parts.tensors).packed()
    path.write_bytes(header + bytes(-len(header) % alignment) + data + b"\xdd" * 99)
    return path


def weights_of(folder: Path) -> dict[str, bytes]:
    """The bytes of every weight in external data, by graph and name."""
    found = {}
    for graph in sorted(folder.glob("*.onnx")):
        for each in onnx.load(graph, load_external_data=False).graph.initializer:
            if each.external_data:
                info = ExternalDataInfo(each)
                with open(folder / info.location, "rb") as file:
                    file.seek(info.offset or 0)
                    found[f"{graph.name} {each.name}"] = file.read(info.length)
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_the_same_model(tiny: Tiny, tmp_path: Path, target: str) -> None:
    usual = tiny("mixed_types")
    export_model(usual, tmp_path / "usual", target=target)
    want = weights_of(tmp_path / "usual")
    assert len(want) > 20
    for index, name in enumerate(LAYOUTS):
        odd = laid_out(usual, tmp_path / "odd.gguf", name, version=2 + index % 2, reverse=index % 3 == 1)
        export_model(odd, tmp_path / "odd", target=target)
        assert weights_of(tmp_path / "odd") == want, name


@pytest.mark.parametrize(
    "value",
    [Value(V.UINT32, [0]), Value(V.INT32, [-32]), Value(V.FLOAT32, [32.0]), Value(V.BOOL, [1]), Value(V.UINT32, [48]),
     Value(V.ARRAY, [32], V.UINT32), Value(V.STRING, [b"32"]), Value(V.UINT32, [2**31]), Value(V.UINT64, [2**63])],
    ids=lambda value: f"{value.kind} {value.items}",
)  # fmt: skip
def test_alignments_that_are_none(tiny: Tiny, tmp_path: Path, value: Value) -> None:
    """Or that the tensors do not keep."""
    content = tiny("f32").read_bytes()
    parts, end = parse(content) or pytest.fail()
    parts.keys = [each for each in parts.keys if each[0] != ALIGNMENT] + [(ALIGNMENT, value)]
    path = tmp_path / "aligned.gguf"
    path.write_bytes(parts.packed() + content[end:])
    assert "alignment" in str(refusal(path))
