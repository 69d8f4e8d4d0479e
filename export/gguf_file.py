"""Open a GGUF file or a split set: typed metadata, tensors as memory-mapped blocks. Knows no model.

Values come from our own bounds-checked parser (`gguf_header`), because `gguf.GGUFReader` trusts every length it
reads; types, block sizes and dequantisers are the gguf package's.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast, get_args, get_origin

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from engines.errors import ModelFileError, ResourceError, UsageError
from export.gguf_header import Header, parse_header

# A piece of this many values is dequantised at a time: temporaries stay near 100 MiB.
_CHUNK_VALUES = 4 << 20
_HASH_WHOLE_BYTES = 64 << 20
_SAMPLE_BYTES = 4096
_SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)

T = TypeVar("T")
_REQUIRED: Any = object()


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor on disk. ``shape`` is row-major, outermost first; ``offset`` is in bytes from the file's start."""

    name: str
    shape: tuple[int, ...]
    ggml_type: GGMLQuantizationType
    path: Path
    offset: int
    nbytes: int

    @property
    def num_rows(self) -> int:
        return int(np.prod(self.shape[:-1], dtype=np.int64))

    def blocks(self) -> np.ndarray:
        """The raw bytes, memory-mapped read-only: [rows, row_bytes] u8, rows = product of all but the last dim."""
        try:
            return np.memmap(self.path, np.uint8, "r", self.offset, (self.num_rows, self.nbytes // self.num_rows))
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno == errno.ENOMEM:
                raise _no_room(self.path, error) from error
            raise ModelFileError(
                "format", f"{self.path}: tensor {self.name!r} cannot be read any more ({error}); did the file change?"
            ) from error

    def rows_f32(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) dequantised: [stop - start, row length] f32, 0 <= start <= stop <= rows.

        Raises ModelFileError (unsupported) for a type the gguf package cannot dequantise.
        """
        assert 0 <= start <= stop <= self.num_rows, (start, stop, self.num_rows)
        out = np.empty((stop - start, self.shape[-1]), np.float32)
        step = max(1, _CHUNK_VALUES // self.shape[-1])
        blocks = self.blocks()
        for at in range(start, stop, step):
            piece = np.asarray(blocks[at : min(at + step, stop)])
            try:
                # An infinite scale times zero is for `check_finite` to report, not for a warning.
                with np.errstate(all="ignore"):
                    out[at - start : at - start + len(piece)] = dequantize(piece, self.ggml_type)
            except NotImplementedError as error:
                raise ModelFileError(
                    "unsupported",
                    f"{self.path}: tensor {self.name!r} has type {self.ggml_type.name}, which has no dequantiser",
                ) from error
        return out

    def f32(self) -> np.ndarray:
        """The whole tensor dequantised, f32, in ``shape``."""
        return self.rows_f32(0, self.num_rows).reshape(self.shape)


@dataclass(frozen=True)
class GGUFFile:
    """An opened GGUF. ``paths`` are its shards in order (one for an ordinary file), ``path`` the first."""

    paths: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    _data_starts: tuple[int, ...] = field(repr=False)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GGUFFile:
        """Open ``path``; for the first shard of a split set, join the others lying beside it.

        Raises UsageError for a path that is no readable file, ModelFileError for what is wrong inside it.
        """
        first = Path(path)
        header = _read_header(first)
        count = _split_value(first, header, "split.count", 1)
        if count <= 1:
            return cls._join((first,), (header,))
        paths = _shard_paths(first, count, _split_value(first, header, "split.no", 0))
        headers = (header, *(_read_header(shard) for shard in paths[1:]))
        for number, (shard, each) in enumerate(zip(paths, headers, strict=True)):
            got = (_split_value(shard, each, "split.no", -1), _split_value(shard, each, "split.count", -1))
            if got != (number, count):
                raise ModelFileError(
                    "content",
                    f"{shard}: named as part {number + 1} of a split model of {count} parts, but its metadata "
                    f"says split.no {got[0]}, split.count {got[1]}: the parts do not belong together",
                )
        joined = cls._join(paths, headers)
        promised = _split_value(first, header, "split.tensors.count", len(joined.tensors))
        if promised != len(joined.tensors):
            raise ModelFileError(
                "content",
                f"{first}: split model of {count} parts promises {promised} tensors, its parts hold "
                f"{len(joined.tensors)}",
            )
        return joined

    @classmethod
    def _join(cls, paths: tuple[Path, ...], headers: tuple[Header, ...]) -> GGUFFile:
        tensors: dict[str, GGUFTensor] = {}
        for path, header in zip(paths, headers, strict=True):
            for info in header.tensors:
                if info.name in tensors:
                    raise ModelFileError("content", f"{path}: tensor {info.name!r} is also in another part")
                tensors[info.name] = GGUFTensor(info.name, info.shape, info.ggml_type, path, info.offset, info.nbytes)
        return cls(paths, headers[0].metadata, tensors, tuple(header.data_start for header in headers))

    @property
    def path(self) -> Path:
        return self.paths[0]

    def get(self, key: str, kind: type[T], default: T = _REQUIRED) -> T:
        """Metadata value of ``key`` as ``kind``: bool, int, float, str, list[int], list[float], list[str].

        An integer is taken for a float, nothing else is converted. Without ``default`` the key must exist.
        Raises ModelFileError (content) naming key, got and wanted.
        """
        if key not in self.metadata:
            if default is _REQUIRED:
                raise ModelFileError("content", f"{self.path}: metadata key {key!r} is missing")
            return default
        value = self.metadata[key]
        converted = _convert(value, kind)
        if converted is None:
            wanted = str(kind) if get_origin(kind) else kind.__name__
            raise ModelFileError(
                "content", f"{self.path}: metadata key {key!r} is {_show(value)}; wanted a value of kind {wanted}"
            )
        return cast(T, converted)

    def content_key(self) -> str:
        """Hex digest that names the content, for a cache; independent of path and modification time.

        Covers every byte of each shard's header (metadata, tensor table) and its size. Data: all of it up to
        64 MiB, beyond that the first, middle and last 4 KiB of every tensor. So another quantisation, fine-tune
        or template gives another key, and so does an edit of a small file; a few bytes changed in the middle of
        one large tensor do not.
        """
        digest = hashlib.blake2b(digest_size=20)
        for path, data_start in zip(self.paths, self._data_starts, strict=True):
            with _opened(path) as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(size.to_bytes(8, "little"))
                if size <= _HASH_WHOLE_BYTES:
                    digest.update(file.read())
                    continue
                digest.update(file.read(data_start))
                for tensor in self.tensors.values():
                    if tensor.path == path:
                        for start in _sample_starts(tensor):
                            file.seek(start)
                            digest.update(file.read(min(_SAMPLE_BYTES, tensor.offset + tensor.nbytes - start)))
        return digest.hexdigest()


def _sample_starts(tensor: GGUFTensor) -> tuple[int, int, int]:
    last = tensor.offset + max(0, tensor.nbytes - _SAMPLE_BYTES)
    return tensor.offset, (tensor.offset + last) // 2, last


def _open_at_once(name: str, flags: int) -> int:
    """Open without waiting: a pipe would block until someone writes to it."""
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))


def _opened(path: Path) -> BinaryIO:
    """Open a regular, non-empty file. Raises UsageError, or ModelFileError for an empty file."""
    try:
        file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115 (the caller closes it)
        status = os.fstat(file.fileno())
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such file") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path}: cannot be read ({reason}); give the path of a readable .gguf file") from error
    if stat.S_ISREG(status.st_mode) and status.st_size:
        return file
    file.close()
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{path}: is not a file; give the path of a .gguf file")
    raise ModelFileError("format", f"{path}: not a GGUF file: the file is empty (0 bytes)")


def _read_header(path: Path) -> Header:
    with _opened(path) as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise _no_room(path, error) from error
        with data:
            return parse_header(path, data)


def _no_room(path: Path, error: OSError) -> ResourceError:
    return ResourceError(f"{path}: cannot be mapped into memory ({error.strerror}); raise the limit (ulimit -v)")


def _split_value(path: Path, header: Header, key: str, default: int) -> int:
    value = header.metadata.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelFileError("content", f"{path}: metadata key {key!r} is {_show(value)}; wanted a value of kind int")
    return value


def _shard_paths(first: Path, count: int, number: int) -> tuple[Path, ...]:
    """All shards of the set whose first is ``first``; refuses a later shard, a foreign name, a missing part."""
    described = f"{first}: part {number + 1} of a split model of {count} parts"
    match = _SHARD_NAME.fullmatch(first.name)
    if number != 0:
        hint = f"{match['stem']}-00001-of-{count:05d}.gguf" if match else f"...-00001-of-{count:05d}.gguf"
        raise ModelFileError("unsupported", f"{described}; give the first part, {hint}, as the model")
    if match is None or (int(match["number"]), int(match["count"])) != (1, count):
        raise ModelFileError(
            "unsupported",
            f"{described}, under a name that does not say where the others are; name them "
            f"NAME-00001-of-{count:05d}.gguf and so on, all in one folder",
        )
    paths = tuple(first.with_name(f"{match['stem']}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count))
    missing = [shard.name for shard in paths if not shard.exists()]
    if missing:
        raise ModelFileError(
            "unsupported",
            f"{described}, and {len(missing)} of them are missing beside it (first: {missing[0]}); put all "
            f"{count} parts in one folder",
        )
    return paths


def _convert(value: Any, kind: Any) -> Any:
    """``value`` as ``kind``, or None when it is of another kind."""
    if get_origin(kind) is list:
        (item,) = get_args(kind)
        if item is str:
            return list(value) if isinstance(value, list) else None
        if not isinstance(value, np.ndarray):
            return None
        if item is bool or value.dtype == np.bool_:
            return value.tolist() if item is bool and value.dtype == np.bool_ else None
        if item is float or value.dtype.kind in "iu":
            return [item(number) for number in value.tolist()]
        return None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value if type(value) is kind else None


def _show(value: Any) -> str:
    if isinstance(value, (list, np.ndarray)):
        return f"a list of {len(value)} {'str' if isinstance(value, list) else value.dtype} values"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
