"""Which GGML types are taken as they are, which through a dequantised copy, and which not at all."""

from __future__ import annotations

from functools import cache

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from engines.errors import ModelFileError
from export.gguf_file import GGUFTensor

_Type = GGMLQuantizationType

# Types whose values or blocks go into the ONNX file without a float32 detour.
NATIVE_TYPES = frozenset({_Type.F32, _Type.F16, _Type.BF16, _Type.Q8_0, _Type.Q4_K, _Type.Q5_K, _Type.Q6_K})

# Where the float16 scales of a block lie, in bytes. All other fields are small integers, so a block's values are
# finite exactly when these are. Source: ggml-common.h.
_SCALE_BYTES = {
    _Type.Q8_0: slice(0, 2),
    _Type.Q4_K: slice(0, 4),
    _Type.Q5_K: slice(0, 4),
    _Type.Q6_K: slice(208, 210),
}
_CHUNK_BYTES = 16 << 20


@cache
def can_dequantize(ggml_type: GGMLQuantizationType) -> bool:
    """Whether the gguf package can turn this type into float32."""
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[ggml_type][1]), np.uint8), ggml_type)
    except NotImplementedError:
        return False
    return True


def needs_dequantized_copy(tensor: GGUFTensor) -> bool:
    """Whether the tensor's type is not native. Raises ModelFileError (unsupported) when it cannot be read at all."""
    if tensor.ggml_type in NATIVE_TYPES:
        return False
    if not can_dequantize(tensor.ggml_type):
        native = " ".join(sorted(each.name for each in NATIVE_TYPES))
        raise ModelFileError(
            "unsupported",
            f"{tensor.path}: tensor {tensor.name!r} has type {tensor.ggml_type.name}, which has no dequantiser; "
            f"supported: {native} and every type the gguf package dequantises",
        )
    return True


def check_finite(tensor: GGUFTensor) -> None:
    """Raise ModelFileError (content), naming tensor and row, when a value is NaN or infinite.

    Streams; of the native block types only the scales are looked at, which decides it (see `_SCALE_BYTES`).
    """
    blocks = tensor.blocks()
    step = max(1, _CHUNK_BYTES // blocks.shape[1])
    for start in range(0, tensor.num_rows, step):
        stop = min(start + step, tensor.num_rows)
        if tensor.ggml_type in _SCALE_BYTES:
            block_bytes = GGML_QUANT_SIZES[tensor.ggml_type][1]
            rows = blocks[start:stop].reshape(stop - start, -1, block_bytes)[:, :, _SCALE_BYTES[tensor.ggml_type]]
            values = np.ascontiguousarray(rows).view(np.float16).reshape(stop - start, -1)
        else:
            values = tensor.rows_f32(start, stop)
        finite = np.isfinite(values)
        if not finite.all():
            row, column = (int(each) for each in np.argwhere(~finite)[0])
            what = "a block scale" if tensor.ggml_type in _SCALE_BYTES else "a value"
            raise ModelFileError(
                "content",
                f"{tensor.path}: tensor {tensor.name!r} holds {values[row, column]} as {what} in row {start + row}; "
                "the file is damaged or was converted from a broken checkpoint",
            )
