"""Known text, and text with drafts against text without, on the engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from runtime.agreement import compare
from runtime.sampling import SamplingParams
from runtime.session import Session, SpecOptions, open_session
from tests.gpu.checks import run
from tests.gpu.conftest import Opened
from tests.gpu.prepare import CUT_HEAD, MAX_ROWS, TRAINED_MODELS
from tests.known_text import ENDLESS, RING, STOP_INSIDE
from tests.peer.speculation import recorded

pytestmark = [pytest.mark.gpu, pytest.mark.trt]

Open = Callable[[str], Opened]


@pytest.mark.parametrize("n_drafts", range(MAX_ROWS))
def test_known_text(opened: Open, n_drafts: int) -> None:
    greedy = SamplingParams()
    tokens, _ = run(opened("bigram_ring"), list(RING[:5]), n_drafts, 200, greedy)
    assert tokens == ENDLESS.greedy(RING[4], 200)
    tokens, stats = run(opened("draft_perfect"), list(RING[:5]), n_drafts, 100, greedy)
    assert tokens == ENDLESS.greedy(RING[4], 100)
    assert stats.draft_n_accepted == stats.draft_n
    engines = opened("ring_stop_inside")
    tokens, stats = run(engines, [RING[-1]], n_drafts, 100, greedy, engines.manifest.tokenizer.end_token_ids)
    assert (tokens, stats.finish_reason) == (STOP_INSIDE.greedy(RING[-1], 11), "stop")


@pytest.mark.parametrize("n_drafts", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(0.8, seed=5),
        SamplingParams(1.2, min_p=0.05, seed=6),
        SamplingParams(1.2, top_k=20, seed=7),
        SamplingParams(1.2, top_p=0.9, seed=8),
        SamplingParams(0.8, top_k=40, top_p=0.95, min_p=0.02, seed=9),
    ],
    ids=["greedy", "0.8", "min-p", "top-k", "top-p", "all filters"],
)
@pytest.mark.parametrize("name", TRAINED_MODELS)
def test_drafting_leaves_the_text_alone(opened: Open, name: str, params: SamplingParams, n_drafts: int) -> None:
    engines = opened(name)
    for one in recorded()[:6]:
        plain, _ = run(engines, one.prompt, 0, 128, params)
        text, stats = run(engines, one.prompt, n_drafts, 128, params)
        assert text == plain
        assert stats.draft_n_accepted > 0


@pytest.mark.parametrize("n_drafts", [1, 3, 7])
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(0.8, seed=5), SamplingParams(1.2, min_p=0.05, seed=6)], ids=str
)
def test_a_cut_draft_head(opened: Open, params: SamplingParams, n_drafts: int) -> None:
    """Its rows stand for true tokens, whose noise they are drawn with: the device drafts what the host does from a row
    of all tokens in which the others are masked. The text is that of plain decoding."""
    engines, known = opened(CUT_HEAD), 0
    for one in recorded()[:6]:
        plain, _ = run(engines, one.prompt, 0, 96, params)
        text, stats = run(engines, one.prompt, n_drafts, 96, params)
        _, want = run(engines, one.prompt, n_drafts, 96, params, on_host=True)
        assert text == plain
        assert (stats.draft_n, stats.draft_n_accepted) == (want.draft_n, want.draft_n_accepted)
        known += stats.draft_n_accepted
    assert known > 0


def test_check(prepared: Path) -> None:
    """What `runtime.check` measures, with an adaptive number of drafts as well."""
    session: Session = open_session(prepared / "trained", spec=SpecOptions("auto", 5))
    for params in (SamplingParams(), SamplingParams(0.8, seed=9)):
        for one in recorded()[:4]:
            result = compare(session, one.prompt, params, 96)
            assert result.first_difference is None
            assert result.head.kl_sum is not None and np.isfinite(result.head.kl_sum)
