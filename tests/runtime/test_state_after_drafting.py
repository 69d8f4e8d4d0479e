"""The loop on ONNX Runtime: whatever was drafted and refused, text and state are plain decoding's, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from runtime.controller import AdaptiveDraft, Controller, FixedDraft
from runtime.engine_onnxruntime import OnnxTrunkEngine
from runtime.model_cache import exported_folder
from runtime.sampling import SamplingParams
from runtime.session import Session, SpecOptions, open_session
from runtime.speculative import SpecStats
from tests.vocabulary_files import TRAINED_MODEL

PROMPT = [40, 41, 42]


@pytest.fixture(scope="module", params=["agreeing", "trained"])
def session(
    request: pytest.FixtureRequest, tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Session:
    path = TRAINED_MODEL if request.param == "trained" else tiny(request.param)
    folder = exported_folder(path, draft=True, cache_dir=tmp_path_factory.mktemp("cache"))
    return open_session(folder, spec=SpecOptions("draft-mtp", 4), threads=1)


def run(
    session: Session, n_tokens: int, params: SamplingParams, plain: bool = False
) -> tuple[list[int], dict[str, np.ndarray], SpecStats]:
    stats, trunk = SpecStats(), session.trunk
    assert isinstance(trunk, OnnxTrunkEngine)
    tokens = session.generate(PROMPT, params, max_tokens=n_tokens, stats=stats, plain=plain, heed_ends=False)
    return list(tokens), trunk.state(), stats


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.8, seed=7)], ids=["greedy", "0.8"])
@pytest.mark.parametrize("n_tokens", [1, 17, 256])
def test_text_and_state_equal_plain_decoding(session: Session, n_tokens: int, params: SamplingParams) -> None:
    want, want_state, stats = run(session, n_tokens, params, plain=True)
    assert stats.draft_n == 0
    controllers: list[Controller] = [FixedDraft(1), FixedDraft(2), FixedDraft(4), AdaptiveDraft(4)]
    refused = 0
    for session.controller in controllers if n_tokens < 256 else controllers[2:]:
        got, state, stats = run(session, n_tokens, params)
        assert got == want
        assert state.keys() == want_state.keys()
        for name, values in want_state.items():
            assert np.array_equal(state[name], values), name
        refused += stats.draft_n - stats.draft_n_accepted
    assert refused or n_tokens == 1
