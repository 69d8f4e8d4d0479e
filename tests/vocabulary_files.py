"""GGUF files reduced to their tokenizer keys, as opened objects: no tensors, nothing on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from export.gguf_file import GGUFFile
from export.tokenizer import write_tokenizer
from runtime.tokenizer import Tokenizer
from tests.tiny_vocab import vocabulary_metadata

TRAINED_MODEL = Path(__file__).parent / "model" / "tiny-qwen35-mtp-Q4_K_M.gguf"


def vocabulary_file(**changes: Any) -> GGUFFile:
    """The small vocabulary with keys changed, "__" for "."; None leaves a key out."""
    metadata = vocabulary_metadata(320) | {key.replace("__", "."): value for key, value in changes.items()}
    return GGUFFile((Path("small.gguf"),), {k: _parsed(v) for k, v in metadata.items() if v is not None}, {}, (0,))


def exported(file: GGUFFile, folder: Path) -> Tokenizer:
    """The runtime's tokenizer of ``file``, by way of ``folder``."""
    return Tokenizer(folder, write_tokenizer(file, folder))


def _parsed(value: Any) -> Any:
    """As the GGUF parser gives it: lists of numbers are arrays."""
    return np.array(value, np.int32) if isinstance(value, list) and value and isinstance(value[0], int) else value
