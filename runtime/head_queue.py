"""The true rows that a draft head has not taken yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from runtime.engine import DraftedPass, DraftEngine, Pass, QueuingTrunk, RoundEngine, Sampler
from runtime.queued_work import Queued


class BegunRound(NamedTuple):
    """A round under way; n_rows: rows that the head takes in it."""

    queued: Queued[Pass] | Queued[DraftedPass]
    n_rows: int

    def outcome(self) -> tuple[list[int], Pass, float]:
        """Wait for it: drafts, outcome of the verify pass, share of the time that went into drafting."""
        done = self.queued.outcome()
        if isinstance(done, DraftedPass):
            return done.drafts, done.result, done.draft_share
        return [], done, 0.0


class HeadQueue:
    """The draft head and the true rows that it has not taken yet. Without an engine it keeps and drafts nothing.

    A round's tokens and their hidden rows wait here and ride along with the next draft, where they cost next to
    nothing. While drafting is off they pile up and are fed in whole chunks.
    """

    def __init__(self, engine: DraftEngine | None) -> None:
        self._engine = engine
        self._rounds = engine if isinstance(engine, RoundEngine) else None
        self._tokens: list[int] = []
        self._hidden: list[Any] = []
        self._aside: Any = None  # the first of these, if it can be added to

    def start(self, sampler: Sampler, first_token: int) -> None:
        """Begin a new sequence."""
        self._clear()
        if self._engine:
            self._engine.start(sampler)
            self.take([first_token], self._engine.zero_hidden())

    def resume(self, next_token: int, hidden: Any) -> None:
        """The engine holds the rows of a sequence up to here; hidden [1, D]: of the position before ``next_token``."""
        self._clear()
        self.take([next_token], hidden)

    def last_hidden(self) -> Any:
        """A copy of the last queued row, [1, D]."""
        assert self._engine is not None and self._hidden
        return self._engine.join([self._hidden[-1][len(self._hidden[-1]) - 1 :]])

    def take(self, tokens: Sequence[int], hidden: Any) -> None:
        """Queue rows: tokens [T], each with the trunk's hidden of the position before it, [T, D]."""
        if self._engine:
            self._tokens += tokens
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
        self._keep_from(n, hidden)

    @property
    def num_known(self) -> int:
        """Queued rows after which the next token is known."""
        return max(0, len(self._tokens) - 1)

    def guesses(self) -> list[bool] | None:
        """Let the engine take all rows but the last and guess the tokens after them: which of those that it told were
        right. None: the engine does not tell."""
        assert self._engine is not None and self.num_known
        self.feed(keep=min(len(self._tokens), self._engine.prefill_chunk))
        hidden, n = self._joined(), self.num_known
        guesses = self._engine.guess(self._tokens[:n], hidden[:n])
        if guesses is None:
            return None
        true = self._tokens[-len(guesses) :]
        self._keep_from(n, hidden)
        return [int(guess) == token for guess, token in zip(guesses, true, strict=True)]

    def begin_round(self, trunk: QueuingTrunk, last: int, n: int) -> BegunRound | None:
        """Begin to draft n tokens and to verify them after ``last``. None: these engines cannot."""
        if n == 0:
            queued_pass = trunk.begin_verify([last])
            _, n_rows = self.draft(0)  # while the device works
            return BegunRound(queued_pass, n_rows)
        n_rows = len(self._tokens)
        if self._rounds is None or n_rows > self._rounds.prefill_chunk:
            return None
        queued = self._rounds.begin_round(trunk, self._tokens, self._joined(), n)
        if queued is None:
            return None
        self._clear()
        return BegunRound(queued, n_rows)

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
            self._put_aside()
            return [], n_queued - len(self._tokens)
        drafts = self._engine.draft(self._tokens, self._joined(), n)
        assert len(drafts) == n, f"asked for {n} drafts, got {len(drafts)}"
        self._clear()
        return [int(token) for token in drafts], n_queued

    def _put_aside(self) -> None:
        """Keep the rows of the last pass beyond the next one."""
        assert self._engine is not None
        for rows in self._hidden if self._aside is None else self._hidden[1:]:
            self._aside = self._engine.put_aside(self._aside, rows)
        self._hidden = [self._aside]

    def _keep_from(self, n: int, hidden: Any) -> None:
        """Forget the first n of the queued rows. The rows of a pass last until the next one, a copy stays."""
        assert self._engine is not None
        self._tokens, self._hidden, self._aside = self._tokens[n:], [self._engine.join([hidden[n:]])], None

    def _clear(self) -> None:
        self._tokens, self._hidden, self._aside = [], [], None

    def _joined(self) -> Any:
        assert self._engine is not None
        return self._hidden[0] if len(self._hidden) == 1 else self._engine.join(self._hidden)
