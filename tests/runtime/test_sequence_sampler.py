"""Penalties, biases, grammars and log-probabilities: by their definitions, and the same with drafting and without."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from engines.errors import EngineError, UsageError
from runtime.controller import FixedDraft
from runtime.grammar import GrammarCompiler
from runtime.sampling import ParamsSampler, SamplingParams, choose
from runtime.sequence_sampler import Adjustments, SequenceSampler, TokenLogprob, make_sampler
from runtime.session import Session
from runtime.speculative import Generation, SpecStats
from runtime.tokenizer import Tokenizer
from tests.exported import Exported
from tests.runtime.fake_engines import VOCAB, ToyHead, ToyTrunk, logits_of, next_state
from tests.runtime.serving import grammar_compiler, open_trained

PROMPT = [3, 1, 4, 1, 5]
END = 12
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["name", "n", "ok"],
    "additionalProperties": False,
}


def adjusted(row: np.ndarray, prompt: Sequence[int], text: Sequence[int], wanted: Adjustments) -> np.ndarray:
    """The definition, token by token."""
    out, counts = row.astype(np.float64), Counter(text)
    for token in {*prompt, *text}:
        penalty = wanted.repetition_penalty
        out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
    for token, count in counts.items():
        out[token] -= count * wanted.frequency_penalty + wanted.presence_penalty
    for token, bias in wanted.logit_bias.items():
        out[token] += bias
    return out.astype(np.float32)


def reference(wanted: Adjustments, params: SamplingParams, n: int) -> list[int]:
    """Plain decoding of the toy model, each row adjusted by definition."""
    state, text = 1, []
    for token in PROMPT:
        state = next_state(state, token)
    while len(text) < n:
        row = adjusted(logits_of(state)[0], PROMPT, text, wanted)
        token = int(choose(row[None], np.array([len(PROMPT) + len(text)]), params)[0])
        if token == END:
            break
        text.append(token)
        state = next_state(state, token)
    return text


def run_toy(sampler: SequenceSampler, draft_n: int, n: int, head: ToyHead | None = None) -> tuple[list[int], SpecStats]:
    trunk, stats = ToyTrunk(context_size=200), SpecStats()
    generation = Generation(
        trunk,
        head or ToyHead(),
        PROMPT,
        sampler=sampler,
        draft_sampler=sampler.draft,
        controller=FixedDraft(draft_n),
        max_tokens=n,
        end_token_ids=(END,),
        context_size=200,
        stats=stats,
    )
    text: list[int] = []
    while True:
        block = generation.step()
        text += block.tokens
        if block.finish_reason:
            return text, stats


TOY_ADJUSTMENTS = {
    "repetition": Adjustments(repetition_penalty=1.7),
    "repetition below 1": Adjustments(repetition_penalty=0.6),
    "frequency": Adjustments(frequency_penalty=0.7),
    "presence": Adjustments(presence_penalty=1.5, logit_bias={END: -100}),
    "negative": Adjustments(frequency_penalty=-0.3, presence_penalty=-0.5, logit_bias={END: -100}),
    "bias": Adjustments(logit_bias={2: 1.5, END: -100, 7: -3.25}),
    "all": Adjustments(1.2, 0.3, 0.4, {1: 1.0, END: -2.0}),
}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", TOY_ADJUSTMENTS)
def test_by_definition_for_any_draft(name: str, temperature: float) -> None:
    """Right, wrong and random drafts, none to five a round: always the text of the definition."""
    wanted = TOY_ADJUSTMENTS[name]
    rng = np.random.default_rng(0)
    for seed in range(3):
        params = SamplingParams(temperature=temperature, top_p=0.9, seed=seed)
        want = reference(wanted, params, 40)
        for draft_n in (0, 1, 4):
            for twist in (
                lambda token, _: token,
                lambda token, _: (token + 1) % VOCAB,
                lambda token, _: token if rng.random() < 0.6 else int(rng.integers(VOCAB)),
            ):
                sampler = SequenceSampler(params, wanted, PROMPT, VOCAB, (END,))
                assert run_toy(sampler, draft_n, 40, ToyHead(twist))[0] == want


def test_a_right_head_is_always_accepted() -> None:
    """The head chooses by the same rule, over its own drafts: its guesses are the trunk's choices."""
    wanted = Adjustments(1.3, 0.5, 0.5, {END: -100})
    sampler = SequenceSampler(SamplingParams(temperature=0.9, seed=3), wanted, PROMPT, VOCAB, (END,))
    _, stats = run_toy(sampler, 3, 80)
    assert stats.draft_n > 50 and stats.acceptance_rate == 1.0


