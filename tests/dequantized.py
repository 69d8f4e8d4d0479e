"""A copy of a GGUF with the same values as float32: for peers that round activations where weights are quantised."""

from __future__ import annotations

import logging
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize


def write_dequantized(source: Path, target: Path) -> Path:
    """Write ``target`` and return it. Metadata is kept."""
    reader = gguf.GGUFReader(source)
    logger = logging.getLogger("gguf.gguf_writer")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        writer = gguf.GGUFWriter(target, "qwen35")
        for key, field in reader.fields.items():
            if not key.startswith("GGUF.") and key != "general.architecture":
                item_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(key, field.contents(), field.types[0], item_type)
        for tensor in reader.tensors:
            shape = [int(size) for size in reversed(tensor.shape)]
            values = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
            writer.add_tensor(tensor.name, np.ascontiguousarray(values, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    finally:
        logger.disabled = was_disabled
    return target
