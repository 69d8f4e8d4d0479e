"""The product's loop accepts the drafts that llama.cpp's own speculative loop accepts, round by round."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from tests.exported import Exported, generate_tokens
from tests.model_checks import token_ids
from tests.peer.conftest import MAX_DRAFTS
from tests.peer.speculation import measure, recorded, texts

if TYPE_CHECKING:
    from tests.peer.llamacpp import LlamaCpp

pytestmark = pytest.mark.peer
Export = Callable[[str], Exported]
Peer = Callable[[str], "LlamaCpp"]

NEW_TOKENS = 48
PROMPTS = {
    "trained": [run.prompt for run in recorded()[:2]],
    "agreeing": [token_ids(256, 20, seed) for seed in (1, 2)],
    "bigram_ring": [token_ids(256, 20, seed=5)],
}


@pytest.mark.parametrize("n_drafts", [1, 2, 3, 5])
@pytest.mark.parametrize("name", PROMPTS)
def test_accepted_counts(exported: Export, peer: Peer, name: str, n_drafts: int) -> None:
    """Same tokens, and the same number accepted in every round. (Ours runs on a little: llama.cpp's last rounds draft
    past the end.)"""
    trunk, draft = exported(name).engines()
    partial = 0
    for prompt in PROMPTS[name]:
        want_tokens, want = peer(name).speculate(prompt, NEW_TOKENS, n_drafts)
        tokens, rounds, _ = generate_tokens(trunk, draft, prompt, NEW_TOKENS + MAX_DRAFTS + 1, n_drafts)
        assert tokens[:NEW_TOKENS] == want_tokens
        assert rounds.accepted[: len(want)] == want
        assert set(rounds.drafted[: len(want)]) == {n_drafts}
        assert want_tokens == peer(name).plain(prompt, NEW_TOKENS)
        partial += sum(0 < accepted < n_drafts for accepted in want)
    assert partial or n_drafts == 1, "no round was accepted in part: the prompts show nothing"


@pytest.mark.parametrize("index", [0, 7, 16])
def test_record(peer: Peer, index: int) -> None:
    """The record that other tests rely on is what llama.cpp says."""
    assert measure(peer("trained"), texts()[index]) == recorded()[index]
