"""One infinite logit of the model's own, on ONNX Runtime: no token, whatever the settings. Masks are no such."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from engines.draft_head import DraftHeadOptions
from engines.errors import NumericError
from runtime.controller import FixedDraft
from runtime.draft_tokens import load_draft_tokens
from runtime.engine import NO_CHOICE, Sampler, any_token
from runtime.engine_onnxruntime import OnnxTrunkEngine
from runtime.onnx_draft import OnnxDraftEngine
from runtime.sampling import ParamsSampler, SamplingParams
from runtime.sequence_sampler import Adjustments, SequenceSampler
from runtime.spec_stats import SpecStats
from runtime.speculative import Generation
from tests.exported import Exported, export, generate_tokens, prefill, shifted
from tests.model_checks import token_ids
from tests.vocabulary_files import TRAINED_MODEL

VOCAB, TOKEN = 320, 5  # the token of the infinite logit
PROMPT = [int(token) for token in token_ids(VOCAB, 12)]
VALUES = [-np.inf, np.inf]


class Grammar:
    """A grammar and its state at once: any text of some tokens, without TOKEN and its neighbour if none are given."""

    def __init__(self, mask: np.ndarray | None = None) -> None:
        self.mask = ~np.isin(np.arange(VOCAB), (TOKEN, TOKEN + 1)) if mask is None else mask
        self.vocab_size = len(self.mask)

    def start(self) -> Grammar:
        return self

    def prepare(self) -> bool:
        return True

    def push(self, token: int) -> None:
        assert self.mask[token]

    def pop(self, n: int) -> None: ...

    def allowed(self, patience_s: float = 0.0) -> np.ndarray:
        return self.mask


PARAMS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(0.8, seed=1),
    "top-k": SamplingParams(0.8, top_k=5, seed=2),
    "top-p": SamplingParams(0.8, top_p=0.9, seed=3),
    "min-p": SamplingParams(0.8, min_p=0.1, seed=4),
    "all filters": SamplingParams(1.2, 40, 0.9, 0.02, 5),
}
ADJUSTMENTS = {
    "grammar": Adjustments(grammar=Grammar()),  # type: ignore[arg-type]
    "bias": Adjustments(logit_bias={TOKEN: -100.0}, frequency_penalty=0.5),
}


def sampler_of(name: str, prompt: Sequence[int] = tuple(PROMPT)) -> Sampler:
    if name in PARAMS:
        return ParamsSampler(PARAMS[name])
    kind, params = name.split(", ")
    return SequenceSampler(PARAMS[params], ADJUSTMENTS[kind], prompt, VOCAB, ())


SETTINGS = [*PARAMS, *(f"{kind}, {params}" for kind in ADJUSTMENTS for params in ("greedy", "all filters"))]


@pytest.fixture
def model(exported: Callable[[str], Exported]) -> Exported:
    return exported("f32")


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return export(TRAINED_MODEL, tmp_path_factory.mktemp("cut") / "x", DraftHeadOptions(1024))


def spoil_trunk(monkeypatch: pytest.MonkeyPatch, place: int, value: float = -np.inf) -> None:
    """TOKEN's logit for the token at ``place``, whatever the pass."""
    run = OnnxTrunkEngine._run

    def spoilt(self, bound, tokens, rows):  # type: ignore[no-untyped-def]
        hidden = run(self, bound, tokens, rows)
        self.logits[self._position + 1 + rows == place, TOKEN] = value
        return hidden

    monkeypatch.setattr(OnnxTrunkEngine, "_run", spoilt)


def spoil_head(monkeypatch: pytest.MonkeyPatch, place: int, value: float = -np.inf) -> None:
    step = OnnxDraftEngine._step

    def spoilt(self, tokens, hidden, position, rows=1):  # type: ignore[no-untyped-def]
        last = step(self, tokens, hidden, position, rows)
        places = position + len(tokens) + 1 - rows + np.arange(rows)
        self._logits[places == place, TOKEN] = value
        return last

    monkeypatch.setattr(OnnxDraftEngine, "_step", spoilt)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", SETTINGS)
def test_of_the_trunk(model: Exported, monkeypatch: pytest.MonkeyPatch, name: str, value: float) -> None:
    """After the prompt, in a plain row, in a row behind drafts: with the position that plain decoding names."""
    trunk, head = model.engines()
    for place in (12, 13, 15):
        with monkeypatch.context() as patch:
            spoil_trunk(patch, place, value)
            for n in (0, 1, 3):
                with pytest.raises(NumericError, match=f"position {place}: 0 NaN and 1 infinite of {VOCAB}"):
                    generate_tokens(trunk, head, PROMPT, 8, n, sampler_of(name))


@pytest.mark.parametrize("name", SETTINGS)
def test_masks_are_none_of_it(model: Exported, name: str) -> None:
    """Nor do they show in what the engine says of its logits."""
    trunk, head = model.engines()
    text = generate_tokens(trunk, None, PROMPT, 12, 0, sampler_of(name))[0]
    assert len(text) == 12 and (not name.startswith("grammar") or TOKEN not in text)
    assert generate_tokens(trunk, head, PROMPT, 12, 3, sampler_of(name))[0] == text
    assert np.isfinite(trunk.logits).all() and np.isfinite(head.logits).all()


