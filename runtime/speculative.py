"""The speculative loop: draft with the NextN head, verify in one trunk pass, accept, commit, roll back the rest.

The text never depends on the drafts. Every emitted token is the trunk's own choice, made by a sampler that is a pure
function of (logits, position), after a state in which only emitted tokens were kept. So any draft, any number of
drafts and any split into rounds give the tokens of plain decoding (draft_n = 0).

Counting follows llama.cpp's server: a round drafts the wanted number, clipped by what the token budget and the context
leave (a round of n drafts emits up to n + 1 tokens); accepted are the leading drafts that the trunk agrees with, the
bonus token excluded, counted whole even where an end token or the budget cuts the block. A loop that never clips
drafts more in its last rounds: sum the rounds (`Controller.observe` sees each) until both emitted as many tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engines.errors import UsageError
from runtime.controller import Controller, Round
from runtime.engine import DraftEngine, Pass, RoundEngine, Sampler, TrunkEngine

MAX_TOKENS_UNLIMITED = -1


@dataclass
class SpecStats:
    """Counters of one generation; the loop fills them as it goes. Names as llama.cpp's timings where it has them.

    predicted_n counts emitted tokens (an end token is not emitted), the first of which comes from the prompt pass;
    predicted_ms is the time of the rounds alone, without the consumer's. offered[i] and accepted[i] count the rounds
    in which draft i + 1 was made and accepted. finish_reason: "stop" (end token), "length" (budget or context),
    "cancelled" (asked to, or the iterator was closed early).
    """

    prompt_n: int = 0
    prompt_ms: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0
    draft_n: int = 0
    draft_n_accepted: int = 0
    verify_steps: int = 0
    offered: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    finish_reason: str = "cancelled"

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts / drafted, bonus token excluded; 0 when nothing was drafted."""
        return self.draft_n_accepted / self.draft_n if self.draft_n else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a verify pass yielded on average: its accepted drafts and the trunk's own."""
        return 1.0 + self.draft_n_accepted / self.verify_steps if self.verify_steps else 0.0

    @property
    def predicted_per_second(self) -> float:
        return 1000.0 * self.predicted_n / self.predicted_ms if self.predicted_ms else 0.0

    def timings(self) -> dict[str, float]:
        """The counters as one flat object, llama.cpp's names first."""
        return {
            "prompt_n": self.prompt_n,
            "prompt_ms": round(self.prompt_ms, 3),
            "predicted_n": self.predicted_n,
            "predicted_ms": round(self.predicted_ms, 3),
            "predicted_per_second": round(self.predicted_per_second, 3),
            "draft_n": self.draft_n,
            "draft_n_accepted": self.draft_n_accepted,
            "verify_steps": self.verify_steps,
            "acceptance_rate": round(self.acceptance_rate, 6),
            "tokens_per_step": round(self.tokens_per_step, 6),
        }

    def count(self, done: Round) -> None:
        """Add one round."""
        self.verify_steps += 1
        self.draft_n += done.draft_n
        self.draft_n_accepted += done.n_accept
        self.predicted_ms += done.draft_ms + done.verify_ms
        for counts, reached in ((self.offered, done.draft_n), (self.accepted, done.n_accept)):
            counts.extend([0] * (done.draft_n - len(counts)))
            for i in range(reached):
                counts[i] += 1


def generate(
    trunk: TrunkEngine,
    draft: DraftEngine | None,
    prompt: Sequence[int],
    *,
    sampler: Sampler,
    controller: Controller,
    max_tokens: int,
    end_token_ids: Collection[int],
    context_size: int,
    stats: SpecStats,
    cancelled: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.perf_counter,
) -> Generator[int, None, None]:
    """Yield the tokens that follow ``prompt``, block by block.

    prompt: 1..context_size ids. max_tokens: at most so many (-1: until the context is full: prompt and text together
    hold context_size tokens). end_token_ids: the text ends before the first of them. draft: None decodes plainly.
    stats: a fresh SpecStats. cancelled: asked between passes. clock: seconds.

    Whenever it ends after the prompt pass, the trunk has committed the prompt and all chosen tokens but the last.
    Raises UsageError for what cannot be served (at the first token), and what engines and sampler raise.
    """
    budget = token_budget(len(prompt), max_tokens, context_size)
    trunk.start(sampler)
    head = _Head(draft, sampler, prompt[0])
    chosen = _prompt_pass(trunk, head, prompt, stats, cancelled, clock)
    if chosen is None:
        return
    if budget == 0:
        stats.finish_reason = "length"
        return

    controller.begin()
    block = [chosen]
    while True:
        ended = block[-1] in end_token_ids
        for token in block[:-1] if ended else block:
            stats.predicted_n += 1
            yield token
        if ended or stats.predicted_n == budget:
            stats.finish_reason = "stop" if ended else "length"
            return
        if cancelled():
            return

        began = clock()
        limit = min(budget - stats.predicted_n, trunk.max_rows) - 1
        n = controller.draft_n(limit) if draft else 0
        drafts, n_rows, result, draft_ms = head.draft_and_verify(trunk, block[-1], n, began, clock)
        n_accept = _leading_matches(drafts, result.choices)
        block = _through_end(result.choices[: n_accept + 1].tolist(), end_token_ids)
        trunk.commit(len(block))
        round_ms = 1000.0 * (clock() - began)
        head.take(block, result.hidden[: len(block)])
        done = Round(n, n_accept, n_rows, draft_ms, round_ms - draft_ms)
        stats.count(done)
        controller.observe(done)


