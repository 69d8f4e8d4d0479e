"""The interface between the speculative loop and whatever computes: one trunk engine, one draft engine.

Both hold the state of one sequence; where they are `SharedTrunk` and `SharedDraft`, `another` makes engines for one
more over the same weights, and state can be put aside and taken up again. A *pass* processes the next T tokens of that
sequence; a trunk pass is provisional until `commit` says how many of its tokens stay. Positions count from 0;
`position` is the number of committed tokens, equal to the KV length.

Token choice belongs to the engine, because a GPU engine keeps logits on the device: the sampler given to `start` is a
function of logits, position and the tokens before it, so plain and speculative runs choose alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from engines.errors import NumericError
from runtime.queued_work import Queued
from runtime.sampling import check_logits

SEQUENCES_DEFAULT = 4

# (logits [R, V] float32, positions [R] of the tokens being chosen) -> token ids [R]. The positions of a call follow
# each other. A choice may depend on the tokens before it: those of the rows before it in the same call, and
# before these what the calls before chose for the positions below the first.
# NO_CHOICE where none can be made after rows that may not count; in the first row that is an exception. In drafts it
# stands for what could not be drafted.
NO_CHOICE = -1
Sampler = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Pass(NamedTuple):
    """Outcome of one trunk pass over T tokens.

    choices: the trunk's own token after each row, T of them (after a prefill pass one, the last row's). NO_CHOICE
    from a row on whose logits are damaged (NaN, infinite): plain decoding may never see it; if it does, the next pass
    begins there.
    hidden: rows of the trunk's hidden state after output_norm, [T, D]; opaque to the loop, which only slices rows
    (``hidden[a:b]``) and hands them to the draft engine. They are valid until the trunk's next pass; `DraftEngine.join`
    makes a copy that stays.
    """

    choices: list[int]
    hidden: Any


class DraftedPass(NamedTuple):
    """Outcome of drafting and verifying in one go. draft_share: part of the time that went into drafting, 0..1."""

    drafts: list[int]
    result: Pass
    draft_share: float


@dataclass(frozen=True)
class EngineLimits:
    """What engines were built for: tokens of context, drafts a round."""

    context: float = math.inf
    draft_n: float = math.inf


@dataclass(frozen=True)
class PassCosts:
    """Milliseconds of the parts of a round of n drafts, at place n: its verify pass of n + 1 rows, and drafting."""

    verify_ms: tuple[float, ...]
    draft_ms: tuple[float, ...]  # draft_ms[0] == 0


class TrunkEngine(Protocol):
    """The trunk: prefill, and verify passes of 1..max_rows tokens that can be rolled back."""

    context_size: int
    max_rows: int
    prefill_chunk: int

    @property
    def position(self) -> int:
        """Number of committed tokens."""

    def start(self, sampler: Sampler) -> None:
        """Forget the sequence; begin a new one at position 0."""

    def prefill(self, tokens: Sequence[int]) -> Pass:
        """Process and commit 1..prefill_chunk tokens. Choice of the last row only."""

    def verify(self, tokens: Sequence[int]) -> Pass:
        """Process 1..max_rows tokens provisionally. T == 1 is plain decoding. Needs `commit` before the next pass.

        Raises NumericError for damaged logits in the first row."""

    def commit(self, n_keep: int) -> None:
        """Keep the first n_keep (1..T) tokens of the last verify pass; every effect of the others is undone."""


class DraftEngine(Protocol):
    """The NextN head. A row is (token at position p, hidden of position p - 1); it guesses the token at p + 1."""

    prefill_chunk: int

    @property
    def position(self) -> int:
        """Rows the head has taken with true trunk hiddens; drafted rows past it are dead."""

    def start(self, sampler: Sampler) -> None:
        """Forget the sequence."""

    def prefill(self, tokens: Sequence[int], hidden: Any) -> None:
        """Take 1..prefill_chunk rows (tokens [T], true hiddens of the position before each, [T, D]); no draft."""

    def draft(self, tokens: Sequence[int], hidden: Any, n: int) -> np.ndarray:
        """Take 1..prefill_chunk true rows as in `prefill`, then draft n >= 1 tokens after them; ids int64 [n].

        Raises NumericError for damaged logits after the true rows; after the head's own guesses they only end the
        drafts: NO_CHOICE from there on, which is no token."""

    def guess(self, tokens: Sequence[int], hidden: Any) -> np.ndarray | None:
        """Take rows as `prefill`, and say what would be drafted after each of the last of them, as far as the engine
        tells: ids int64. None: not with this sampler; nothing was done. Raises NumericError for damaged logits."""

    def zero_hidden(self) -> Any:
        """One all-zero hidden row [1, D]: what stands before the first token of a sequence."""

    def join(self, parts: Sequence[Any]) -> Any:
        """Concatenate hidden rows along axis 0; always a copy."""

    def put_aside(self, kept: Any, rows: Any) -> Any:
        """Hidden rows that wait for their turn: ``kept``, which the last call returned, with a copy of ``rows`` behind
        it; kept None: of ``rows`` alone. Cheap, for it is done in every round without drafts. Up to prefill_chunk rows
        and those of a pass; valid until the next call with None."""


@runtime_checkable
class QueuingTrunk(TrunkEngine, Protocol):
    """A trunk whose passes can be begun and waited for later. Hidden rows stay while one more pass of one row runs."""

    def begin_verify(self, tokens: Sequence[int]) -> Queued[Pass]:
        """As `verify`, which it begins."""


@runtime_checkable
class RoundEngine(DraftEngine, Protocol):
    """A draft engine that can also run a whole round, of its drafts and the trunk's verify pass, in one go."""

    def begin_round(self, trunk: Any, tokens: Sequence[int], hidden: Any, n: int) -> Queued[DraftedPass] | None:
        """As `draft`, then the trunk's `verify` of [tokens[-1], *drafts], all of which it begins. None: not with these
        samplers; nothing was done."""


