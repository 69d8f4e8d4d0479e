"""Sampled tokens follow the model's distribution, with drafting as without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engines.manifest import load_manifest
from export.exporter import export_model
from runtime.controller import FixedDraft
from runtime.engine_onnxruntime import OnnxDraftEngine, OnnxTrunkEngine, open_engines
from runtime.sampling import SamplingParams
from runtime.session import make_sampler
from runtime.speculative import SpecStats, generate
from tests import tiny_vocab
from tests.known_text import bigram_logits, bigram_model

Engines = tuple[OnnxTrunkEngine, OnnxDraftEngine | None]
TOKEN = 40
ROWS = 8
DRAWS = 20_000
_Z_999 = 3.0902  # of the normal distribution; p = 0.001 one-sided


def _chi_square_limit(degrees: int) -> float:
    """The value that chi-square exceeds with probability 0.001. Source: Wilson and Hilferty, 1931."""
    share = 2 / (9 * degrees)
    return float(degrees * (1 - share + _Z_999 * np.sqrt(share)) ** 3)


@pytest.fixture(scope="module")
def engines(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Engines:
    folder = tmp_path_factory.mktemp("bigram") / "model"
    export_model(tiny("bigram_for_sampling"), folder)
    return open_engines(folder, load_manifest(folder), context_size=4096, threads=1, max_rows=ROWS)


def _softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    weights = np.exp((logits - logits.max()) / temperature)
    return np.asarray(weights / weights.sum())


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_continuations_of_one_token_follow_the_softmax(engines: Engines, temperature: float) -> None:
    """Logits depend on the last token alone, so every row that holds it gives an independent draw after it."""
    trunk, _ = engines
    counts = np.zeros(len(bigram_logits(bigram_model(), TOKEN)), np.int64)
    seed = 0
    while counts.sum() < DRAWS:
        seed += 1
        trunk.start(make_sampler(SamplingParams(temperature=temperature, seed=seed)))
        for _ in range(2000 // ROWS):
            np.add.at(counts, trunk.verify([TOKEN] * ROWS).choices, 1)
            trunk.commit(ROWS)
    expected = counts.sum() * _softmax(bigram_logits(bigram_model(), TOKEN), temperature)
    assert counts[tiny_vocab.FIRST_SPECIAL :].sum() == 0
    often = expected >= 5
    observed = np.append(counts[often], counts[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum())
    chi_square = float((np.square(observed - wanted) / np.maximum(wanted, 1e-9)).sum())
    assert chi_square < _chi_square_limit(len(wanted) - 1)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_drafting_draws_the_same_tokens_and_some_drafts_are_accepted(engines: Engines, temperature: float) -> None:
    trunk, draft = engines
    texts, stats = [], [SpecStats(), SpecStats()]
    for stat, draft_n in zip(stats, (0, 3), strict=True):
        tokens = generate(
            trunk,
            draft if draft_n else None,
            [TOKEN],
            sampler=make_sampler(SamplingParams(temperature=temperature, seed=5)),
            controller=FixedDraft(draft_n),
            max_tokens=1500,
            end_token_ids=(),
            context_size=4096,
            stats=stat,
        )
        texts.append(list(tokens))
    assert texts[0] == texts[1]
    assert stats[0].draft_n == 0 and stats[1].draft_n_accepted > 0
