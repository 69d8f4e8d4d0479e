"""The speculative loop: draft with the NextN head, verify in one trunk pass, accept, commit, roll back the rest.

The text never depends on the drafts. Every emitted token is the trunk's own choice, made by a sampler that is a pure
function of (logits, position) and of the tokens before it, after a state in which only emitted tokens were kept. So any
draft, any number of drafts and any split into rounds give the tokens of plain decoding (draft_n = 0).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any, NamedTuple, Protocol

from engines.errors import UsageError
from runtime.controller import Controller, Round
from runtime.engine import NO_CHOICE, DraftEngine, QueuingTrunk, Sampler, SharedTrunk, TrunkEngine
from runtime.head_queue import BegunRound, HeadQueue
from runtime.prompt_passes import fixed_pass_ends, last_at_or_before
from runtime.spec_stats import SpecStats as SpecStats

MAX_TOKENS_UNLIMITED = -1


class Block(NamedTuple):
    """Tokens that a step emitted (none while the prompt is read), the first ``num_drafted`` of them accepted drafts.
    finish_reason: "stop" or "length" with the last."""

    tokens: list[int]
    finish_reason: str | None = None
    num_drafted: int = 0


class PrefixStore(Protocol):
    """State of earlier sequences, by their tokens."""

    def resume(self, trunk: TrunkEngine, draft: DraftEngine | None, prompt: Sequence[int]) -> tuple[int, Any]:
        """Load the longest known prefix that leaves at least one token of ``prompt`` to process into engines just
        started: (its length, the head's hidden row [1, D] at its end). (0, None): none known, nothing done."""

    def save(self, trunk: TrunkEngine, draft: DraftEngine | None, tokens: Sequence[int], hidden: Any) -> None:
        """Keep a copy of the engines' state after ``tokens``. Trunk and head are level; hidden: [1, D], as above."""


class Generation:
    """One sequence, a step at a time: a chunk of the prompt, or a round. Steps of several may be interleaved.

    The trunk has then committed the prompt and all chosen tokens but the last.
    """

    def __init__(
        self,
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
        clock: Callable[[], float] = time.perf_counter,
        draft_sampler: Sampler | None = None,
        prefixes: PrefixStore | None = None,
        save_at: Collection[int] = (),
        message_ends: Collection[int] = (),
        overlap: bool = False,
    ) -> None:
        """See `generate`. draft_sampler: the head's, if it is another. save_at: lengths at which the prompt's state is
        saved to ``prefixes``, or somewhat before where engines cannot resume just anywhere. overlap: where engines can,
        a step begins the next round, so that the device works while the caller looks at the tokens; between steps, the
        engines are then good for steps of other sequences alone. Raises UsageError for what cannot be served, and what
        engines raise."""
        self._budget = token_budget(len(prompt), max_tokens, context_size)
        self._trunk, self._draft, self._controller = trunk, draft, controller
        self._ends, self._stats, self._clock = end_token_ids, stats, clock
        self._prefixes = prefixes
        self._tokens = list(prompt)  # and the chosen ones, an end token included
        self._num_prompt, self._num_emitted = len(prompt), 0
        self._queuing = trunk if overlap and isinstance(trunk, QueuingTrunk) else None
        self._draft_n, self._began = 0, 0.0  # of the next round
        self._begun: BegunRound | None = None  # that round, if it is under way
        self._done_early: tuple[list[int], int] | None = None  # that round, if it was done for `save`
        self._uncounted: Round | None = None  # the last round, until the device works on the next one
        trunk.start(sampler)
        self._head = HeadQueue(draft)
        self._head.start(draft_sampler or sampler, prompt[0])
        position = 0
        if prefixes is not None:
            position, hidden = prefixes.resume(trunk, draft, prompt)
            if position:
                self._head.resume(prompt[position], hidden)
                stats.cache_n = position
        self._anywhere = not isinstance(trunk, SharedTrunk) or trunk.resumes_anywhere
        ends: Collection[int] = save_at
        if not self._anywhere:
            ends = fixed_pass_ends(prompt, trunk.prefill_chunk, message_ends)
            save_at = last_at_or_before(ends, save_at)
        self._pauses = sorted({at for at in ends if position < at < len(prompt)} | {len(prompt)})
        self._position = position  # of the prompt; the trunk's while it is read
        self._saves = frozenset(save_at) if prefixes is not None else frozenset()

    @property
    def length(self) -> int:
        """Tokens of prompt and text so far, a chosen one that the trunk has not seen yet included."""
        return len(self._tokens)

    def step(self) -> Block:
        """Run one step. Not after a Block with a finish_reason. Raises what engines and sampler raise."""
        if self._position < self._num_prompt:
            chosen = self._read_prompt()
            if chosen is None:
                return Block([])
            if self._budget == 0:
                return Block([], "length")
            self._controller.begin()
            self._tokens.append(chosen)
            return self._emit([chosen], 0)
        done, self._done_early = self._done_early or self._round(), None
        try:
            return self._emit(*done)
        finally:  # also where the next round cannot begin
            self._count()

    def save(self) -> None:
        """Keep the state reached, once the prompt is read, for sequences that begin alike; where engines can resume at
        prompts' passes alone, nothing is done."""
        if self._prefixes is None or self._position < self._num_prompt or not self._anywhere:
            return
        if self._begun is not None:
            self._done_early = self._round()
            self._count()
        self._save_level()

    def _save_level(self) -> None:
        assert self._prefixes is not None
        self._head.feed(keep=1)
        hidden = self._head.last_hidden() if self._draft is not None else None
        self._prefixes.save(self._trunk, self._draft, self._tokens[: self._trunk.position], hidden)

    def _emit(self, block: list[int], num_drafted: int) -> Block:
        ended = block[-1] in self._ends
        emitted = block[:-1] if ended else block
        self._num_emitted += len(emitted)
        if ended:
            return Block(emitted, "stop", min(num_drafted, len(emitted)))
        if self._num_emitted == self._budget:
            return Block(emitted, "length", num_drafted)
        self._begin_round()
        return Block(emitted, None, num_drafted)

    def _read_prompt(self) -> int | None:
        """Trunk and head take a chunk of the prompt: the trunk's choice after the last one."""
        began, trunk, first = self._clock(), self._trunk, self._position
        pause = next(at for at in self._pauses if at > first)
        chunk = self._tokens[first : min(first + trunk.prefill_chunk, pause)]
        result = trunk.prefill(chunk)
        chosen = result.choices[-1]
        self._position += len(chunk)
        done = self._position == self._num_prompt
        # The head pairs a hidden row with the token after it; after the prompt's last row that is the chosen one.
        following = self._tokens[first + 1 : self._position + 1]
        self._head.take([*following, chosen] if done else following, result.hidden)
        self._head.feed(keep=1)
        if self._position in self._saves:
            self._save_level()
        self._stats.prompt_n += len(chunk)
        self._stats.prompt_ms += 1000.0 * (self._clock() - began)
        return chosen if done else None

    def _begin_round(self) -> None:
        """Choose the number of drafts of the next round, and begin it if that can be."""
        limit = min(self._budget - self._num_emitted, self._trunk.max_rows) - 1
        if self._draft is not None and limit and self._controller.wants_guesses(self._head.num_known):
            self._compare_guesses()
        self._draft_n = self._controller.draft_n(limit) if self._draft is not None else 0
        self._began = self._clock()
        if self._queuing is not None:
            self._begun = self._head.begin_round(self._queuing, self._tokens[-1], self._draft_n)

    def _compare_guesses(self) -> None:
        """Let the controller know how good the head would have been."""
        began = self._clock()
        n_rows, right = self._head.num_known, self._head.guesses()
        took_ms = 1000.0 * (self._clock() - began)
        self._stats.predicted_ms += took_ms
        if right is not None:
            self._controller.judge(right, n_rows, took_ms)

    def _count(self) -> None:
        if self._uncounted is not None:
            self._stats.count(self._uncounted)
            self._uncounted = None

    def _round(self) -> tuple[list[int], int]:
        """The tokens that the round yields, and how many of them, at the front, are accepted drafts."""
        n, trunk, clock = self._draft_n, self._trunk, self._clock
        if self._begun is not None:
            begun, self._begun = self._begun, None
            drafts, result, draft_share = begun.outcome()
            n_rows, draft_ms = begun.n_rows, draft_share * 1000.0 * (clock() - self._began)
        else:
            self._began = clock()
            drafts, n_rows = self._head.draft(n)
            draft_ms = 1000.0 * (clock() - self._began)
            result = trunk.verify([self._tokens[-1], *drafts])
        choices = result.choices
        n_accept = _leading_matches(drafts, choices)
        block = _through_end(choices[: n_accept + 1], self._ends)
        trunk.commit(len(block))
        round_ms = 1000.0 * (clock() - self._began)
        self._head.take(block, result.hidden[: len(block)])
        self._tokens += block
        self._uncounted = Round(n, n_accept, n_rows, draft_ms, round_ms - draft_ms)
        self._controller.observe(self._uncounted)
        return block, min(n_accept, len(block))


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
    message_ends: Collection[int] = (),
) -> Generator[int, None, None]:
    """Yield the tokens that follow ``prompt``, block by block.

    prompt: 1..context_size ids. max_tokens: at most so many (-1: until the context is full: prompt and text together
    hold context_size tokens). end_token_ids: the text ends before the first of them. draft: None decodes plainly.
    stats: a fresh SpecStats. cancelled: asked between passes. clock: seconds. message_ends: tokens that end a message
    in ``prompt`` (`runtime.prompt_passes`).

    Whenever it ends after the prompt pass, the trunk has committed the prompt and all chosen tokens but the last.
    Raises UsageError for what cannot be served (at the first token), and what engines and sampler raise.
    """
    generation = Generation(
        trunk,
        draft,
        prompt,
        sampler=sampler,
        controller=controller,
        max_tokens=max_tokens,
        end_token_ids=end_token_ids,
        context_size=context_size,
        stats=stats,
        clock=clock,
        overlap=True,
        message_ends=message_ends,
    )
    while not cancelled():
        block = generation.step()
        for token in block.tokens:
            stats.predicted_n += 1
            yield token
        if block.finish_reason:
            stats.finish_reason = block.finish_reason
            return


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


def _leading_matches(drafts: Sequence[int], choices: Sequence[int]) -> int:
    """How many drafts, from the first on, are what the trunk chose at the row before them."""
    for i, token in enumerate(drafts):
        if token != choices[i]:
            return i
    return len(drafts)


def _through_end(block: list[int], end_token_ids: Collection[int]) -> list[int]:
    """The block up to its first end token, that token included, or to where no choice could be made: the next round
    begins there, and says why."""
    for i, token in enumerate(block):
        if token == NO_CHOICE:
            return block[:i]
        if token in end_token_ids:
            return block[: i + 1]
    return block
