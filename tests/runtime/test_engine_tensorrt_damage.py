"""Logits that are no numbers, on the stand-ins of the TensorRT backend: in any row of a pass, trunk and head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import numpy as np
import pytest

from engines.errors import NumericError
from runtime.engine import NO_CHOICE, any_token
from tests.runtime.fake_engines import START_STATE, VOCAB, logits_of, next_state, plain_decode
from tests.runtime.fake_passes import CHUNK, CONTEXT, MAX_ROWS
from tests.runtime.test_engine_tensorrt import GREEDY, PROMPT, SAMPLERS, Engines, run


def states_of(tokens: Sequence[int]) -> list[int]:
    """The toy's, before and after each."""
    states = [START_STATE]
    for token in tokens:
        states.append(next_state(states[-1], token))
    return states


def nan_after(state: int, monkeypatch: pytest.MonkeyPatch, function: str = "logits_of") -> None:
    monkeypatch.setattr(
        f"tests.runtime.fake_passes.{function}",
        lambda other: logits_of(other) * np.float32(np.nan if state == other else 1),
    )


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("fault", ["trunk", "draft"])
def test_a_logit_that_is_none(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, fault: str, value: float, name: str
) -> None:
    """Named with the place they would have chosen a token for; the device only says that there are some."""
    function = {"trunk": "logits_of", "draft": "twisted"}[fault]
    spoilt: Callable[[int], np.ndarray] = lambda state: np.where(np.arange(VOCAB) == 5, value, logits_of(state))  # noqa: E731
    monkeypatch.setattr(f"tests.runtime.fake_passes.{function}", spoilt)
    with pytest.raises(NumericError, match=f"position {CHUNK if fault == 'trunk' else len(PROMPT) + 1}"):
        run(*engines, SAMPLERS[name], 2)


@pytest.mark.parametrize("ends", [(), (12, 3)])
@pytest.mark.parametrize("n", range(1, MAX_ROWS))
@pytest.mark.parametrize("name", list(SAMPLERS)[:-1])
def test_logits_that_plain_decoding_never_sees(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, name: str, n: int, ends: tuple[int, ...]
) -> None:
    """Every row after a rejected draft, and after the text's end, is damaged, the head's as well as the trunk's. The
    text is the same."""
    text, reason = plain_decode(PROMPT, SAMPLERS[name], -1, ends, CONTEXT)
    assert reason == ("stop" if ends else "length")
    state, seen = START_STATE, set()
    for token in (*PROMPT, *text):
        state = next_state(state, token)
        seen.add(state)
    damaged = []

    def logits(state: int) -> np.ndarray:
        if state in seen:
            return logits_of(state)
        damaged.append(state)
        bad = np.float32((np.inf, -np.inf, np.nan)[state % 3])
        return np.where(np.arange(13) == 5, bad, logits_of(state))

    monkeypatch.setattr("tests.runtime.fake_passes.logits_of", logits)
    assert run(*engines, SAMPLERS[name], n, end_token_ids=ends)[0] == text
    assert damaged or len(text) < 4


def test_damaged_logits_that_count(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any row of a pass: with the position that plain decoding names."""
    states = states_of([*PROMPT, *plain_decode(PROMPT, GREEDY, -1, (), CONTEXT)[0]])
    for position in range(len(PROMPT) + 1, len(PROMPT) + 12):
        with monkeypatch.context() as patch:
            nan_after(states[position], patch)
            patch.setattr("tests.runtime.fake_passes.twisted", lambda state: logits_of(state))
            for n in range(MAX_ROWS):
                with pytest.raises(NumericError, match=f"for position {position}: 13 NaN"):
                    run(*engines, GREEDY, n)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_damaged_row_cannot_be_kept(engines: Engines, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Nor can those after it, even by who keeps rows of known tokens; but by who looks at no choice."""
    trunk, _ = engines
    for bad in range(1, MAX_ROWS):
        for keep in range(1, MAX_ROWS + 1):
            for sampler in (SAMPLERS[name], any_token):
                nan_after(states_of(PROMPT)[7 + bad + 1], monkeypatch)
                trunk.start(sampler)
                trunk.prefill(PROMPT[:7])
                choices = trunk.verify(PROMPT[7 : 7 + MAX_ROWS]).choices
                refused = keep > bad and sampler is not any_token
                assert sampler is any_token or NO_CHOICE in choices[bad:]
                with pytest.raises(NumericError, match=f"position {8 + bad}: 13 NaN") if refused else nullcontext():
                    trunk.commit(keep)
                    assert trunk.position == 7 + keep


@pytest.mark.parametrize("name", list(SAMPLERS)[:-1])
def test_a_guess_that_is_none(engines: Engines, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    trunk, draft = engines
    for bad in range(1, 8):
        nan_after(states_of(PROMPT)[bad], monkeypatch, "twisted")
        trunk.start(SAMPLERS[name])
        hidden = draft.join([draft.zero_hidden(), trunk.prefill(PROMPT[:7]).hidden])
        draft.start(SAMPLERS[name])
        with pytest.raises(NumericError, match=f"logits for position {bad} are not finite"):
            draft.guess(PROMPT[:7], hidden[:7])
