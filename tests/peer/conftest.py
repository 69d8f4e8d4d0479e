"""Fixtures of the tests that run llama.cpp. It is imported inside them: collecting must work without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.dequantized import write_dequantized
from tests.vocabulary_files import TRAINED_MODEL

if TYPE_CHECKING:
    from tests.peer.llamacpp import LlamaCpp

MAX_DRAFTS = 5


@pytest.fixture(scope="session")
def dequantized(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``dequantized(name)``: the named model ("trained": the trained one) with its values as float32."""
    folder = tmp_path_factory.mktemp("dequantized")

    @cache
    def path_of(name: str) -> Path:
        return write_dequantized(TRAINED_MODEL if name == "trained" else tiny(name), folder / f"{name}.gguf")

    return path_of


@pytest.fixture(scope="module")
def peer(dequantized: Callable[[str], Path]) -> Iterator[Callable[[str], LlamaCpp]]:
    """``peer(name)``: llama.cpp with the dequantised named model."""
    opened: list[LlamaCpp] = []

    @cache
    def open_peer(name: str) -> LlamaCpp:
        from tests.peer.llamacpp import LlamaCpp

        opened.append(LlamaCpp(dequantized(name), max_drafts=MAX_DRAFTS))
        return opened[-1]

    yield open_peer
    for model in opened:
        model.close()