def token_budget(prompt_n: int, max_tokens: int, context_size: int) -> int:
    """How many tokens may be generated. Raises UsageError for an empty or over-long prompt or a bad max_tokens."""
    if prompt_n == 0:
        raise UsageError("the prompt holds no token; give some text or ids")
    if prompt_n > context_size:
        raise UsageError(
            f"the prompt has {prompt_n} tokens, the context holds {context_size}; shorten it or raise --ctx-size"
        )
    if max_tokens < MAX_TOKENS_UNLIMITED:
        raise UsageError(
            f"the number of tokens to predict must be -1 (until the context is full) or more: {max_tokens}"
        )
    room = context_size - prompt_n
    return room if max_tokens == MAX_TOKENS_UNLIMITED else min(max_tokens, room)


def _prompt_pass(
    trunk: TrunkEngine,
    head: _Head,
    prompt: Sequence[int],
    stats: SpecStats,
    cancelled: Callable[[], bool],
    clock: Callable[[], float],
) -> int | None:
    """The trunk's choice after the prompt, or None when cancelled. Trunk and head take the prompt in chunks."""
    began = clock()
    chosen = None
    for first in range(0, len(prompt), trunk.prefill_chunk):
        if cancelled():
            return None
        chunk = prompt[first : first + trunk.prefill_chunk]
        result = trunk.prefill(chunk)
        chosen = int(result.choices[-1])
        # The head pairs a hidden row with the token after it; after the prompt's last row that is the chosen one.
        following = prompt[first + 1 : first + len(chunk) + 1]
        head.take(following if len(following) == len(chunk) else [*following, chosen], result.hidden)
        head.feed(keep=1)
        stats.prompt_n += len(chunk)
        stats.prompt_ms = 1000.0 * (clock() - began)
    return chosen


def _leading_matches(drafts: Sequence[int], choices: np.ndarray) -> int:
    """How many drafts, from the first on, are what the trunk chose at the row before them."""
    for i, token in enumerate(drafts):
        if token != choices[i]:
            return i
    return len(drafts)


def _through_end(block: list[int], end_token_ids: Collection[int]) -> list[int]:
    """The block up to its first end token, that token included."""
    for i, token in enumerate(block):
        if token in end_token_ids:
            return block[: i + 1]
    return block


class _Head:
    """The draft head and the true rows that it has not taken yet. Without an engine it keeps and drafts nothing.

    A round's tokens and their hidden rows wait here and ride along with the next draft, where they cost next to
    nothing. While drafting is off they pile up and are fed in whole chunks.
    """

    def __init__(self, engine: DraftEngine | None, sampler: Sampler, first_token: int) -> None:
        self._engine = engine
        self._tokens: list[int] = []
        self._hidden: list[Any] = []
        if engine:
            engine.start(sampler)
            self.take([first_token], engine.zero_hidden())

    def take(self, tokens: Sequence[int], hidden: Any) -> None:
        """Queue rows: tokens [T], each with the trunk's hidden of the position before it, [T, D]."""
        if self._engine:
            self._tokens.extend(int(token) for token in tokens)
            self._hidden.append(hidden)

    def feed(self, keep: int) -> None:
        """Let the engine take queued rows, in chunks, until the last ``keep`` are left."""
        n = len(self._tokens) - keep
        if not self._engine or n <= 0:
            return
        hidden = self._joined()
        for first in range(0, n, self._engine.prefill_chunk):
            piece = slice(first, min(first + self._engine.prefill_chunk, n))
            self._engine.prefill(self._tokens[piece], hidden[piece])
        # The rows of a pass last until the next one, a copy stays.
        self._tokens, self._hidden = self._tokens[n:], [self._engine.join([hidden[n:]])]

    def draft_and_verify(
        self, trunk: TrunkEngine, last: int, n: int, began: float, clock: Callable[[], float]
    ) -> tuple[list[int], int, Pass, float]:
        """Draft n tokens, let the trunk verify them after ``last``: (drafts, rows taken, outcome, ms of drafting).

        Drafting and verifying are one call where the engines offer it. began: the round's, on ``clock``."""
        n_queued = len(self._tokens)
        if n and isinstance(self._engine, RoundEngine) and n_queued <= self._engine.prefill_chunk:
            both = self._engine.draft_and_verify(trunk, self._tokens, self._joined(), n)
            if both is not None:
                self._tokens, self._hidden = [], []
                draft_ms = both.draft_share * 1000.0 * (clock() - began)
                return [int(token) for token in both.drafts], n_queued, both.result, draft_ms
        drafts, n_rows = self.draft(n)
        draft_ms = 1000.0 * (clock() - began)
        return drafts, n_rows, trunk.verify([last, *drafts]), draft_ms

    def draft(self, n: int) -> tuple[list[int], int]:
        """Take the queued rows and draft n tokens after them: (drafts, rows taken).

        n = 0 drafts nothing and keeps the rows, unless there are more than the engine takes at once.
        """
        if not self._engine:
            return [], 0
        n_queued = len(self._tokens)
        if n_queued > self._engine.prefill_chunk:
            self.feed(keep=1)
        if n == 0:
            self._hidden[-1:] = [self._engine.join(self._hidden[-1:])]
            return [], n_queued - len(self._tokens)
        drafts = self._engine.draft(self._tokens, self._joined(), n)
        assert len(drafts) == n, f"asked for {n} drafts, got {len(drafts)}"
        self._tokens, self._hidden = [], []
        return [int(token) for token in drafts], n_queued

    def _joined(self) -> Any:
        assert self._engine is not None
        return self._hidden[0] if len(self._hidden) == 1 else self._engine.join(self._hidden)
