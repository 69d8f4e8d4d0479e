"""The plain tiny model with one thing changed, loaded or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.errors import ModelFileError
from export.config import ModelConfig, load_config
from export.gguf_file import GGUFFile
from tests.tiny_gguf import Spec, TinyModel, build

Tiny = Callable[[str], Path]
SPEC = Spec()
DRAFT = f"blk.{SPEC.layers}."


def load_edited(model: TinyModel, folder: Path, draft: bool = True) -> ModelConfig:
    """Write ``model`` into ``folder`` and load its configuration."""
    return load_config(GGUFFile.open(model.write(folder / "edited.gguf")), draft)


def edited(drop: tuple[str, ...] = (), **keys: Any) -> TinyModel:
    """The plain model with keys ``qwen35.*`` (written with __ for .) set, and tensors or keys dropped."""
    model = build(SPEC)
    model.metadata |= {f"qwen35.{name.replace('__', '.')}": value for name, value in keys.items()}
    for name in drop:
        (model.tensors if name in model.tensors else model.metadata).pop(name)
    return model


def refused(load: Callable[[], object], kind: str, *words: str) -> str:
    with pytest.raises(ModelFileError) as caught:
        load()
    message = str(caught.value)
    assert caught.value.kind == kind, message
    assert ".gguf: " in message and "\n" not in message
    for word in words:
        assert word in message
    return message
