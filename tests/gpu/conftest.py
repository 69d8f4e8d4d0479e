"""Engines for the GPU tests, opened once a session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from engines.manifest import Manifest, load_manifest
from runtime.engine import Sampler
from runtime.engine_tensorrt import engine_limits, open_engines
from runtime.tensorrt_draft import TensorrtDraft
from runtime.tensorrt_trunk import GREEDY, TensorrtTrunk
from tests.gpu.prepare import MAX_ROWS, prepare


@dataclass(frozen=True)
class Opened:
    """A model's engines, and ways to drive them that show every row."""

    folder: Path
    manifest: Manifest
    trunk: TensorrtTrunk
    draft: TensorrtDraft

    @property
    def vocab_size(self) -> int:
        return self.manifest.geometry.vocab_size

    def prefill(self, tokens: np.ndarray, sampler: Sampler = GREEDY) -> np.ndarray:
        """Start afresh and take ``tokens`` in chunks. -> hidden rows [T, D]"""
        self.trunk.start(sampler)
        step = self.trunk.prefill_chunk
        parts = [self.host(self.trunk.prefill(tokens[i : i + step]).hidden) for i in range(0, len(tokens), step)]
        return np.concatenate(parts) if parts else np.zeros((0, self.manifest.geometry.hidden_size), np.float32)

    def append(self, tokens: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Take ``tokens`` in committed verify passes of up to ``rows``. -> logits [T, V], hidden [T, D]"""
        logits, hidden = [], []
        for i in range(0, len(tokens), rows):
            part = tokens[i : i + rows]
            hidden.append(self.host(self.trunk.verify(part).hidden))
            logits.append(self.trunk.logits)
            self.trunk.commit(len(part))
        return np.concatenate(logits), np.concatenate(hidden)

    def host(self, hidden) -> np.ndarray:  # type: ignore[no-untyped-def]
        return hidden.read(self.trunk._shared.stream)  # the stream is the engines' own affair but for tests


def open_folder(folder: Path) -> Opened:
    manifest = load_manifest(folder)
    trunk, draft = open_engines(folder, manifest, context_size=int(engine_limits(folder).context), max_rows=MAX_ROWS)
    assert draft is not None
    return Opened(folder, manifest, trunk, draft)


@pytest.fixture(scope="session")
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = request.config.getoption("--prepared")
    return Path(given) if given else prepare(tmp_path_factory.mktemp("prepared"))


@pytest.fixture(scope="session")
def opened(prepared: Path) -> Callable[[str], Opened]:
    """``opened(name)``: the engines of one of `prepare.MODELS`."""

    return cache(lambda name: open_folder(prepared / name))
