"""What a head that does not draft would have drafted: of rows that it has yet to take, compared with the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from engines.engine_manifest import GUESS_ROWS
from runtime.controller import FixedDraft
from runtime.sampling import ParamsSampler, SamplingParams
from runtime.speculative import SpecStats, generate
from tests.exported import Exported, prefill, shifted
from tests.model_checks import token_ids
from tests.runtime.fake_engines import START_STATE, VOCAB, ToyHead, ToyTrunk, greedy, next_state, plain_decode
from tests.runtime.fake_passes import CHUNK, CONTEXT, twisted
from tests.runtime.fake_tensorrt import FakeGpu, toy_manifest, write_engines

PROMPT = [3, 1, 4, 1, 5, 9, 2]
SAMPLERS = [ParamsSampler(SamplingParams()), ParamsSampler(SamplingParams(0.9, seed=4))]


class Asking(FixedDraft):
    """Never drafts; asks for guesses whenever so many can be compared."""

    def __init__(self, least: int) -> None:
        super().__init__(0)
        self.least = least
        self.judged: list[list[bool]] = []

    def wants_guesses(self, n: int) -> bool:
        return n >= self.least

    def judge(self, right: Sequence[bool], n_rows: int, took_ms: float) -> None:
        assert took_ms >= 0.0
        self.judged.append(list(right))


class TwistedHead(ToyHead):
    """The toy head that is wrong where the stand-in's is."""

    def guess(self, tokens: Sequence[int], hidden: np.ndarray) -> np.ndarray:
        self._take(tokens, hidden)
        places = range(len(self.rows) - min(len(tokens), GUESS_ROWS), len(self.rows))
        states = [next_state(self.rows[place][1] or START_STATE, self.rows[place][0]) for place in places]
        logits = np.stack([twisted(state) for state in states])
        return np.asarray(self._sampler(logits, np.array(places) + 1))


def run(trunk, head, sampler, controller) -> tuple[list[int], SpecStats]:  # type: ignore[no-untyped-def]
    stats, given = SpecStats(), {"max_tokens": -1, "end_token_ids": (), "context_size": trunk.context_size}
    text = list(generate(trunk, head, PROMPT, sampler=sampler, controller=controller, stats=stats, **given))
    assert text == plain_decode(PROMPT, sampler, -1, (), trunk.context_size)[0]
    assert stats.draft_n == 0
    return text, stats


@pytest.mark.parametrize(("least", "chunk"), [(1, 5), (4, 5), (9, 20), (30, 5), (30, 12)])
@pytest.mark.parametrize("is_right", [True, False])
def test_every_guess_is_compared_with_the_token_that_follows(least: int, chunk: int, is_right: bool) -> None:
    head = ToyHead(lambda token, _: token if is_right else (token + 1) % VOCAB, prefill_chunk=chunk)
    controller = Asking(least)
    text, _ = run(ToyTrunk(), head, greedy, controller)
    head.check_rows(PROMPT + text)
    assert head.draft_calls == []
    if least > 2 * chunk:  # the loop feeds a head before so many rows wait
        assert controller.judged == []
        return
    assert len(controller.judged) >= len(text) // (least + 1) - 1
    assert all(each == [is_right] * min(least, chunk, GUESS_ROWS) for each in controller.judged)


def test_a_head_that_does_not_tell() -> None:
    class Silent(ToyHead):
        def guess(self, tokens: Sequence[int], hidden: np.ndarray) -> None:
            return None

    controller, head = Asking(3), Silent()
    text, _ = run(ToyTrunk(), head, greedy, controller)
    assert controller.judged == []
    head.check_rows(PROMPT + text)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=["greedy", "temperature"])
@pytest.mark.parametrize("least", [1, 4, 7])
def test_on_stand_ins_for_tensorrt(gpu: FakeGpu, tmp_path: Path, sampler: ParamsSampler, least: int) -> None:
    """As the same head in host memory guesses; positions, rows and hidden states must be right for that."""
    from runtime.engine_tensorrt import open_engines

    write_engines(tmp_path, toy_manifest())
    trunk, draft = open_engines(tmp_path, toy_manifest(), context_size=CONTEXT)
    device, host = Asking(least), Asking(least)
    run(trunk, draft, sampler, device)
    run(ToyTrunk(CONTEXT, prefill_chunk=CHUNK), TwistedHead(prefill_chunk=CHUNK), sampler, host)
    assert device.judged == host.judged
    assert {True, False} == {right for each in device.judged for right in each}


def test_samplers_that_the_device_cannot_stand_in_for(gpu: FakeGpu, tmp_path: Path) -> None:
    from runtime.engine_tensorrt import open_engines

    write_engines(tmp_path, toy_manifest())
    trunk, draft = open_engines(tmp_path, toy_manifest(), context_size=CONTEXT)
    controller = Asking(3)
    run(trunk, draft, greedy, controller)
    assert controller.judged == []


@pytest.mark.parametrize("name", ["f32", "trained"])
@pytest.mark.parametrize("count", [1, 3, 8, 19])
def test_on_onnxruntime_guesses_are_drafts(exported: Callable[[str], Exported], name: str, count: int) -> None:
    model = exported(name)
    trunk, draft = model.engines()
    ids = token_ids(model.manifest.geometry.vocab_size, 24)
    before = shifted(prefill(trunk, ids))
    sampler = ParamsSampler(SamplingParams(0.7, seed=5))
    draft.start(sampler)
    draft.prefill(ids[:5], before[:5])
    guesses = draft.guess(ids[5 : 5 + count], before[5 : 5 + count])
    assert draft.position == 5 + count and len(guesses) == min(count, GUESS_ROWS)
    following = draft.draft([3], before[:1], 2).tolist()
    wanted = []
    for end in range(5 + count - len(guesses) + 1, 5 + count + 1):
        draft.start(sampler)
        wanted += draft.draft(ids[:end], before[:end], 1).tolist()
    assert guesses.tolist() == wanted
    assert draft.draft([3], before[:1], 2).tolist() == following
    draft.start(greedy)  # no sampler that a choice of any row may be asked for
    assert draft.guess(ids[:3], before[:3]) is None and draft.position == 0
