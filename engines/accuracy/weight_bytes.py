"""The weights that engines read, byte for byte against those of the model: no numbers of a pass show them all.

A text uses few rows of the embedding, and one step of one scale is less than what kernels round. So what a fresh export
of the model has is remembered as a digest per row and, for the place inside a row, the exclusive-or of all rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from onnx import TensorProto, numpy_helper

from engines.accuracy.plan import roles_of
from engines.errors import EngineError
from engines.given_files import reason
from engines.manifest import Manifest
from engines.network import load_graph
from export.weight_inputs import external_weights

FILE_NAME = "weights.npz"
_SUPERBLOCK = 100  # bytes a block from which on it is one of 256 values


@dataclass(frozen=True)
class Damage:
    """The first row of a tensor that is not the model's; bytes: where in the row, as far as that can be told (one row
    is off); rows: how many are."""

    tensor: str
    rows: int
    row: int
    bytes: tuple[int, ...]
    block_bytes: int

    def __str__(self) -> str:
        if self.rows != 1 or not self.bytes:
            return f"{self.tensor}, row {self.row} and {self.rows - 1} more" if self.rows > 1 else self._row
        first = self.bytes[0]
        more = f" and {len(self.bytes) - 1} more" if len(self.bytes) > 1 else ""
        if self.block_bytes <= 1:
            return f"{self._row}, byte {first}{more}"
        kind = "superblock" if self.block_bytes > _SUPERBLOCK else "block"
        return f"{self._row}, {kind} {first // self.block_bytes}, byte {first % self.block_bytes}{more}"

    @property
    def _row(self) -> str:
        return f"{self.tensor}, row {self.row}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def remember(export: Path, manifest: Manifest, path: Path) -> None:
    """Write what a sound export for TensorRT has. Raises EngineError."""
    arrays: dict[str, Any] = {}
    for name, rows, _ in _tensors(export, manifest):
        arrays[f"rows/{name}"], arrays[f"parity/{name}"] = _row_digests(rows), _parity(rows)
    np.savez(path, **arrays)


def damages(export: Path, manifest: Manifest, path: Path) -> tuple[list[Damage], int]:
    """What is not as `remember` has seen it, in the order of the graphs, and how many tensors were looked at.

    Raises EngineError."""
    found, count = [], 0
    try:
        with np.load(path) as known:
            for name, rows, block_bytes in _tensors(export, manifest):
                count += 1
                if f"rows/{name}" not in known:
                    raise EngineError(f"{export}: has a tensor {name!r}, which an export of the model has not")
                damage = _compared(name, rows, block_bytes, known[f"rows/{name}"], known[f"parity/{name}"])
                found += [damage] if damage else []
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise EngineError(f"{path}: cannot be read ({reason(error)}); prepare the folder again") from error
    return found, count


def _compared(name: str, rows: np.ndarray, block_bytes: int, digests: np.ndarray, parity: np.ndarray) -> Damage | None:
    if len(digests) != len(rows) or parity.shape != rows.shape[1:]:
        return Damage(name, len(rows), 0, (), block_bytes)
    off = np.flatnonzero(_row_digests(rows) != digests)
    if not len(off):
        return None
    places = np.flatnonzero(_parity(rows) != parity).tolist() if len(off) == 1 else []
    return Damage(name, len(off), int(off[0]), tuple(places), block_bytes)


def _row_digests(rows: np.ndarray) -> np.ndarray:
    digests = b"".join(blake2b(row, digest_size=8).digest() for row in rows)
    return np.frombuffer(digests, np.uint64)


def _parity(rows: np.ndarray) -> np.ndarray:
    return np.asarray(np.bitwise_xor.reduce(rows, axis=0))


def _tensors(export: Path, manifest: Manifest) -> Iterator[tuple[str, np.ndarray, int]]:
    """(name, rows of bytes [N, bytes], bytes of a block) of every weight and constant of the graphs, once."""
    seen = set()
    for role in roles_of(manifest):
        model = load_graph(manifest.file(export, role))
        outside = {each.name for each in external_weights(model)}
        for tensor in model.graph.initializer:
            if tensor.name in seen:
                continue
            seen.add(tensor.name)
            rows = _outside(tensor, export) if tensor.name in outside else numpy_helper.to_array(tensor)
            flat = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows) if rows.ndim > 1 else 1, -1)
            yield tensor.name, flat, tensor.dims[-1] if tensor.name in outside else 1


def _outside(tensor: TensorProto, export: Path) -> np.ndarray:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    path = export / entries["location"]
    try:
        raw = np.memmap(path, np.uint8, "r", int(entries["offset"]), (int(entries["length"]),))
    except (OSError, ValueError) as error:
        raise EngineError(f"{path}: {tensor.name} cannot be read ({error})") from error
    return raw.reshape(tensor.dims[0], -1)
