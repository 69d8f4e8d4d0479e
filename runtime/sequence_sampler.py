"""Token choice that looks back: penalties, biases and grammars, all functions of the tokens before the chosen one.

One object serves a sequence, trunk and draft head alike. It knows the prompt and remembers what it chose; a call begins
at a position and forgets what it chose from there on. Since every token of a text is the trunk's choice, what is
remembered below that position is the text itself, drafts of the same round appended while the head drafts. The rows of
a verify pass are taken in order, each after the choices of those before it: a row counts only if all drafts before it
were these choices. So drafting changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from engines.errors import UsageError
from runtime.engine import NO_CHOICE
from runtime.grammar import Grammar
from runtime.grammar_state import GrammarState, NotYetError
from runtime.sampling import F32, I64, ParamsSampler, SamplingParams, choose

TOP_LOGPROBS_MAX = 20
# For a grammar's answer in a row that others wait for. A round ends before a row whose answer takes longer.
_PATIENCE_S = 0.02
# Finite logits stay finite. Tokens that a cut-down head does not know (-inf) end up below all others, but where a
# grammar allows no others, one of them is the guess.
_LEAST, _LARGEST = -1e38, float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Adjustments:
    """What changes the logits of a row before a token is chosen, in this order.

    repetition_penalty  0.01..100; logits of tokens in prompt or text are divided by it where positive, else multiplied
    frequency_penalty   -2..2; taken off a token's logit for every time it is in the text (not the prompt)
    presence_penalty    -2..2; taken off once if it is there at all
    logit_bias          token id -> -100..100, added
    grammar             what it does not allow cannot be chosen; begins after ``grammar_after``, a token, if given:
                        before it the text cannot end
    top_logprobs        None, or how many of the most probable tokens to report: of the logits as the model gave them
    """

    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: Grammar | None = None
    grammar_after: int | None = None
    top_logprobs: int | None = None

    def validate(self, vocab_size: int) -> None:
        """Raise UsageError at the first value that has no meaning."""
        if not 0.01 <= self.repetition_penalty <= 100:
            raise UsageError(f"repetition_penalty must be from 0.01 to 100, got {self.repetition_penalty!r}")
        for name in ("frequency_penalty", "presence_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise UsageError(f"{name} must be from -2 to 2, got {getattr(self, name)!r}")
        for token, bias in self.logit_bias.items():
            if not 0 <= token < vocab_size:
                raise UsageError(f"logit_bias names token {token}; this model has ids 0 to {vocab_size - 1}")
            if not -100 <= bias <= 100:
                raise UsageError(f"logit_bias of token {token} must be from -100 to 100, got {bias!r}")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= TOP_LOGPROBS_MAX:
            raise UsageError(f"top_logprobs must be from 0 to {TOP_LOGPROBS_MAX}, got {self.top_logprobs!r}")

    @property
    def change_nothing(self) -> bool:
        """Whether a sampler that does not look back chooses and reports the same."""
        return self == Adjustments()


@dataclass(frozen=True)
class TokenLogprob:
    """Natural logarithm of a chosen token's probability, and the most probable tokens with theirs, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class SequenceSampler:
    """Token choice of one sequence after ``prompt`` (see `runtime.engine.Sampler`): this object for the trunk,
    `draft` for its head. Parameters must be resolved and valid."""

    def __init__(
        self,
        params: SamplingParams,
        adjustments: Adjustments,
        prompt: Sequence[int],
        vocab_size: int,
        end_token_ids: Collection[int],
    ) -> None:
        self._params, self._adjustments, self._ends = params, adjustments, frozenset(end_token_ids)
        self._prompt_length = len(prompt)
        self._tokens: list[int] = []
        self._counts = np.zeros(vocab_size, np.int64)
        self._in_prompt = np.bincount(np.asarray(prompt, np.int64), minlength=vocab_size) > 0
        self._bias_ids = np.fromiter(adjustments.logit_bias.keys(), np.int64)
        self._biases = np.fromiter(adjustments.logit_bias.values(), np.float64)
        self._grammar = _GrammarGate(adjustments, self._ends) if adjustments.grammar else None
        self.logprobs: dict[int, TokenLogprob] = {}  # by place in the text, of the trunk's choices

    @property
    def reports(self) -> bool:
        """Whether ``logprobs`` is filled."""
        return self._adjustments.top_logprobs is not None

    @property
    def waits(self) -> bool:
        """Whether `prepare` may say no."""
        return self._grammar is not None

    def prepare(self, length: int) -> bool:
        """Whether a choice after ``length`` tokens of prompt and text, the first of those known here, is made without
        a wait. If not, call again later: what it takes is under way."""
        if self._grammar is None:
            return True
        self._forget(length - self._prompt_length)
        return self._grammar.prepare()

    def close(self) -> None:
        """Free what the grammar takes. The object can still be used."""
        if self._grammar is not None:
            self._grammar.close()

    def __call__(self, logits: F32, positions: I64) -> I64:
        return self._choose(logits, positions, report=self.reports)

    def draft(self, logits: F32, positions: I64) -> I64:
        """The head's choices: the same rule, not reported; where no choice can be made, or not soon, any."""
        try:
            return self._choose(logits, positions, report=False, may_wait=False)
        except (UsageError, NotYetError):
            return choose(logits, positions, self._params)

    def _choose(self, logits: F32, positions: I64, report: bool, may_wait: bool = True) -> I64:
        """may_wait: the first row may take its time, for it counts."""
        first = int(positions[0]) - self._prompt_length
        if first < 0:  # inside the prompt, where nobody asks
            return choose(logits, positions, self._params)
        self._forget(first)
        choices = np.full(len(logits), NO_CHOICE, np.int64)
        for i in range(len(logits)):
            row = slice(i, i + 1)
            if self._tokens and self._tokens[-1] in self._ends:  # past the end of the text, where nobody looks
                choices[i:] = choose(logits[i:], positions[i:], self._params)
                break
            try:
                adjusted = self._adjusted(logits[row], may_wait and i == 0)
                token = int(choose(adjusted, positions[row], self._params)[0])
                self._remember(token)
            except (UsageError, NotYetError):  # the grammar has come to its end, but in a row that may not count
                if i == 0:
                    raise
                break
            if report:
                self.logprobs[first + i] = _logprob(logits[i], token, self._adjustments.top_logprobs or 0)
            choices[i] = token
        return choices

    def _forget(self, length: int) -> None:
        """Take back all but the first ``length`` tokens."""
        for token in self._tokens[length:]:
            self._counts[token] -= 1
        del self._tokens[length:]
        if self._grammar:
            self._grammar.forget(length)

    def _remember(self, token: int) -> None:
        self._tokens.append(token)
        self._counts[token] += 1
        if self._grammar and token not in self._ends:
            self._grammar.push(token, len(self._tokens))

    def _adjusted(self, logits: F32, may_wait: bool) -> F32:
        """One row [1, V] as the adjustments leave it. Computed in binary64, rounded once."""
        wanted, row = self._adjustments, logits[0].astype(np.float64)
        if wanted.repetition_penalty != 1.0:
            ids = np.flatnonzero(self._in_prompt | (self._counts > 0))
            held = row[ids]
            row[ids] = np.where(held > 0, held / wanted.repetition_penalty, held * wanted.repetition_penalty)
        if wanted.frequency_penalty or wanted.presence_penalty:
            ids = np.flatnonzero(self._counts)
            row[ids] -= self._counts[ids] * wanted.frequency_penalty + wanted.presence_penalty
        row[self._bias_ids] += self._biases
        np.clip(row, _LEAST, _LARGEST, out=row)
        if self._grammar:
            row[~self._grammar.allowed(may_wait)] = -np.inf
        return row.astype(np.float32)[None]