@dataclass(frozen=True)
class SavedState:
    """State that an engine put aside: opaque, of ``nbytes``, never changed; ``count`` rows of KV caches (0: none)."""

    data: Any
    nbytes: int
    count: int = 0


@runtime_checkable
class SharedTrunk(TrunkEngine, Protocol):
    """A trunk whose weights serve several sequences.

    One thread makes the passes of all its sequences, in any order: what a pass returned (hidden rows too) stays valid
    until the next pass of the same sequence. State that was loaded and then extended is bit-equal to that of a
    sequence that took all its tokens itself: wherever it was saved, or, unless ``resumes_anywhere``, if both took the
    same passes up to there (`runtime.prompt_passes`).

    num_sequences: so many were planned for; one more may not find memory.
    """

    num_sequences: int
    resumes_anywhere: bool

    def another(self) -> SharedTrunk:
        """A trunk for one more sequence, as after `start`. Raises ResourceError when there is no memory for it."""

    def save_rows(self, first: int) -> SavedState:
        """A copy of the KV rows first .. position - 1."""

    def save_recurrent(self) -> SavedState:
        """A copy of the state that has no rows: Gated DeltaNet and convolution after the committed tokens."""

    def load(self, rows: Sequence[SavedState], recurrent: SavedState) -> None:
        """Take up a sequence: rows from position 0 on, part by part, and the state at their end. After `start`."""


@runtime_checkable
class SharedDraft(DraftEngine, Protocol):
    """A draft head whose weights serve several sequences; see `SharedTrunk`."""

    def another(self, trunk: Any) -> SharedDraft:
        """A head for one more sequence, that of ``trunk``, which another trunk's `another` made."""

    def save_rows(self, first: int) -> SavedState:
        """A copy of the rows first .. position - 1."""

    def load(self, rows: Sequence[SavedState]) -> None:
        """Take up a sequence's rows, part by part. After `start`."""


@runtime_checkable
class TimedTrunk(TrunkEngine, Protocol):
    """A trunk whose passes can be timed on the device alone."""

    def time_verify(self, rows: int, repeats: int) -> list[float]:
        """Milliseconds of each of ``repeats`` verify passes of ``rows`` rows at position 0, with token choice and the
        copies of a few numbers to and from the device. Ends as after `start`."""


@runtime_checkable
class TimedDraft(DraftEngine, Protocol):
    """A draft head whose drafts can be timed on the device alone."""

    def time_draft(self, n: int, repeats: int) -> list[float]:
        """Milliseconds of each of ``repeats`` times n drafts, as `TimedTrunk.time_verify`."""


def any_token(logits: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The sampler for passes whose choices are not looked at, the only one that is asked about damaged logits."""
    return np.zeros(len(logits), np.int64)


def of_finite(sampler: Sampler, masked: Callable[[np.ndarray], np.ndarray] | None = None) -> Sampler:
    """``sampler`` as engines ask it: about logits as the model gave them, with a NumericError where one is NaN or
    infinite. Only then may they be masked with -inf: by ``masked``, or by the sampler itself."""

    def choose(logits: np.ndarray, positions: np.ndarray) -> np.ndarray:
        if sampler is not any_token:
            check_logits(logits, positions)
        return sampler(masked(logits) if masked else logits, positions)

    return choose


def choices_that_count(sampler: Sampler, logits: np.ndarray, positions: np.ndarray, tokens: Sequence[int]) -> list[int]:
    """What ``sampler`` chooses after each row of a pass over ``tokens`` whose rows do not depend on those after them.

    Where it refuses the rows with a NumericError, it is asked row by row, up to the first that it refuses alone, or
    whose choice is not the next token; behind that stands NO_CHOICE. Raises NumericError if it refuses the first."""
    try:
        return np.asarray(sampler(logits, positions), np.int64).tolist()
    except NumericError:
        if len(logits) == 1:
            raise
    choices = [NO_CHOICE] * len(logits)
    for i in range(len(logits)):
        try:
            choices[i] = int(sampler(logits[i : i + 1], positions[i : i + 1])[0])
        except NumericError:
            if i == 0:
                raise
            break
        if i + 1 < len(tokens) and choices[i] != tokens[i + 1]:
            break
    return choices
