"""Parse the header of one GGUF file, every length checked against the file before it is used.

A header is bytes from a stranger: a count of 2^63 must cost nothing. So nothing is allocated or looped over
before the bytes that back it are known to exist, and what a header may hold is capped far above any real model.

Source: the GGUF specification in ggml (docs/gguf.md), versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from engines.errors import ModelFileError

# Caps that keep time and memory small whatever the file claims. A vocabulary of 250k tokens with merges needs
# 0.5 million strings and 10 MiB; a string may take four times its bytes in memory.
MAX_HEADER_BYTES = 48 << 20
MAX_STRINGS = 1_000_000
MAX_KEYS = MAX_TENSORS = 65_536
MAX_DIMS = 4
MAX_NAME_BYTES = 65_535

_SCALARS: dict[int, str] = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "?",
}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor's entry: ``shape`` outermost first, ``offset`` from the start of the file, sizes in bytes."""

    name: str
    shape: tuple[int, ...]
    ggml_type: GGMLQuantizationType
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """Everything before the tensor data. Metadata values: int, float, bool, str, list[str] or a 1-D array."""

    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]
    data_start: int
    file_bytes: int


def parse_header(path: Path, data: bytes | mmap.mmap) -> Header:
    """Parse ``data``, the whole file at ``path``. Raises ModelFileError; never reads past the end."""
    cursor = _Cursor(path, data)
    _check_magic(cursor)
    num_tensors = cursor.count("tensors", MAX_TENSORS, smallest_bytes=8 + 1 + 4 + 8 + 4 + 8)
    num_keys = cursor.count("metadata keys", MAX_KEYS, smallest_bytes=8 + 1 + 4 + 1)
    metadata: dict[str, Any] = {}
    for index in range(num_keys):
        key = cursor.name(f"metadata key {index}")
        if key in metadata:
            raise cursor.broken(f"metadata key {key!r} appears twice")
        metadata[key] = cursor.value(cursor.scalar("<u4", f"the type of {key!r}"), f"metadata key {key!r}")
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise cursor.broken(f"general.alignment is {alignment!r}; wanted a power of two")
    entries = [_tensor_entry(cursor, index) for index in range(num_tensors)]
    data_start = -(-cursor.at // alignment) * alignment
    tensors = tuple(_place(cursor, entry, data_start, alignment) for entry in entries)
    _check_layout(cursor, tensors)
    return Header(metadata, tensors, data_start, cursor.size)


class _Cursor:
    """A reading position that refuses to pass the end of the file, saying what it was reading."""

    def __init__(self, path: Path, data: bytes | mmap.mmap) -> None:
        self.path, self.data, self.size, self.at = path, data, len(data), 0
        self.limit = min(self.size, MAX_HEADER_BYTES)
        self.num_strings = 0

    def broken(self, message: str, kind: str = "format") -> ModelFileError:
        return ModelFileError(kind, f"{self.path}: {message}")

    def take(self, nbytes: int, what: str) -> int:
        """Advance by ``nbytes`` and return where they start."""
        start = self.at
        if nbytes > self.limit - start:
            if start + nbytes > self.size:
                raise self.broken(
                    f"the file ends inside its header, at {what}: size needed at least {start + nbytes} bytes, "
                    f"found {self.size}; cut off or damaged: download it again"
                )
            raise self.broken(
                f"the header is larger than {MAX_HEADER_BYTES >> 20} MiB, at {what}; no known model needs that",
                "unsupported",
            )
        self.at = start + nbytes
        return start

    def scalar(self, dtype: str, what: str) -> Any:
        kind = np.dtype(dtype)
        start = self.take(kind.itemsize, what)
        # A copy: an array over the mapped file would keep it from being closed when an error carries it along.
        value = np.frombuffer(self.data[start : self.at], kind)
        if kind == np.bool_ and value.view(np.uint8)[0] > 1:
            raise self.broken(f"{what} is a boolean of value {value.view(np.uint8)[0]}; wanted 0 or 1")
        return value[0].item()

    def count(self, what: str, cap: int, smallest_bytes: int) -> int:
        claimed = self.scalar("<u8", f"the number of {what}")
        if claimed * smallest_bytes > self.size - self.at:
            raise self.broken(
                f"claims {claimed} {what}: size needed at least {self.at + claimed * smallest_bytes} bytes, "
                f"found {self.size}; cut off or damaged: download it again"
            )
        if claimed > cap:
            raise self.broken(f"claims {claimed} {what}; at most {cap} are supported", "unsupported")
        return claimed

    def string(self, what: str) -> str:
        self.num_strings += 1
        if self.num_strings > MAX_STRINGS:
            raise self.broken(f"more than {MAX_STRINGS} strings, at {what}; no known model needs that", "unsupported")
        nbytes = struct.unpack_from("<Q", self.data, self.take(8, what))[0]
        start = self.take(nbytes, what)
        try:
            return str(self.data[start : start + nbytes], "utf-8")
        except UnicodeDecodeError as error:
            raise self.broken(f"{what} is not valid UTF-8 (byte {error.start} of {nbytes})") from error

    def name(self, what: str) -> str:
        start = self.at
        name = self.string(what)
        if not 0 < self.at - start - 8 <= MAX_NAME_BYTES:
            raise self.broken(f"{what} has a name of {self.at - start - 8} bytes; wanted 1 to {MAX_NAME_BYTES}")
        return name

    def value(self, value_type: int, what: str) -> Any:
        if value_type == GGUFValueType.STRING:
            return self.string(what)
        if value_type == GGUFValueType.ARRAY:
            return self._array(what)
        if value_type not in _SCALARS:
            raise self.broken(f"{what} has the unknown value type {value_type}")
        return self.scalar(_SCALARS[value_type], what)

    def _array(self, what: str) -> list[str] | np.ndarray:
        item_type, length = struct.unpack_from("<IQ", self.data, self.take(12, what))
        if item_type == GGUFValueType.ARRAY:
            raise self.broken(f"{what} is an array of arrays, which no supported model has", "unsupported")
        if item_type != GGUFValueType.STRING and item_type not in _SCALARS:
            raise self.broken(f"{what} is an array of the unknown value type {item_type}")
        dtype = None if item_type == GGUFValueType.STRING else np.dtype(_SCALARS[item_type])
        item_bytes = dtype.itemsize if dtype else 8
        if length * item_bytes > self.size - self.at:
            raise self.broken(
                f"{what} claims an array of {length} items: size needed at least {self.at + length * item_bytes} "
                f"bytes, found {self.size}; cut off or damaged: download it again"
            )
        if dtype is None:
            return [self.string(f"item {index} of {what}") for index in range(length)]
        start = self.take(length * item_bytes, what)
        array = np.frombuffer(self.data[start : self.at], dtype)
        if dtype == np.bool_ and (array.view(np.uint8) > 1).any():
            raise self.broken(f"{what} holds a boolean that is neither 0 nor 1")
        return array


def _check_magic(cursor: _Cursor) -> None:
    first = bytes(cursor.data[:64])
    if first[:4] != b"GGUF":
        raise cursor.broken(f"not a GGUF file: {_describe(first)}")
    cursor.take(4, "the magic")
    start = cursor.take(4, "the version")
    version = int.from_bytes(cursor.data[start : start + 4], "little")
    swapped = int.from_bytes(cursor.data[start : start + 4], "big")
    if version & 0xFFFF == 0 and swapped & 0xFFFF:
        raise cursor.broken(
            f"a big-endian GGUF (version {swapped}); only little-endian files are supported: download or convert "
            "the little-endian one",
            "unsupported",
        )
    if version not in (2, 3):
        kind = "unsupported" if 0 < version < 100 else "format"
        raise cursor.broken(f"GGUF version {version}; supported: 2 and 3", kind)


def _describe(first: bytes) -> str:
    if not first:
        return "the file is empty (0 bytes)"
    shown = f"starts with {first[:16]!r}"
    text = first.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        return f"it is an HTML page saved under this name ({shown}): download the file itself"
    if first.startswith(b"version https://git-lfs"):
        return f"it is a Git LFS pointer ({shown}): fetch the file itself with `git lfs pull`"
    if first.startswith(b"PK\x03\x04"):
        return f"it is a ZIP or PyTorch archive ({shown}): convert it to GGUF first"
    if first.startswith(b"\x1f\x8b"):
        return f"it is a gzip archive ({shown}): unpack it first"
    if text.startswith(b'{"'):
        return f"it is the answer of a server, saved under this name ({first!r}): download the file itself"
    if first[8:10] == b'{"':
        return f"it looks like safetensors ({shown}): convert it to GGUF first"
    return shown


def _tensor_entry(cursor: _Cursor, index: int) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape outermost first, ggml type number, offset inside the data) of the next entry."""
    name = cursor.name(f"tensor {index}")
    what = f"the entry of tensor {name!r}"
    num_dims = cursor.scalar("<u4", what)
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.broken(f"tensor {name!r} has {num_dims} dimensions; wanted 1 to {MAX_DIMS}")
    dims = struct.unpack_from(f"<{num_dims}Q", cursor.data, cursor.take(8 * num_dims, what))
    if min(dims) < 1:
        raise cursor.broken(f"tensor {name!r} has an empty dimension: {list(dims)}")
    return name, dims[::-1], cursor.scalar("<u4", what), cursor.scalar("<u8", what)


def _place(
    cursor: _Cursor, entry: tuple[str, tuple[int, ...], int, int], data_start: int, alignment: int
) -> TensorInfo:
    name, shape, type_number, offset = entry
    try:
        ggml_type = GGMLQuantizationType(type_number)
        block_values, block_bytes = GGML_QUANT_SIZES[ggml_type]
    except (ValueError, KeyError) as error:
        raise cursor.broken(
            f"tensor {name!r} has the unknown type number {type_number}; a newer gguf package may know it",
            "unsupported",
        ) from error
    if shape[-1] % block_values:
        raise cursor.broken(
            f"tensor {name!r}: a row of {shape[-1]} values is not a whole number of {ggml_type.name} blocks "
            f"of {block_values}"
        )
    if offset % alignment:
        raise cursor.broken(f"tensor {name!r} starts at {offset}, not a multiple of the alignment {alignment}")
    nbytes = math.prod(shape) // block_values * block_bytes
    return TensorInfo(name, shape, ggml_type, data_start + offset, nbytes)


def _check_layout(cursor: _Cursor, tensors: tuple[TensorInfo, ...]) -> None:
    """Names are unique, every tensor lies inside the file, no two overlap."""
    names: set[str] = set()
    for tensor in tensors:
        if tensor.name in names:
            raise cursor.broken(f"tensor {tensor.name!r} appears twice")
        names.add(tensor.name)
    end, before = 0, ""
    for tensor in sorted(tensors, key=lambda each: each.offset):
        if tensor.offset < end:
            raise cursor.broken(f"tensors {before!r} and {tensor.name!r} overlap")
        end, before = tensor.offset + tensor.nbytes, tensor.name
    if end > cursor.size:
        raise cursor.broken(
            f"the tensor data is cut off: size needed {end} bytes, found {cursor.size} (first missing: "
            f"{next(t.name for t in tensors if t.offset + t.nbytes > cursor.size)!r}); download it again"
        )
