"""A NaN behind a rejected draft is none of plain decoding's business; on ONNX Runtime, with a token whose embedding is
NaN."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable

import numpy as np
import pytest

from engines.errors import NumericError
from runtime.draft_tokens import DraftTokens
from runtime.engine import NO_CHOICE, any_token
from runtime.engine_onnxruntime import OnnxDraftEngine, OnnxTrunkEngine
from runtime.onnx_session import load_session
from runtime.sampling import ParamsSampler, SamplingParams, choose
from tests import compare
from tests.exported import Exported, append, generate_tokens, greedy, prefill, shifted
from tests.model_checks import token_ids

BAD = 7  # no token that is fed for another reason
MAX_ROWS = 6
Engines = tuple[OnnxTrunkEngine, OnnxDraftEngine]


def checked(logits: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Greedy, as the product does it: refuses a NaN."""
    return choose(logits, positions, SamplingParams())


def drawn(logits: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """As `checked`, but the token with the NaN is chosen for position 13."""
    return np.where(positions == 13, BAD, checked(logits, positions))


@pytest.fixture(scope="module")
def clean(exported: Callable[[str], Exported]) -> Exported:
    return exported("f32")


@pytest.fixture(scope="module")
def damaged(clean: Exported, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """Engines of the same weights but for one row of the embedding; the loader, which compares digests, is left out."""
    folder = tmp_path_factory.mktemp("damaged") / "model"
    shutil.copytree(clean.folder, folder)
    geometry = clean.manifest.geometry
    weights = np.memmap(folder / "weights.bin", np.float32, "r+")
    table = weights[: geometry.vocab_size * geometry.hidden_size].reshape(geometry.vocab_size, -1)
    table[BAD] = np.nan
    weights.flush()
    trunk, replay, draft = (load_session(folder / f"{name}.onnx", 1) for name in ("trunk", "replay", "draft"))
    head = OnnxDraftEngine(draft, geometry, 1024, DraftTokens(geometry.vocab_size))
    return OnnxTrunkEngine(trunk, replay, geometry, 1024, MAX_ROWS), head


@pytest.fixture
def prompt() -> list[int]:
    ids = [int(token) for token in token_ids(320, 40) if token != BAD][:12]
    assert len(ids) == 12
    return ids


def begin(trunk: OnnxTrunkEngine, prompt: list[int], sampler: Callable[..., np.ndarray]) -> int:
    trunk.start(sampler)
    return trunk.prefill(prompt).choices[0]


@pytest.mark.parametrize(
    ("rows", "accepted"), [(rows, accepted) for rows in range(2, MAX_ROWS + 1) for accepted in range(rows - 1)]
)
def test_behind_a_rejected_draft(
    clean: Exported, damaged: Engines, prompt: list[int], rows: int, accepted: int
) -> None:
    """The NaN is the first rejected draft, or stands behind it: choices, hidden rows and state as without it."""
    reference = clean.trunk()
    text = [begin(reference, prompt, greedy)]
    for _ in range(accepted + 1):
        text += reference.verify(text[-1:]).choices
        reference.commit(1)
    assert BAD not in text
    for fill in (BAD, (text[accepted + 1] + 1) % 320):
        tokens = [*text[: accepted + 1], *[fill] * (rows - accepted - 2), BAD]
        trunk = damaged[0]
        begin(trunk, prompt, checked)
        result = trunk.verify(tokens)
        assert result.choices == [*text[1:], *[NO_CHOICE] * (rows - accepted - 1)]
        trunk.commit(accepted + 1)
        compare.assert_same_state(trunk.state(), reference.state(), "after the rejection")
        prefill(reference, prompt)
        want = append(reference, text, 1)
        compare.assert_same_bits(result.hidden[: accepted + 1], want[1][: accepted + 1], "hidden")
        # In a cache in which a NaN had been.
        assert trunk.verify(text[accepted + 1 :]).choices == want[0][-1:].argmax(axis=1).tolist()
        compare.assert_same_bits(trunk.logits, want[0][-1:], "logits of the next pass")
        prefill(reference, prompt)
        append(reference, text[:-1], 1)


@pytest.mark.parametrize("rows", range(2, MAX_ROWS + 1))
def test_in_a_row_that_counts(clean: Exported, damaged: Engines, prompt: list[int], rows: int) -> None:
    """The NaN is an accepted draft: the rows before it can be kept, and the next pass, which begins with it, names the
    position that plain decoding names."""
    trunk, reference = damaged[0], clean.trunk()
    first = begin(trunk, prompt, drawn)
    assert trunk.verify([first]).choices == [BAD]
    trunk.commit(1)
    with pytest.raises(NumericError, match="position 14: 320 NaN"):
        trunk.verify([BAD])
    begin(trunk, prompt, drawn)
    result = trunk.verify([first, *[BAD] * (rows - 1)])
    assert result.choices == [BAD, *[NO_CHOICE] * (rows - 1)]
    trunk.commit(1)
    assert begin(reference, prompt, greedy) == first
    want = reference.verify([first])
    reference.commit(1)
    compare.assert_same_bits(result.hidden, want.hidden, "hidden")
    compare.assert_same_state(trunk.state(), reference.state(), "state of the rows before")
    with pytest.raises(NumericError, match="position 14: 320 NaN"):
        trunk.verify([BAD])


@pytest.mark.parametrize("drafts", range(1, MAX_ROWS))
@pytest.mark.parametrize("ends", [(), (BAD,)])
def test_as_plain_decoding_has_it(damaged: Engines, prompt: list[int], drafts: int, ends: tuple[int, ...]) -> None:
    """A text that ends with the token of NaN is one; a text that goes on is an error, drafted or not."""
    trunk, head = damaged
    for n in (0, drafts):
        given = trunk, head, prompt, 8, n, drawn, ends
        if ends:
            assert len(generate_tokens(*given)[0]) == 1
        else:
            with pytest.raises(NumericError, match="position 14: 320 NaN"):
                generate_tokens(*given)


def test_keeping_a_damaged_row_is_refused(damaged: Engines, prompt: list[int]) -> None:
    trunk = damaged[0]
    begin(trunk, prompt, checked)
    trunk.verify([1, BAD, 1])
    with pytest.raises(NumericError, match="320 NaN"):
        trunk.commit(2)


def test_of_the_head(clean: Exported, damaged: Engines, prompt: list[int]) -> None:
    """After its own guess it ends the drafts and leaves no trace; after true rows it is an error."""
    trunk, reference = clean.engines()
    hidden = shifted(prefill(trunk, prompt))
    head = damaged[1]
    head.start(lambda logits, positions: np.where(positions == 13, BAD, checked(logits, positions)))
    reference.start(greedy)
    head.prefill(prompt[:11], hidden[:11])
    reference.prefill(prompt[:11], hidden[:11])
    guess = reference.draft(prompt[11:], hidden[11:], 1)
    assert head.draft(prompt[11:], hidden[11:], 5).tolist() == [guess[0], BAD, NO_CHOICE, NO_CHOICE, NO_CHOICE]
    wanted = reference.draft(prompt[:1], hidden[:1], 1)
    assert head.draft(prompt[:1], hidden[:1], 1).tolist() == [BAD]  # for position 13, from finite logits
    compare.assert_same_bits(head.logits, reference.logits, "logits after the next true row")
    assert wanted[0] == head.logits.argmax()
    with pytest.raises(NumericError, match="position 14: 320 NaN"):
        head.draft([BAD], hidden[:1], 3)


def test_what_a_sequence_leaves_behind(clean: Exported, damaged: Engines, prompt: list[int]) -> None:
    """A NaN in rows that nobody chose after is nothing to the next sequence, be it shorter or as long."""
    trunk, head = damaged
    reference, known = clean.engines()
    given = np.zeros((len(prompt) + 1, clean.manifest.geometry.hidden_size), np.float32)
    for rows in (prompt, prompt[:3]):
        hidden = shifted(prefill(reference, rows))
        known.start(greedy)
        guesses, first = known.draft(rows, hidden, 3).tolist(), begin(reference, rows, greedy)
        for place in (0, 5, len(prompt)):
            spoilt = [*prompt[:place], BAD, *prompt[place:]]
            for leave in (head.prefill, head.guess):
                head.start(ParamsSampler(SamplingParams()))
                with contextlib.suppress(NumericError):
                    leave(spoilt, given)
                head.start(checked)
                assert head.draft(rows, hidden, 3).tolist() == guesses
            trunk.start(any_token)
            trunk.prefill(spoilt)
            trunk.verify([1, BAD])
            trunk.commit(2)
            assert begin(trunk, rows, checked) == first