def test_adjustments_change_the_text() -> None:
    texts = {tuple(reference(wanted, SamplingParams(), 60)) for wanted in (*TOY_ADJUSTMENTS.values(), Adjustments())}
    assert len(texts) == len(TOY_ADJUSTMENTS) + 1


def test_the_simplest_sampler_that_does() -> None:
    params = SamplingParams()
    assert make_sampler(params, Adjustments(), PROMPT, VOCAB, ()) == ParamsSampler(params)
    for wanted in (*TOY_ADJUSTMENTS.values(), Adjustments(top_logprobs=0)):
        assert isinstance(make_sampler(params, wanted, PROMPT, VOCAB, ()), SequenceSampler)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (Adjustments(repetition_penalty=0), "repetition_penalty must be from 0.01 to 100"),
        (Adjustments(repetition_penalty=float("nan")), "repetition_penalty"),
        (Adjustments(frequency_penalty=2.1), "frequency_penalty must be from -2 to 2"),
        (Adjustments(presence_penalty=float("nan")), "presence_penalty"),
        (Adjustments(logit_bias={13: 1}), "logit_bias names token 13; this model has ids 0 to 12"),
        (Adjustments(logit_bias={1: 101}), "logit_bias of token 1"),
        (Adjustments(top_logprobs=21), "top_logprobs must be from 0 to 20"),
    ],
)
def test_what_has_no_meaning_is_refused(wanted: Adjustments, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        wanted.validate(VOCAB)


def test_logprobs_are_of_the_models_own_logits() -> None:
    wanted = Adjustments(frequency_penalty=1.0, logit_bias={END: -100}, top_logprobs=3)
    reports: list[dict[int, TokenLogprob]] = []
    for draft_n in (0, 3):
        sampler = SequenceSampler(SamplingParams(temperature=1.0, seed=1), wanted, PROMPT, VOCAB, (END,))
        text, _ = run_toy(sampler, draft_n, 40, ToyHead(lambda token, p: token if p % 3 else 0))
        assert len(text) == 40
        reports.append({i: sampler.logprobs[i] for i in range(40)})
    assert reports[0] == reports[1]
    state = 1
    for token in PROMPT:
        state = next_state(state, token)
    for i, token in enumerate(text):
        row = logits_of(state)[0].astype(np.float64)
        logprobs = row - np.log(np.exp(row).sum())
        best = np.argsort(-logprobs)[:3]
        report = reports[0][i]
        assert report.token == token
        assert report.logprob == pytest.approx(logprobs[token], abs=1e-9)
        assert [each for each, _ in report.top] == best.tolist()
        assert [value for _, value in report.top] == pytest.approx(logprobs[best].tolist(), abs=1e-9)
        state = next_state(state, token)


# ---------------------------------------------------------------- grammars, on a real vocabulary
@pytest.fixture(scope="module")
def session(exported: Callable[[str], Exported]) -> Session:
    return open_trained(exported("trained"), draft_n_max=4)


@pytest.fixture(scope="module")
def compiler(session: Session) -> Iterator[GrammarCompiler]:
    with grammar_compiler(session) as made:
        yield made


def test_a_library_that_is_too_old(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "1.8.2")
    with pytest.raises(EngineError, match=r"llguidance 1.8.2 is too old .* pip install"):
        GrammarCompiler(session.folder, VOCAB, [1, 2])


def run(
    session: Session, prompt: Sequence[int], wanted: Adjustments, params: SamplingParams, draft_n: int, n: int = 120
) -> tuple[list[int], str, SpecStats]:
    ends = session.tokenizer.end_token_ids
    sampler = SequenceSampler(params, wanted, prompt, session.manifest.geometry.vocab_size, ends)
    stats = SpecStats()
    generation = Generation(
        session.trunk,
        session.draft,
        prompt,
        sampler=sampler,
        draft_sampler=sampler.draft,
        controller=FixedDraft(draft_n),
        max_tokens=n,
        end_token_ids=ends,
        context_size=session.context_size,
        stats=stats,
    )
    text: list[int] = []
    while True:
        block = generation.step()
        text += block.tokens
        if block.finish_reason:
            return text, block.finish_reason, stats


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_of_a_schema(session: Session, compiler: GrammarCompiler, temperature: float) -> None:
    wanted = Adjustments(grammar=compiler.json_schema(SCHEMA), frequency_penalty=0.2)
    prompt = session.tokenizer.encode("The answer as JSON:")
    finished = accepted = 0
    for seed in range(2):
        params = SamplingParams(temperature=temperature, seed=seed)
        text, reason, _ = run(session, prompt, wanted, params, 0)
        for draft_n in (1, 4):
            again, _, stats = run(session, prompt, wanted, params, draft_n)
            assert again == text
            accepted += stats.draft_n_accepted
        if reason == "stop":
            value = json.loads(session.tokenizer.decode(text))
            assert list(value) == ["name", "n", "ok"] and isinstance(value["n"], int) and value["ok"] in (True, False)
            finished += 1
    assert finished and accepted


def test_a_grammar_that_begins_after_the_thinking(session: Session, compiler: GrammarCompiler) -> None:
    """Free text until </think>, forced here; then JSON; drafts across the border change nothing."""
    tokenizer: Tokenizer = session.tokenizer
    (end_think,) = tokenizer.encode("</think>")
    source = 'start: SPACE? "{\\"a\\": " /[0-9]{1,3}/ "}"\nSPACE: /[ \\n]{1,4}/\n'
    wanted = Adjustments(grammar=compiler.lark(source), grammar_after=end_think)
    prompt = tokenizer.encode("<|im_start|>user\nWhat does len do?<|im_end|>\n<|im_start|>assistant\n<think>\n")
    for seed in range(3):
        params = SamplingParams(temperature=1.0, seed=seed)
        text, reason, _ = run(session, prompt, wanted, params, 0, n=60)
        for draft_n in (1, 4):
            assert run(session, prompt, wanted, params, draft_n, n=60)[0] == text
        at = text.index(end_think)
        assert at > 3 and reason == "stop"
        assert 0 <= json.loads(tokenizer.decode(text[at + 1 :]))["a"] <= 999


@pytest.mark.parametrize("draft_n", (0, 1, 4))
def test_a_text_does_not_end_before_its_grammar_begins(
    session: Session, compiler: GrammarCompiler, draft_n: int
) -> None:
    """The model would rather end than think on, and rather end its thinking than go on with it."""
    tokenizer: Tokenizer = session.tokenizer
    (end_think,) = tokenizer.encode("</think>")
    bias = {**dict.fromkeys(tokenizer.end_token_ids, 90.0), end_think: 60.0}
    grammar = compiler.lark('start: "{\\"a\\": " /[0-9]{1,3}/ "}"\n')
    wanted = Adjustments(grammar=grammar, grammar_after=end_think, logit_bias=bias)
    prompt = tokenizer.encode("<|im_start|>user\nWhat does len do?<|im_end|>\n<|im_start|>assistant\n<think>\n")
    text, reason, _ = run(session, prompt, wanted, SamplingParams(temperature=0.0, seed=0), draft_n, n=40)
    assert text[0] == end_think and reason == "stop"
    assert 0 <= json.loads(tokenizer.decode(text[1:]))["a"] <= 999


def test_grammar_state_goes_back_and_forth(compiler: GrammarCompiler, session: Session) -> None:
    """Any pushes and pops lead to the masks of a fresh state, also from where only an end token may follow."""
    grammar = compiler.json_schema(SCHEMA)
    text = session.tokenizer.encode('{"name": "ab", "n": 12, "ok": true}')
    masks = [grammar.start().allowed()]
    for i in range(len(text)):
        fresh = grammar.start()
        for token in text[: i + 1]:
            fresh.push(token)
        masks.append(fresh.allowed())
    assert set(np.flatnonzero(masks[-1]).tolist()) == set(session.tokenizer.end_token_ids)
    state, length, rng = grammar.start(), 0, np.random.default_rng(0)
    for _ in range(60):
        target = int(rng.integers(0, len(text) + 1))
        if target < length:
            state.pop(length - target)
        for token in text[length:target]:
            state.push(token)
        length = target
        assert np.array_equal(state.allowed(), masks[length])


class _Fragile:
    """A grammar and its state at once: all is allowed, but some texts lead to where nothing can follow."""

    vocab_size = VOCAB

    def __init__(self, bad: int) -> None:
        self._bad, self._text = bad, []

    def start(self) -> _Fragile:
        return _Fragile(self._bad)

    def push(self, token: int) -> None:
        self._text.append(token)

    def pop(self, n: int) -> None:
        del self._text[len(self._text) - n :]

    def allowed(self, patience_s: float = 0.0) -> np.ndarray:
        if self._text[-2:] == [self._bad, self._bad] or sum(self._text) % 41 == 7:
            raise UsageError("nothing can follow")
        return np.ones(VOCAB, bool)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_grammar_that_ends_in_nothing_ends_alike_for_any_draft(temperature: float) -> None:
    """Drafts that lead there do no harm; a text that does is given out up to there, then it fails."""
    lengths = set()
    for seed in range(30):
        outcomes = set()
        for draft_n in (0, 1, 4):
            rng = np.random.default_rng(seed)
            twist = lambda token, _: token if rng.random() < 0.7 else int(rng.integers(VOCAB))  # noqa: E731, B023
            wanted = Adjustments(grammar=_Fragile(seed % VOCAB), logit_bias={END: -100, seed % 7: 1.0})
            sampler = SequenceSampler(SamplingParams(temperature=temperature, seed=seed), wanted, PROMPT, VOCAB, (END,))
            outcomes.add(until_it_fails(sampler, draft_n, ToyHead(twist)))
        assert len(outcomes) == 1
        lengths.add(len(outcomes.pop()))
    assert len(lengths) > 5


def until_it_fails(sampler: SequenceSampler, draft_n: int, head: ToyHead) -> tuple[int, ...]:
    generation = Generation(
        ToyTrunk(context_size=400),
        head,
        PROMPT,
        sampler=sampler,
        draft_sampler=sampler.draft,
        controller=FixedDraft(draft_n),
        max_tokens=-1,
        end_token_ids=(END,),
        context_size=400,
        stats=SpecStats(),
    )
    text: list[int] = []
    with pytest.raises(UsageError, match="nothing can follow"):
        while True:
            text += generation.step().tokens
    return tuple(text)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "no such type"},
        {"$ref": "http://localhost:1/x"},
        {"$ref": "file:///etc/passwd"},
        {"if": {"type": "object"}},
        {"type": "object", "minProperties": "x"},
    ],
)
def test_schemas_that_cannot_be_followed(compiler: GrammarCompiler, schema: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="not a grammar that can be followed"):
        compiler.json_schema(schema)
