"""The models of known text say what `known_text` claims, by their own tensors."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from tests import tiny_vocab
from tests.known_text import ENDLESS, RING, STOP_AT_ONCE, STOP_INSIDE, RingText, bigram_logits, bigram_model, ring_model
from tests.named_inputs import NAMED, write_named


@pytest.mark.parametrize("text", [ENDLESS, STOP_INSIDE, STOP_AT_ONCE])
def test_ring_logits(text: RingText) -> None:
    """After any token the tensors give the claimed logits, the best ahead by more than 1."""
    model = ring_model(text)
    for token in range(320):
        logits = bigram_logits(model, token)
        np.testing.assert_allclose(logits, text.logits(token), atol=1e-5)
        second, first = np.sort(logits)[-2:]
        assert logits.argmax() == text.next(token) and first - second > 1


def test_ring_texts() -> None:
    assert len(set(RING)) == 17
    assert bytes(ENDLESS.greedy(RING[-1], 20)) == b"thequickbrownfxjmthe"
    stopped = STOP_INSIDE.greedy(RING[-1], 12)
    assert bytes(stopped[:11]) == b"thequickbro" and stopped[11] == tiny_vocab.IM_END
    assert STOP_AT_ONCE.greedy(5, 1) == [tiny_vocab.IM_END]


def test_bigram_distribution() -> None:
    """Broad over the usable ids, nothing on the others."""
    model = bigram_model()
    for token in (0, 97, 275):
        logits = bigram_logits(model, token)
        probabilities = np.exp(logits - logits.max())
        probabilities /= probabilities.sum()
        assert probabilities[tiny_vocab.FIRST_SPECIAL :].sum() < 1e-10
        assert 0.02 < probabilities.max() < 0.5


@pytest.mark.parametrize("name", NAMED)
def test_named_inputs_are_small_and_reproducible(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    first, second = (write_named(name, tmp_path_factory.mktemp("named")) for _ in range(2))
    assert first.read_bytes() == second.read_bytes()
    assert first.stat().st_size < (32e6 if name == "wide" else 11e6)  # as wide as the layer kernel takes
    if first.read_bytes()[:5] == b"GGUF\x03" and name not in ("array_bomb", "trunc_data_mid"):
        assert gguf.GGUFReader(first).tensors
