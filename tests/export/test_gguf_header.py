"""GGUF headers that lie: every broken, foreign or cut file is refused in one line, at once, in little memory."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from gguf import GGUFValueType as V
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from engines.errors import ModelFileError
from export import gguf_header
from export.gguf_file import GGUFFile
from tests.export.gguf_bytes import entry, header, key, refusal, text
from tests.memory import needs_peak, peak_bytes, reset_peak
from tests.tiny_gguf import TinyModel

Tiny = Callable[[str], Path]


def test_truncated_data(tiny: Tiny) -> None:
    whole = tiny("f32").stat().st_size
    found = tiny("trunc_data_mid").stat().st_size
    error = refusal(tiny("trunc_data_mid"))
    assert error.kind == "format" and f"size needed {whole} bytes, found {found}" in str(error)


def test_truncated_anywhere(tiny: Tiny, tmp_path: Path) -> None:
    """Cut at any length the file is refused as broken, and says needed and found."""
    content = tiny("f32").read_bytes()
    lengths = [*range(4, 200), *range(200, 15000, 487), len(content) - 1]
    path = tmp_path / "cut.gguf"
    for length in lengths:
        path.write_bytes(content[:length])
        error = refusal(path)
        assert error.kind == "format" and "size needed" in str(error) and f"found {length}" in str(error)


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("html_page", "format", ["HTML", "<!DOCTYPE"]),
        ("lfs_pointer", "format", ["Git LFS pointer", "git lfs pull"]),
        ("empty", "format", ["empty", "0 bytes"]),
        ("big_endian", "unsupported", ["big-endian"]),
        ("array_bomb", "format", ["9223372036854775808 items", "'ab'", "found 50"]),
    ],
)
def test_not_a_usable_container(tiny: Tiny, name: str, kind: str, words: list[str]) -> None:
    error = refusal(tiny(name))
    assert error.kind == kind
    for word in words:
        assert word in str(error)


def nested_array() -> bytes:
    return key(b"n", V.ARRAY, struct.pack("<IQIQ", V.ARRAY, 1, V.UINT8, 0))


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (b"GGU", "format", "starts with b'GGU'"),
        (b"\x00\x01binary", "format", r"starts with b'\\x00\\x01binary'"),
        (b"PK\x03\x04" + bytes(60), "format", "ZIP or PyTorch"),
        (b"\x1f\x8b\x08" + bytes(60), "format", "gzip"),
        (b'{"error":"Invalid username or password."}', "format", "answer of a server.*Invalid username"),
        (b"<?xml version='1.0'?><Error><Code>AccessDenied", "format", "HTML page"),
        (b"FUGG" + bytes(60), "format", r"starts with b'FUGG"),
        (b"GGUF" + struct.pack(">IQQ", 2, 0, 0), "unsupported", r"big-endian GGUF \(version 2\)"),
        (b"GGUF" + struct.pack(">IQQ", 3, 2**40, 2**40), "unsupported", "big-endian"),
        (struct.pack("<Q", 40) + b'{"a":{}}', "format", "safetensors"),
        (header(0, 0, b"", version=1), "unsupported", "version 1; supported: 2 and 3"),
        (header(0, 0, b"", version=4), "unsupported", "version 4; supported: 2 and 3"),
        (header(0, 0, b"", version=0), "format", "version 0"),
        (header(2**63, 0, b""), "format", "claims 9223372036854775808 tensors"),
        (header(0, 2**63, b""), "format", "claims 9223372036854775808 metadata keys"),
        (header(70_000, 0, bytes(70_000 * 40)), "unsupported", "at most 65536"),
        (header(0, 1, struct.pack("<Q", 2**63) + bytes(40)), "format", "inside its header"),
        (header(0, 1, key(b"s", V.STRING, struct.pack("<Q", 2**64 - 8) + bytes(40))), "format", "key 's'"),
        (header(0, 1, key(b"a", V.ARRAY, struct.pack("<IQ", V.STRING, 2**60) + bytes(40))), "format", "items"),
        (header(0, 1, nested_array()), "unsupported", "array of arrays"),
        (header(0, 1, key(b"a", V.ARRAY, struct.pack("<IQ", 77, 0))), "format", "unknown value type 77"),
        (header(0, 1, key(b"a", 13, bytes(8))), "format", "unknown value type 13"),
        (header(0, 1, key(b"b", V.BOOL, b"\x02")), "format", "boolean of value 2"),
        (header(0, 1, key(b"b", V.ARRAY, struct.pack("<IQ", V.BOOL, 1) + b"\x02")), "format", "neither 0 nor 1"),
        (header(0, 1, key(b"k\xff", V.UINT8, b"\0")), "format", "not valid UTF-8"),
        (header(0, 1, key(b"s", V.STRING, text(b"ab\xc3"))), "format", r"'s' is not valid UTF-8 \(byte 2 of 3\)"),
        (header(0, 1, key(b"", V.UINT8, bytes(40))), "format", "name of 0 bytes"),
        (header(0, 2, key(b"k", V.UINT8, b"\0") * 2), "format", "key 'k' appears twice"),
        (header(0, 1, key(b"general.alignment", V.UINT32, struct.pack("<I", 24))), "format", "power of two"),
        (header(0, 1, key(b"general.alignment", V.STRING, text(b"32"))), "format", "power of two"),
        (header(1, 0, entry(b"t", ()) + bytes(64)), "format", "0 dimensions"),
        (header(1, 0, entry(b"t", (1,) * 5) + bytes(64)), "format", "5 dimensions"),
        (header(1, 0, entry(b"t", (4, 0)) + bytes(64)), "format", "empty dimension"),
        (header(1, 0, entry(b"t", (4,), ggml_type=99) + bytes(64)), "unsupported", "unknown type number 99"),
        (header(1, 0, entry(b"t", (100,), ggml_type=T.Q4_K) + bytes(500)), "format", "not a whole number of Q4_K"),
        (header(1, 0, entry(b"t", (4,), offset=7) + bytes(64)), "format", "multiple of the alignment"),
        (header(1, 0, entry(b"t", (2**62, 2**62)) + bytes(64)), "format", "size needed"),
        (header(1, 0, entry(b"t", (4,), offset=2**63) + bytes(64)), "format", "size needed"),
        (header(2, 0, entry(b"t", (4,)) + entry(b"t", (4,), offset=32) + bytes(99)), "format", "'t' appears twice"),
        (header(2, 0, entry(b"t", (9,)) + entry(b"u", (4,), offset=32) + bytes(99)), "format", "'t' and 'u' overlap"),
    ],
)  # fmt: skip
def test_broken_header(tmp_path: Path, content: bytes, kind: str, message: str) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    error = refusal(path)
    assert error.kind == kind
    assert re.search(message, str(error))


def test_header_beyond_any_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sound, but past the caps that bound time and memory."""
    path = tmp_path / "large.gguf"
    strings = key(b"a", V.ARRAY, struct.pack("<IQ", V.STRING, 50) + text(b"xyz") * 50)
    path.write_bytes(header(0, 1, strings))
    assert len(GGUFFile.open(path).metadata["a"]) == 50
    monkeypatch.setattr(gguf_header, "MAX_STRINGS", 40)
    assert "more than 40 strings" in str(refusal(path))
    monkeypatch.setattr(gguf_header, "MAX_HEADER_BYTES", 100)
    monkeypatch.setattr(gguf_header, "MAX_STRINGS", 1000)
    error = refusal(path)
    assert error.kind == "unsupported" and "header is larger" in str(error)


