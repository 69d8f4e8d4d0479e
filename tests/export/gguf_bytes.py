"""Pieces of GGUF headers, written byte by byte, and the check that a file made of them is refused."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from engines.errors import ModelFileError
from export.gguf_file import GGUFFile


def refusal(path: Path) -> ModelFileError:
    """The error of opening ``path``, which must name the file and be one line."""
    with pytest.raises(ModelFileError) as caught:
        GGUFFile.open(path)
    assert path.name.split("-0000")[0] in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


def header(num_tensors: int, num_keys: int, rest: bytes, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + rest


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def key(name: bytes, value_type: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", value_type) + value


def entry(name: bytes, dims: tuple[int, ...], ggml_type: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, ggml_type, offset)
