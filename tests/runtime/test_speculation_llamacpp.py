"""The loop on the trained model against llama.cpp's own, recorded: same text, same drafts accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.controller import FixedDraft, Round
from runtime.model_cache import exported_folder
from runtime.sampling import SamplingParams
from runtime.session import Session, SpecOptions, open_session
from runtime.speculative import SpecStats
from tests.vocabulary_files import TRAINED_MODEL

RECORDED: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "speculation_llamacpp.json").read_text())
N_TOKENS = 64


class Recorder(FixedDraft):
    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.rounds: list[Round] = []

    def observe(self, done: Round) -> None:
        self.rounds.append(done)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    folder = exported_folder(TRAINED_MODEL, draft=True, cache_dir=tmp_path_factory.mktemp("cache"))
    return open_session(folder, spec=SpecOptions("draft-mtp", 5), threads=1)


@pytest.mark.parametrize("draft_n", [1, 2, 3, 5])
@pytest.mark.parametrize("run", RECORDED["runs"], ids=lambda run: run["text"][:12])
def test_text_and_accepted_counts_are_llama_cpps(session: Session, run: dict[str, Any], draft_n: int) -> None:
    session.controller = recorder = Recorder(draft_n)
    # Its loop drafts draft_n in every round, ours no more than the budget leaves: with a larger one the same rounds.
    tokens = session.generate(
        run["prompt"], SamplingParams(), max_tokens=N_TOKENS + draft_n, stats=SpecStats(), heed_ends=False
    )
    assert list(tokens)[:N_TOKENS] == run["tokens"]
    emitted, accepted, drafted = 1, 0, 0
    for done in recorder.rounds:
        if emitted >= N_TOKENS:
            break
        emitted, accepted, drafted = emitted + done.n_accept + 1, accepted + done.n_accept, drafted + done.draft_n
    assert [accepted, drafted] == run["accepted_drafted"][str(draft_n)]
