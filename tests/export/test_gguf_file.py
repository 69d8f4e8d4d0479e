"""Opening GGUF files and split sets: metadata, tensors and values equal what the gguf package reads."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from gguf import GGUFValueType as V

from engines.errors import ModelFileError, ResourceError, UsageError
from export.gguf_file import GGUFFile, GGUFTensor
from tests.export.gguf_bytes import entry, header, key, refusal, text
from tests.named_inputs import GEOMETRIES
from tests.tiny_gguf import Spec, TinyModel, build

Tiny = Callable[[str], Path]


# --- what is read


@pytest.mark.parametrize("name", ["f32", "q4_k_m", "mixed_types", "other_types"])
def test_equals_the_gguf_reader(tiny: Tiny, name: str) -> None:
    """Metadata, shapes, offsets, blocks and dequantised values, against the gguf package on every type."""
    file = GGUFFile.open(tiny(name))
    reader = gguf.GGUFReader(tiny(name))
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    ours = {key: v.tolist() if isinstance(v, np.ndarray) else v for key, v in file.metadata.items()}
    assert ours == fields
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for theirs in reader.tensors:
        tensor = file.tensors[theirs.name]
        assert tensor.shape == tuple(int(dim) for dim in reversed(theirs.shape))
        assert (tensor.ggml_type, tensor.offset, tensor.nbytes) == (
            theirs.tensor_type,
            theirs.data_offset,
            theirs.n_bytes,
        )
        wanted = gguf.dequantize(theirs.data, theirs.tensor_type).reshape(tensor.shape)
        np.testing.assert_array_equal(tensor.f32(), wanted)
        assert tensor.f32().dtype == np.float32
        assert tensor.blocks().tobytes() == theirs.data.tobytes()


@pytest.mark.parametrize("ggml_type", T)
def test_dequantises_random_blocks_of_every_type(tmp_path: Path, ggml_type: T) -> None:
    """Bit-equal to the gguf package, in whole and by rows; a type it has no dequantiser for is refused by name."""
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
    raw = np.random.default_rng(ggml_type).integers(0, 256, (7, 3 * block_bytes), np.uint8)
    path = tmp_path / "raw.bin"
    path.write_bytes(bytes(5) + raw.tobytes())
    tensor = GGUFTensor("t", (7, 3 * block_values), ggml_type, path, 5, raw.nbytes)
    with np.errstate(all="ignore"):
        try:
            wanted = gguf.dequantize(raw, ggml_type)
        except NotImplementedError:
            with pytest.raises(ModelFileError, match=f"'t' has type {ggml_type.name}") as caught:
                tensor.f32()
            assert caught.value.kind == "unsupported"
            return
        assert tensor.f32().tobytes() == wanted.tobytes()
        assert tensor.rows_f32(2, 5).tobytes() == wanted[2:5].tobytes()
    assert tensor.rows_f32(4, 4).shape == (0, 3 * block_values)


def test_dequantises_in_pieces(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = GGUFFile.open(tiny("q4_k_m")).tensors["token_embd.weight"]
    whole = tensor.f32()
    monkeypatch.setattr("export.gguf_file._CHUNK_VALUES", 3 * tensor.shape[1])
    np.testing.assert_array_equal(tensor.f32(), whole)
    np.testing.assert_array_equal(tensor.rows_f32(5, 300), whole[5:300])


def test_more_than_two_dimensions(tmp_path: Path) -> None:
    values = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
    path = TinyModel({"general.architecture": "x"}, {"cube": values, "line": values[0, 0]}).write(tmp_path / "d.gguf")
    file = GGUFFile.open(path)
    assert file.tensors["cube"].shape == (2, 3, 4)
    assert file.tensors["cube"].blocks().shape == (6, 16)
    np.testing.assert_array_equal(file.tensors["cube"].f32(), values)
    np.testing.assert_array_equal(file.tensors["cube"].rows_f32(3, 5), values.reshape(6, 4)[3:5])
    assert file.tensors["line"].blocks().shape == (1, 16)
    np.testing.assert_array_equal(file.tensors["line"].f32(), values[0, 0])


def test_every_scalar_and_array_type(tmp_path: Path) -> None:
    scalars = {
        V.UINT8: ("<B", 255), V.INT8: ("<b", -1), V.UINT16: ("<H", 65535), V.INT16: ("<h", -2),
        V.UINT32: ("<I", 2**32 - 1), V.INT32: ("<i", -3), V.UINT64: ("<Q", 2**64 - 1), V.INT64: ("<q", -4),
        V.FLOAT32: ("<f", 0.5), V.FLOAT64: ("<d", 0.1), V.BOOL: ("<?", True),
    }  # fmt: skip
    rest = b"".join(key(t.name.encode(), t, struct.pack(f, v)) for t, (f, v) in scalars.items())
    rest += b"".join(
        key(b"array." + t.name.encode(), V.ARRAY, struct.pack("<IQ", t, 2) + struct.pack(f, v) * 2)
        for t, (f, v) in scalars.items()
    )
    rest += key(b"text", V.STRING, text("é👋\n".encode()))
    rest += key(b"none", V.ARRAY, struct.pack("<IQ", V.STRING, 0))
    path = tmp_path / "types.gguf"
    path.write_bytes(header(0, 2 * len(scalars) + 2, rest))
    metadata = GGUFFile.open(path).metadata
    for value_type, (_, value) in scalars.items():
        assert metadata[value_type.name] == value and type(metadata[value_type.name]) is type(value)
        assert metadata[f"array.{value_type.name}"].tolist() == [value, value]
    assert metadata["text"] == "é👋\n" and metadata["none"] == []


def test_alignment_key_and_version_2(tmp_path: Path) -> None:
    rest = key(b"general.alignment", V.UINT32, struct.pack("<I", 256)) + entry(b"t", (2,), offset=256)
    path = tmp_path / "aligned.gguf"
    path.write_bytes(header(1, 1, rest, version=2).ljust(512, b"\0") + struct.pack("<2f", 1, 2))
    tensor = GGUFFile.open(path).tensors["t"]
    assert tensor.offset == 512 and tensor.f32().tolist() == [1, 2]


def test_typed_get(tmp_path: Path) -> None:
    metadata = {"general.architecture": "x", "i": 3, "f": 0.5, "s": "text", "b": True, "is": [1, 2], "ss": ["a"]}
    metadata |= {"fs": np.array([0.5, 1.0], np.float32), "bs": np.array([True, False])}
    file = GGUFFile.open(TinyModel(metadata, {"t": np.zeros(1)}).write(tmp_path / "m.gguf"))
    assert file.get("i", int) == 3 and file.get("f", float) == 0.5 and file.get("s", str) == "text"
    assert file.get("b", bool) is True and file.get("i", float) == 3.0
    assert file.get("is", list[int]) == [1, 2] and file.get("is", list[float]) == [1.0, 2.0]
    assert file.get("fs", list[float]) == [0.5, 1.0] and file.get("ss", list[str]) == ["a"]
    assert file.get("bs", list[bool]) == [True, False]
    assert file.get("absent", int, 7) == 7
    wrong = [("s", int), ("b", int), ("f", int), ("i", str), ("i", bool), ("b", float), ("is", int), ("i", list[int])]
    wrong += [("fs", list[int]), ("ss", list[int]), ("is", list[str]), ("bs", list[int])]
    for name, kind in wrong:
        with pytest.raises(ModelFileError, match=rf"m\.gguf: metadata key '{name}' is .*; wanted a value of kind"):
            file.get(name, kind)
    with pytest.raises(ModelFileError, match="metadata key 'absent' is missing") as caught:
        file.get("absent", int)
    assert caught.value.kind == "content"


# --- the key that names the content


def test_content_key_follows_content(tmp_path: Path, tiny: Tiny) -> None:
    path = tmp_path / "copy.gguf"
    content = tiny("f32").read_bytes()
    path.write_bytes(content)
    os.utime(path, (1, 1))
    original = GGUFFile.open(tiny("f32")).content_key()
    assert GGUFFile.open(path).content_key() == original
    for position in (len(content) - 1, len(content) // 2, content.index(b"tiny-random")):
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        assert GGUFFile.open(path).content_key() != original
    assert GGUFFile.open(tiny("tied")).content_key() != original


def test_content_key_of_a_large_file_samples_every_tensor(
    tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("export.gguf_file._HASH_WHOLE_BYTES", 0)
    content = bytearray(tiny("f32").read_bytes())
    file = GGUFFile.open(tiny("f32"))
    keys = {file.content_key()}
    path = tmp_path / "changed.gguf"
    for tensor in list(file.tensors.values())[::5]:
        for position in (tensor.offset, tensor.offset + tensor.nbytes // 2, tensor.offset + tensor.nbytes - 1):
            changed = bytearray(content)
            changed[position] ^= 1
            path.write_bytes(changed)
            keys.add(GGUFFile.open(path).content_key())
    assert len(keys) == 1 + 3 * len(list(file.tensors)[::5])


# --- split sets


def test_split_set_is_joined(tiny: Tiny) -> None:
    """The same tensors and metadata as the whole file."""
    whole, split = GGUFFile.open(tiny("f32")), GGUFFile.open(tiny("split_first"))
    assert len(split.paths) == 4 and split.path == tiny("split_first")
    assert split.tensors.keys() == whole.tensors.keys()
    for name, tensor in split.tensors.items():
        np.testing.assert_array_equal(tensor.f32(), whole.tensors[name].f32())
    assert {name for name in split.metadata if not name.startswith("split.")} == whole.metadata.keys()
    assert split.content_key() == GGUFFile.open(tiny("split_first")).content_key() != whole.content_key()


def test_split_part_missing(tiny: Tiny) -> None:
    error = refusal(tiny("split_missing"))
    assert error.kind == "unsupported"
    assert "split model of 4 parts" in str(error) and "split_missing-00002-of-00004.gguf" in str(error)


def test_split_later_part_given(tiny: Tiny) -> None:
    error = refusal(tiny("split_later"))
    assert error.kind == "unsupported"
    assert "split model of 4 parts" in str(error) and "give the first part, split_later-00001-of-00004.gguf" in str(
        error
    )


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    first = build(Spec()).write(tmp_path / "set.gguf", max_tensors=20)
    return [first.with_name(f"set-0000{number}-of-00004.gguf") for number in (1, 2, 3, 4)]


def test_split_under_another_name(shards: list[Path]) -> None:
    renamed = shards[0].rename(shards[0].with_name("model.gguf"))
    error = refusal(renamed)
    assert (
        error.kind == "unsupported" and "split model of 4 parts" in str(error) and "NAME-00001-of-00004" in str(error)
    )


def test_split_parts_of_two_sets(shards: list[Path], tmp_path: Path) -> None:
    shards[1].write_bytes(shards[2].read_bytes())
    error = refusal(shards[0])
    assert error.kind == "content" and "do not belong together" in str(error)


def test_split_tensor_count(shards: list[Path]) -> None:
    for shard in shards:
        content = shard.read_bytes()
        at = content.index(b"split.tensors.count") + len(b"split.tensors.count") + 4
        shard.write_bytes(content[:at] + struct.pack("<i", 99) + content[at + 4 :])
    assert "promises 99 tensors" in str(refusal(shards[0]))


def test_split_part_cut_off(shards: list[Path]) -> None:
    shards[2].write_bytes(shards[2].read_bytes()[:-1000])
    error = refusal(shards[0])
    assert error.kind == "format" and "set-00003-of-00004.gguf" in str(error)


def test_path_is_no_file(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "file").write_bytes(b"x")
    for path in (
        tmp_path,
        tmp_path / "absent.gguf",
        fifo,
        tmp_path / "file" / "below",
        "nul\0byte",
        tmp_path / ("n" * 999),
    ):
        with pytest.raises(UsageError) as caught:
            GGUFFile.open(path)
        assert str(path) in str(caught.value)


def test_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permission is denied by a stand-in for open, since a test run as root may read anything."""
    path = tmp_path / "locked.gguf"
    path.write_bytes(b"GGUF")

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", denied)
    with pytest.raises(UsageError, match=r"locked\.gguf: cannot be read \(Permission denied\)"):
        GGUFFile.open(path)


def test_file_changed_after_opening(tmp_path: Path, tiny: Tiny) -> None:
    path = tmp_path / "shrinks.gguf"
    path.write_bytes(tiny("f32").read_bytes())
    tensor = GGUFFile.open(path).tensors["output.weight"]
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match=r"'output\.weight' cannot be read any more"):
        tensor.f32()
    path.unlink()
    with pytest.raises(ModelFileError, match="cannot be read any more"):
        tensor.blocks()


def test_named_geometries_open(tiny: Tiny) -> None:
    for name in GEOMETRIES:
        assert GGUFFile.open(tiny(name)).get("general.architecture", str) == "qwen35"


def test_no_room_to_map_it(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `ulimit -v`: of the file, not of an output, nor that the file has changed."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    tensor = next(iter(GGUFFile.open(tiny("f32")).tensors.values()))
    monkeypatch.setattr("export.gguf_file.mmap.mmap", full)
    monkeypatch.setattr(np, "memmap", full)
    for use in (lambda: GGUFFile.open(tiny("f32")), tensor.blocks):
        with pytest.raises(ResourceError, match=r"\.gguf: cannot be mapped into memory \(Cannot allocate memory\)"):
            use()
