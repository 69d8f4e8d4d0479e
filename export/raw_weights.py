"""Weights as the plugins read them: the GGUF's own blocks, left where they are, and float32 vectors inside the graph.

The exported folder gets the .gguf itself, as a hard link where the file system allows one and as a copy elsewhere;
external data then points into it. Only matrices of types without a kernel are written anew, as float32.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from onnx import TensorProto

from engines.errors import ModelFileError, ResourceError
from engines.sizes import size_text
from export.blocks import BLOCK_FORMS
from export.gguf_file import GGUFFile, GGUFTensor
from export.graph import Weight
from export.tensor_types import check_finite, needs_dequantized_copy
from export.weights import FLOAT_TYPES, Matrix, WeightStore
from plugins.ops import BLOCKS

_F32 = 0


@dataclass(frozen=True)
class RawMatrix:
    """A stored matrix: its GGML type and its bytes as int8 [rows, columns / block, block bytes]."""

    ggml_type: int
    rows: int
    columns: int
    weight: Weight


class RawWeightStore(WeightStore):
    """Stands in for `WeightStore` while the canonical graph is made that `lower` starts from.

    The graph then names weights that exist nowhere; ``raw`` (by any of a matrix's part names) and ``vectors`` (by
    name) hold what to put in their place.
    """

    def __init__(self, path: Path, file: GGUFFile, progress: Callable[[int], None] = lambda values: None) -> None:
        """``path``: the file for matrices that are written anew; left out when there are none."""
        super().__init__(path, progress)
        self.raw: dict[str, RawMatrix] = {}
        self.vectors: dict[str, np.ndarray] = {}
        self.used: set[Path] = set()  # files that external data points into, as the tensors name them
        self._shards = {shard: block_file_name(index, len(file.paths)) for index, shard in enumerate(file.paths)}

    def vector(self, tensor: GGUFTensor, shape: tuple[int, ...]) -> Weight:
        if tensor.name not in self.vectors:
            check_finite(tensor)
            self.vectors[tensor.name] = tensor.f32().reshape(shape)
            self._progress(int(np.prod(shape)))
        assert self.vectors[tensor.name].shape == shape, tensor.name
        return Weight(tensor.name, TensorProto.FLOAT, shape, "vectors", 0, self.vectors[tensor.name].nbytes)

    def matrix(self, tensor: GGUFTensor) -> Matrix:
        if tensor.name not in self._matrices:
            self._check(tensor)
            rows, columns = tensor.shape
            if needs_dequantized_copy(tensor):
                matrix = self._store_floats(tensor)
                ggml_type, weight = _F32, matrix.parts[0]
                matrix = replace(matrix, parts=(replace(weight, name=_values_name(tensor)),))
                location, offset, nbytes = weight.location, weight.offset, weight.nbytes
            else:
                matrix = _canonical(tensor)
                ggml_type = int(tensor.ggml_type)
                # What is no shard has been written into the folder already.
                location = self._shards.get(tensor.path, tensor.path.name)
                offset, nbytes = tensor.offset, tensor.nbytes
                self.used.add(tensor.path)
                self._progress(rows * columns)
            if columns % 4:
                raise ModelFileError(
                    "unsupported",
                    f"{tensor.path}: tensor {tensor.name!r} has rows of {columns} values; the TensorRT plugins take "
                    "multiples of 4; use --target onnxruntime",
                )
            values, block_bytes = BLOCKS[ggml_type]
            shape = (rows, columns // values, block_bytes)
            raw = RawMatrix(
                ggml_type, rows, columns, Weight(tensor.name, TensorProto.INT8, shape, location, offset, nbytes)
            )
            self._matrices[tensor.name] = matrix
            self.raw.update({part.name: raw for part in matrix.parts})
        return self._matrices[tensor.name]

    def _check(self, tensor: GGUFTensor) -> None:
        check_finite(tensor)

    @property
    def bytes_written(self) -> int:
        """Size of the file at ``path``; 0 when it is not needed."""
        return self._end


def block_file_name(index: int, count: int) -> str:
    """Name in an exported folder of a GGUF's shard."""
    return "model.gguf" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.gguf"


def place_gguf(file: GGUFFile, folder: Path) -> list[str]:
    """Put the shards into ``folder``, as links or copies; their names. Raises ResourceError (disk)."""
    names = [block_file_name(index, len(file.paths)) for index in range(len(file.paths))]
    for shard, name in zip(file.paths, names, strict=True):
        source, target = os.path.realpath(shard), folder / name
        try:
            os.link(source, target)
            continue
        except OSError:  # another file system, or one without links, or not our file: a copy serves as well
            pass
        needed, free = os.path.getsize(source), shutil.disk_usage(folder).free
        if needed > free:
            raise ResourceError(
                f"{shard}: no hard link into {folder.parent} possible, and a copy needs {size_text(needed, free)}, "
                f"{size_text(free, needed)} are free; free space or choose an -o on the model's own disk"
            )
        shutil.copyfile(source, target)
    return names


def _canonical(tensor: GGUFTensor) -> Matrix:
    """The parts that `WeightStore.matrix` would make, with nothing behind them."""
    rows, columns = tensor.shape
    form = BLOCK_FORMS.get(tensor.ggml_type)
    if form is None:
        data_type, _ = FLOAT_TYPES[tensor.ggml_type]
        return Matrix(rows, columns, None, (Weight(_values_name(tensor), data_type, (rows, columns), "raw", 0, 0),))
    per_row = columns // form.block_size
    parts = [Weight(f"{tensor.name}.quants", TensorProto.UINT8, (rows, per_row, form.block_bytes), "raw", 0, 0)]
    for suffix in ("scales", "offsets") if form.has_offset else ("scales",):
        parts.append(Weight(f"{tensor.name}.{suffix}", TensorProto.FLOAT, (rows, per_row), "raw", 0, 0))
    return Matrix(rows, columns, form, tuple(parts))


def _values_name(tensor: GGUFTensor) -> str:
    """Of the canonical stand-in of a float matrix: not the tensor's name, which the raw bytes get."""
    return f"{tensor.name}.values"
