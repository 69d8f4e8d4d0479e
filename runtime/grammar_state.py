"""How far a text got in a grammar, and what may come next there."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np

from engines.errors import UsageError
from runtime.grammar_process import COMPILE_S, MASK, MASK_S, MEMORY_BYTES, RESTART, WRONG, place

_NO_ANSWER_S = 120.0  # a process has a limit of its own: this long only when it gets no processor
_KEPT = 24  # masks of a sequence: those of a few rounds


class GrammarError(UsageError):
    """A grammar that cannot be followed, or not any further. field: of the request that asked for it, if one did."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.reason, self.field = message, field


class NotYetError(Exception):
    """The answer takes longer than there is patience for; it is being worked out."""


class _Node:
    """A text, as the end of a path. outcome: its mask's bits, or why there is none; None: not known (any more)."""

    __slots__ = ("after", "before", "depth", "outcome", "token")

    def __init__(self, token: int, before: _Node | None) -> None:
        self.token, self.before = token, before
        self.depth: int = before.depth + 1 if before else 0
        self.after: dict[int, _Node] = {}
        self.outcome: bytes | str | None = None

    def tokens_after(self, other: _Node) -> list[int]:
        """Those from ``other``, which is on the path, to here."""
        tokens, node = [], self
        while node is not other:
            tokens.append(node.token)
            assert node.before is not None
            node = node.before
        return tokens[::-1]


class GrammarState:
    """How far a text has got. Tokens can be taken back. End tokens are never pushed. The process is asked only for what
    is wanted, and once."""

    def __init__(self, connect: Callable[[], Connection], source: str, vocab_size: int, field: str) -> None:
        """connect: to a process, for ``source``. field: for errors."""
        self._connect, self._source, self._vocab_size, self._field = connect, source, vocab_size, field
        self._root = self._node = _Node(-1, None)
        self._process: Connection | None = None
        self._there: _Node | None = None  # where the process is; None: nowhere it could go on from
        self._asked: deque[_Node] = deque()  # answers that are to come
        self._known: deque[_Node] = deque()  # with outcomes, the newest last
        self._impatient = False  # the last wait was in vain

    def push(self, token: int) -> None:
        """``token`` must be one of those allowed."""
        after = self._node.after
        if token not in after:
            after[token] = _Node(token, self._node)
        self._node = after[token]

    def pop(self, n: int) -> None:
        """Take the last n tokens back."""
        for _ in range(n):
            assert self._node.before is not None
            self._node = self._node.before

    def prepare(self) -> bool:
        """Whether `allowed` has its answer; if not, it is being worked out from now on."""
        if self._node.outcome is None:
            self._receive(0.0)
        if self._node.outcome is None and not self._asked:
            self._ask(self._node)
        return self._node.outcome is not None

    def allowed(self, patience_s: float = _NO_ANSWER_S) -> np.ndarray:
        """Which tokens may come next, bool [V]; end tokens among them once the text may end. Raises GrammarError when
        nothing can follow, or finding out takes too much; NotYetError once ``patience_s`` is over."""
        until = time.monotonic() + (0.0 if self._impatient and patience_s < _NO_ANSWER_S else patience_s)
        while not self.prepare():
            if not self._receive(max(0.0, until - time.monotonic())) and time.monotonic() >= until:
                self._impatient = True
                raise NotYetError
        self._impatient = False
        outcome = self._node.outcome
        if not isinstance(outcome, bytes):
            raise GrammarError(str(outcome), self._field)
        bits = np.frombuffer(outcome, np.uint8)
        mask = np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool)
        if not mask.any():
            raise GrammarError("nothing can follow (no token of this model spells what may)", self._field)
        return mask

    def close(self) -> None:
        """End the process. What is asked afterwards starts another."""
        if self._process is not None:
            self._process.close()
        self._process, self._there = None, None
        self._asked.clear()

    def _ask(self, node: _Node) -> None:
        new = self._process is None
        if new:
            self._process = self._connect()
        assert self._process is not None
        try:
            if new:
                self._asked.append(self._root)
                self._there = self._root
                self._process.send_bytes(self._source.encode())
                if node is self._root:
                    return
            if self._there is None:
                question = place(RESTART, node.tokens_after(self._root))
            else:
                shared = _common(self._there, node)
                question = place(self._there.depth - shared.depth, node.tokens_after(shared))
            self._process.send_bytes(question)
            self._asked.append(node)
            self._there = node
        except OSError:  # it ends itself without a word
            self._asked.append(node)
            self._ended()

    def _receive(self, wait_s: float) -> bool:
        """Take an answer that has come, or comes within so many seconds."""
        if not self._asked or self._process is None or not self._process.poll(wait_s):
            return False
        try:
            answer = self._process.recv_bytes()
        except (EOFError, OSError):
            self._ended()
            return True
        node = self._asked.popleft()
        if answer[:1] == MASK:
            self._learn(node, answer[1:])
        else:
            self._there = None
            why = _reason(answer[1:].decode("utf-8", "replace"))
            self._learn(node, why if answer[:1] == WRONG else f"nothing can follow ({why})")
        return True

    def _ended(self) -> None:
        """The process ended itself while it was at the first answer that is awaited."""
        asked = list(self._asked)
        self.close()
        seconds = COMPILE_S if asked[0] is self._root else MASK_S
        limits = f"{seconds:g} seconds of processor time or {MEMORY_BYTES >> 20} MiB"
        for node in asked:
            self._learn(node, f"to find out what can follow takes more than {limits}")

    def _learn(self, node: _Node, outcome: bytes | str) -> None:
        node.outcome = outcome
        self._known.append(node)
        if len(self._known) > _KEPT:
            old = self._known.popleft()
            old.outcome = None
            old.after.clear()


def _common(a: _Node, b: _Node) -> _Node:
    """The longest text that both begin with."""
    while a is not b:
        if a.depth >= b.depth:
            assert a.before is not None
            a = a.before
        else:
            assert b.before is not None
            b = b.before
    return a


def _reason(message: str) -> str:
    """The library's message without the lines of source that it shows, which no client has written."""
    shown = re.split(r"\n\s*\d+ \| ", message)[0]
    return one_line(re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", shown))


def one_line(message: str) -> str:
    return " ".join(message.split())[:300]
