"""The external weights file: every tensor of the model once, in the form the graphs use, written as a stream."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import numpy as np
from gguf.constants import GGMLQuantizationType as GGMLType
from onnx import TensorProto

from engines.errors import ResourceError
from export.blocks import BLOCK_FORMS, BlockForm, to_block_form
from export.gguf_file import GGUFTensor
from export.graph import Weight
from export.tensor_types import check_finite, needs_dequantized_copy

ALIGNMENT = 4096
_CHUNK_VALUES = 4 << 20
FLOAT_TYPES = {
    GGMLType.F32: (TensorProto.FLOAT, 4),
    GGMLType.F16: (TensorProto.FLOAT16, 2),
    GGMLType.BF16: (TensorProto.BFLOAT16, 2),
}


_Store = TypeVar("_Store", bound="WeightStore")


@dataclass(frozen=True)
class Matrix:
    """A stored matrix [rows, columns]. Block form: parts = quants, scales[, offsets]; float: parts = the values."""

    rows: int
    columns: int
    form: BlockForm | None
    parts: tuple[Weight, ...]


class WeightStore:
    """Writes tensors into one file and remembers where. Use as a context manager; leaving it syncs the file."""

    def __init__(self, path: Path, progress: Callable[[int], None] = lambda values: None) -> None:
        """``progress`` is told the number of values written, piece by piece."""
        self.path = path
        self.notes: list[str] = []
        self._progress = progress
        self._end = 0
        self._matrices: dict[str, Matrix] = {}
        self._vectors: dict[tuple[str, tuple[int, ...]], Weight] = {}

    def __enter__(self: _Store) -> _Store:
        self._file = open(self.path, "wb")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is None:
                self._file.truncate(self._end)
                self._file.flush()
                os.fsync(self._file.fileno())

    def vector(self, tensor: GGUFTensor, shape: tuple[int, ...]) -> Weight:
        """A small tensor (norm, bias, conv kernel) as float32 of the given shape."""
        key = (tensor.name, shape)
        if key not in self._vectors:
            check_finite(tensor)
            values = tensor.f32().reshape(shape)
            weight = self._reserve(tensor.name, TensorProto.FLOAT, shape, values.nbytes)
            self._write(weight.offset, values)
            self._progress(values.size)
            self._vectors[key] = weight
        return self._vectors[key]

    def matrix(self, tensor: GGUFTensor) -> Matrix:
        """A matrix: K-quants and Q8_0 in block form, F32, F16 and BF16 as they are, other types dequantised."""
        if tensor.name not in self._matrices:
            check_finite(tensor)
            form = BLOCK_FORMS.get(tensor.ggml_type)
            stored = self._store_floats(tensor) if form is None else self._store_blocks(tensor, form)
            self._matrices[tensor.name] = stored
        return self._matrices[tensor.name]

    def _store_floats(self, tensor: GGUFTensor) -> Matrix:
        rows, columns = tensor.shape
        copied = needs_dequantized_copy(tensor)
        if copied:
            self.notes.append(f"{tensor.name}: type {tensor.ggml_type.name} has no native form, stored as float32")
        data_type, size = FLOAT_TYPES[GGMLType.F32 if copied else tensor.ggml_type]
        weight = self._reserve(tensor.name, data_type, tensor.shape, rows * columns * size)
        blocks = None if copied else tensor.blocks()
        for start, stop in _pieces(rows, columns):
            piece = tensor.rows_f32(start, stop) if blocks is None else np.asarray(blocks[start:stop])
            self._write(weight.offset + start * columns * size, piece)
            self._progress((stop - start) * columns)
        return Matrix(rows, columns, None, (weight,))

    def _store_blocks(self, tensor: GGUFTensor, form: BlockForm) -> Matrix:
        rows, columns = tensor.shape
        per_row = columns // form.block_size
        parts = [
            self._reserve(
                f"{tensor.name}.quants",
                TensorProto.UINT8,
                (rows, per_row, form.block_bytes),
                rows * per_row * form.block_bytes,
            )
        ]
        for suffix in ("scales", "offsets") if form.has_offset else ("scales",):
            name = f"{tensor.name}.{suffix}"
            parts.append(self._reserve(name, TensorProto.FLOAT, (rows, per_row), rows * per_row * 4))
        blocks = tensor.blocks()
        for start, stop in _pieces(rows, columns):
            arrays = to_block_form(np.asarray(blocks[start:stop]), tensor.ggml_type)
            for part, array in zip(parts, arrays, strict=False):
                assert array is not None
                self._write(part.offset + start * (part.nbytes // rows), array)
            self._progress((stop - start) * columns)
        return Matrix(rows, columns, form, tuple(parts))

    def _reserve(self, name: str, data_type: int, shape: tuple[int, ...], nbytes: int) -> Weight:
        offset = -(-self._end // ALIGNMENT) * ALIGNMENT
        self._end = offset + nbytes
        return Weight(name, data_type, shape, self.path.name.removesuffix(".part"), offset, nbytes)

    def _write(self, offset: int, array: np.ndarray) -> None:
        try:
            self._file.seek(offset)
            self._file.write(np.ascontiguousarray(array).data.cast("B"))
        except OSError as error:
            reason = f"cannot write weights ({error.strerror})"
            raise ResourceError(f"{self.path}: {reason}; free space or choose another folder") from error


def _pieces(rows: int, columns: int) -> list[tuple[int, int]]:
    step = max(1, _CHUNK_VALUES // columns)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]
