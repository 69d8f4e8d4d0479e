"""The fuzzer's own view of a header: taken apart and put together it is the same, and every change can be written."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.errors import ModelFileError, UsageError
from export.config import load_config
from export.gguf_file import GGUFFile
from tests.fuzz.header import mutate, parse

Tiny = Callable[[str], Path]


@pytest.mark.parametrize("name", ["f32", "mixed_types", "yarn_keys", "split_first", "mmproj"])
def test_there_and_back(tiny: Tiny, name: str) -> None:
    content = tiny(name).read_bytes()
    found = parse(content)
    assert found is not None
    parts, end = found
    assert parts.packed() == content[:end]
    offsets = [tensor.offset for tensor in parts.tensors]
    parts.lay_out()
    assert [tensor.offset for tensor in parts.tensors] == offsets


@pytest.mark.parametrize("content", [b"", b"GGUF", b"<html>" * 9])
def test_what_is_no_header(content: bytes) -> None:
    assert parse(content) is None


def test_changed_headers_get_far(tiny: Tiny, tmp_path: Path) -> None:
    """A good part gets past the checks of the container, else a search would not get to those of the model."""
    content, path = tiny("q4_k_m").read_bytes(), tmp_path / "changed.gguf"
    outcomes = {"container": 0, "model": 0, "sound": 0}
    for seed in range(300):
        parts, _ = parse(content) or pytest.fail()
        mutate(parts, random.Random(seed))
        header = parts.packed()
        if parts.data_nbytes() > 1 << 24:
            continue
        path.write_bytes(header + bytes(-len(header) % parts.alignment() + max(0, parts.data_nbytes())))
        stage = "container"
        try:
            file = GGUFFile.open(path)
            stage = "model"
            load_config(file)
            stage = "sound"
        except (ModelFileError, UsageError) as error:
            assert "\n" not in str(error)
        outcomes[stage] += 1
    assert min(outcomes.values()) >= 20, outcomes