class _GrammarGate:
    """The grammar's state over a text, which may have to wait for a token that ends a think block."""

    def __init__(self, adjustments: Adjustments, ends: Collection[int]) -> None:
        assert adjustments.grammar is not None
        self._after = adjustments.grammar_after
        # A text that ended in its think block would lack what the grammar demands.
        self._before = np.ones(adjustments.grammar.vocab_size, bool)
        self._before[list(ends)] = False
        self._state: GrammarState = adjustments.grammar.start()
        self._begin: int | None = 0 if self._after is None else None  # where the grammar's part of the text begins
        self._length = 0  # of the text, without an end token

    def push(self, token: int, length: int) -> None:
        """The text is ``length`` tokens long with this one."""
        self._length = length
        if self._begin is not None:
            self._state.push(token)
        elif token == self._after:
            self._begin = length

    def forget(self, length: int) -> None:
        """Take back all but the first ``length`` tokens."""
        if length >= self._length:
            return
        if self._begin is not None:
            self._state.pop(self._length - max(length, self._begin))
            if self._after is not None and length < self._begin:
                self._begin = None
        self._length = length

    def prepare(self) -> bool:
        return self._begin is None or self._state.prepare()

    def allowed(self, may_wait: bool) -> np.ndarray:
        if self._begin is None:
            return self._before
        return self._state.allowed() if may_wait else self._state.allowed(_PATIENCE_S)

    def close(self) -> None:
        self._state.close()


def _logprob(row: F32, token: int, n_top: int) -> TokenLogprob:
    """Of one row of logits [V]. The lower id comes first among equals."""
    shifted = row.astype(np.float64) - float(row.max())
    logprobs = shifted - np.log(np.exp(shifted).sum())
    top: list[int] = []
    if n_top:
        least = np.partition(logprobs, len(row) - n_top)[len(row) - n_top] if n_top < len(row) else -np.inf
        ids = np.flatnonzero(logprobs >= least)
        top = ids[np.argsort(-logprobs[ids], kind="stable")][:n_top].tolist()
    return TokenLogprob(token, float(logprobs[token]), tuple((each, float(logprobs[each])) for each in top))


def make_sampler(
    params: SamplingParams,
    adjustments: Adjustments,
    prompt: Sequence[int],
    vocab_size: int,
    end_token_ids: Collection[int],
) -> SequenceSampler | ParamsSampler:
    """The simplest sampler that does what is asked: one that does not look back can run on the device."""
    if adjustments.change_nothing:
        return ParamsSampler(params)
    return SequenceSampler(params, adjustments, prompt, vocab_size, end_token_ids)
