"""Trunk and head give llama.cpp's logits, and the float64 reference does too: two witnesses that share no code."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests import compare
from tests.exported import Exported, head_rows, shifted, trunk_rows
from tests.model_checks import NUM_POSITIONS, check_logits, oracle, oracle_rows, token_ids
from tests.named_inputs import GEOMETRIES

if TYPE_CHECKING:
    from tests.peer.llamacpp import LlamaCpp

pytestmark = pytest.mark.peer
Export = Callable[[str], Exported]
Peer = Callable[[str], "LlamaCpp"]

MODELS = [*GEOMETRIES, "tied", "mixed_types", "yarn_keys", "trained"]


@pytest.mark.parametrize("name", MODELS)
def test_trunk_and_head(exported: Export, peer: Peer, name: str) -> None:
    """Ours runs the file as it is, llama.cpp its values as float32."""
    model = exported(name)
    ids = token_ids(model.manifest.geometry.vocab_size)
    want, want_hidden = peer(name).trunk_rows(ids)
    assert want.shape[0] == NUM_POSITIONS
    trunk, draft = model.engines()
    got, hidden = trunk_rows(trunk, ids)
    check_logits("trunk logits against llama.cpp", got, want)
    compare.assert_close(hidden, want_hidden, what="hidden against llama.cpp", max_abs=compare.HIDDEN_MAX_ABS)
    before = shifted(want_hidden)
    want_head = peer(name).head_rows(ids, before)
    check_logits("head logits against llama.cpp", head_rows(draft, ids, before), want_head)


@pytest.mark.parametrize("name", ["heads_9b", "heads_odd", "yarn", "tied_no_head_norm", "trained"])
def test_reference(exported: Export, peer: Peer, name: str) -> None:
    """The float64 reference itself, against llama.cpp."""
    model = exported(name).model
    vocab = peer(name).vocab_size
    ids, rows = token_ids(vocab), oracle_rows(model, vocab)
    logits, hidden = peer(name).trunk_rows(ids)
    check_logits("llama.cpp's trunk", logits, rows.logits)
    before = shifted(rows.hidden)
    head = peer(name).head_rows(ids, before.astype(np.float32))
    check_logits("llama.cpp's head", head, oracle(model).head(ids, before).logits)
    compare.assert_close(hidden, rows.hidden, what="llama.cpp's hidden", max_abs=compare.HIDDEN_MAX_ABS)


def test_token_by_token(peer: Peer) -> None:
    """The bound is no accident: llama.cpp differs as much from itself when it takes one token at a time."""
    ids = token_ids(peer("f32").vocab_size)
    whole, _ = peer("f32").trunk_rows(ids)
    single, _ = peer("f32").trunk_rows(ids, chunk=1)
    check_logits("llama.cpp, one token at a time", single, whole)