@needs_peak
@pytest.mark.parametrize("name", ["array_bomb", "html_page", "trunc_data_mid", "big_endian"])
def test_refusal_needs_little_memory(tiny: Tiny, name: str) -> None:
    """Under file size + 300 MiB, in a process of its own, imports included."""
    script = (
        "import sys\nfrom engines.errors import ModelFileError\nfrom export.gguf_file import GGUFFile\n"
        "from tests.memory import peak_bytes\n"
        "try:\n    GGUFFile.open(sys.argv[1])\nexcept ModelFileError:\n    print(peak_bytes())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tiny(name))], capture_output=True, text=True, timeout=60, check=True
    )
    assert int(done.stdout) < tiny(name).stat().st_size + (300 << 20)


# --- any damage


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A valid file of every kind of value whose header is short, so that damage hits something."""
    metadata = {
        "general.architecture": "qwen35", "general.alignment": 32, "an.int": 3, "a.float": 0.5, "a.bool": True,
        "ints": [1, 2, 3], "strings": ["a", "bc", "é"], "floats": np.array([0.5], np.float32),
    }  # fmt: skip
    tensors = {"a": np.ones((2, 256), np.float32), "b": np.ones(3, np.float32)}
    path = TinyModel(metadata, tensors, {"a": T.Q4_K}).write(tmp_path_factory.mktemp("small") / "small.gguf")
    return path, path.read_bytes()


def open_or_refuse(path: Path) -> None:
    """Open and read everything, or be refused; nothing else may happen."""
    try:
        file = GGUFFile.open(path)
        for tensor in file.tensors.values():
            assert tensor.offset + tensor.nbytes <= path.stat().st_size
            tensor.blocks().sum()
        file.content_key()
    except ModelFileError as error:
        assert "\n" not in str(error)


INTERESTING = st.sampled_from([0, 1, 9, 255, 2**31, 2**32 - 1, 2**62, 2**63, 2**63 - 1, 2**64 - 1])


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_bytes(small_file: tuple[Path, bytes], tmp_path: Path, data: st.DataObject) -> None:
    """Bytes changed, numbers blown up, pieces cut out or doubled, anywhere in a valid header."""
    _, content = small_file
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        match data.draw(st.sampled_from(["byte", "u32", "u64", "cut", "double"])):
            case "byte":
                damaged[at] = data.draw(st.integers(0, 255))
            case "u32":
                damaged[at : at + 4] = struct.pack("<I", data.draw(INTERESTING) & 0xFFFFFFFF)
            case "u64":
                damaged[at : at + 8] = struct.pack("<Q", data.draw(INTERESTING))
            case "cut":
                del damaged[at : at + data.draw(st.integers(1, 64))]
            case "double":
                damaged[at:at] = damaged[at : at + 16]
        if not damaged:
            break
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    open_or_refuse(path)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=300))
@example(content=b"\xff" * 64)
def test_random_bytes_after_the_magic(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "random.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0" + content)
    open_or_refuse(path)


@needs_peak
def test_every_number_of_the_header_blown_up(small_file: tuple[Path, bytes], tmp_path: Path) -> None:
    """Every offset, not only the ones a search finds; memory stays where it was."""
    original, content = small_file
    end = min(tensor.offset for tensor in GGUFFile.open(original).tensors.values())
    path = tmp_path / "blown.gguf"
    before = reset_peak()
    for at in range(4, end):
        for value in (2**63, 2**40, 2**64 - 1):
            path.write_bytes(content[:at] + struct.pack("<Q", value) + content[at + 8 :])
            open_or_refuse(path)
    assert peak_bytes() - before < 100 << 20