@pytest.mark.parametrize("name", SETTINGS)
def test_behind_a_rejected_draft(model: Exported, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Plain decoding never sees it."""
    trunk, _ = model.engines()
    text = generate_tokens(trunk, None, PROMPT, 3, 0, sampler_of(name))[0]
    spoil_trunk(monkeypatch, 15)
    trunk.start(sampler_of(name))
    trunk.prefill(PROMPT)
    wrong = next(token for token in range(VOCAB) if token not in (text[1], TOKEN, TOKEN + 1))
    result = trunk.verify([text[0], wrong, wrong, wrong])
    assert result.choices[0] == text[1] and result.choices[-1] == NO_CHOICE
    trunk.commit(1)
    assert trunk.verify([text[1]]).choices == [text[2]]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", SETTINGS)
def test_of_the_head(model: Exported, monkeypatch: pytest.MonkeyPatch, name: str, value: float) -> None:
    """After true rows it is an error, after the head's own guesses it only ends the drafts."""
    trunk, head = model.engines()
    hidden = shifted(prefill(trunk, PROMPT))
    spoil_head(monkeypatch, 14, value)
    head.start(sampler_of(name))
    drafts = head.draft(PROMPT, hidden, 4)
    assert (drafts[:2] >= 0).all() and drafts[2:].tolist() == [NO_CHOICE] * 2
    head.start(sampler_of(name))
    head.prefill(PROMPT, hidden)
    head.prefill(PROMPT[:1], hidden[:1])
    with pytest.raises(NumericError, match=f"position 14: 0 NaN and 1 infinite of {VOCAB}"):
        head.draft(PROMPT[:1], hidden[:1], 2)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", PARAMS)
def test_of_the_heads_guesses(model: Exported, monkeypatch: pytest.MonkeyPatch, name: str, value: float) -> None:
    """They are made after true rows."""
    trunk, head = model.engines()
    hidden = shifted(prefill(trunk, PROMPT))
    head.start(sampler_of(name))
    assert head.guess(PROMPT, hidden) is not None
    for place in range(5, 13):
        with monkeypatch.context() as patch:
            spoil_head(patch, place, value)
            head.start(sampler_of(name))
            with pytest.raises(NumericError, match=f"position {place}: 0 NaN and 1 infinite of {VOCAB}"):
                head.guess(PROMPT, hidden)


@pytest.mark.parametrize("name", PARAMS)
def test_of_a_head_that_knows_few_tokens(cut: Exported, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The tokens that it does not know are masked, which is no damage; one that it knows is another matter."""
    trunk, head = cut.engines()
    hidden = shifted(prefill(trunk, PROMPT))
    sampler = sampler_of(name)
    head.start(sampler)
    assert (head.draft(PROMPT, hidden, 3) >= 0).all()
    assert np.isneginf(head.logits).any()
    spoil_head(monkeypatch, 12)
    head.start(sampler)
    with pytest.raises(NumericError, match="position 12: 0 NaN and 1 infinite of 1024"):
        head.draft(PROMPT, hidden, 3)


@pytest.mark.parametrize("allowed", [1, 3, 3072])
@pytest.mark.parametrize("name", PARAMS)
def test_a_grammar_of_tokens_that_the_head_does_not_know(cut: Exported, name: str, allowed: int) -> None:
    """Both masks together leave it nothing. Then any of the grammar's will do, and a forced one is right."""
    trunk, head = cut.engines()
    known = load_draft_tokens(cut.folder, cut.manifest)
    mask = np.isneginf(known.whole_rows(np.zeros((1, known.count), np.float32))[0])
    mask[np.flatnonzero(mask)[allowed:]] = False
    texts = []
    for n in (0, 1, 3):
        adjustments = Adjustments(grammar=Grammar(mask))  # type: ignore[arg-type]
        sampler, stats = SequenceSampler(PARAMS[name], adjustments, PROMPT, len(mask), ()), SpecStats()
        generation = Generation(
            *(trunk, head, PROMPT),
            sampler=sampler,
            draft_sampler=sampler.draft,
            controller=FixedDraft(n),
            max_tokens=12,
            end_token_ids=(),
            context_size=64,
            stats=stats,
        )
        text: list[int] = []
        while len(text) < 12:
            text += generation.step().tokens
        texts.append(text)
        assert allowed != 1 or stats.draft_n_accepted == stats.draft_n
    assert texts[1:] == texts[:1] * 2


def test_a_sampler_that_looks_at_no_choice(model: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who compares logits gets those that are damaged, too."""
    trunk, _ = model.engines()
    spoil_trunk(monkeypatch, 13)
    trunk.start(any_token)
    trunk.prefill(PROMPT)
    trunk.verify([1])
    assert np.flatnonzero(np.isneginf(trunk.logits[0])).tolist() == [TOKEN]
