"""The process that works out what grammars allow, so that no grammar can hold up, starve or end the server.

`serve_forever` loads the tokenizer once and forks a child for every socket that it is sent. A child serves one
sequence: it takes a grammar, then places in texts, and answers each with the tokens that may come next. It runs at a
low priority and ends by itself when its socket closes, or when one answer takes more processor time or memory than it
may have.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from runtime.process_limits import limit_memory, within

READY, MASK, WRONG, FAILED = b"R", b"M", b"W", b"F"  # WRONG: no grammar; FAILED: one that leads nowhere here
RESTART = -1  # instead of the number of tokens to take back
COMPILE_S, MASK_S = 2.0, 1.0  # processor time
MEMORY_BYTES = 512 << 20  # beyond what the tokenizer takes
_NICE = 5
_LOG_NOTHING = 0


def place(take_back: int, tokens: Sequence[int]) -> bytes:
    """A question: what may follow once ``take_back`` tokens (RESTART: all) are taken back, and ``tokens`` added?"""
    return struct.pack(f"<{1 + len(tokens)}i", take_back, *tokens)


def serve_forever(control_fd: int, tokenizer_json: str, vocab_size: int, end_token_ids: Sequence[int]) -> None:
    """Sends READY, or FAILED and why; then forks a child for each descriptor that comes, until the socket closes."""
    control = socket.socket(fileno=control_fd)
    try:
        from llguidance import LLTokenizer

        tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(end_token_ids))
    except Exception as error:  # whatever it is, the server is to say it
        control.sendall(FAILED + f"{type(error).__name__}: {error}".encode()[:1000])
        return
    control.sendall(READY)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        if os.fork() == 0:
            control.close()
            with contextlib.suppress(EOFError, OSError):  # the server is done with it
                _serve(Connection(descriptors[0]), tokenizer, vocab_size)
            os._exit(0)
        os.close(descriptors[0])


def _serve(asked: Connection, tokenizer: Any, vocab_size: int) -> None:
    limit_memory(MEMORY_BYTES)
    os.nice(_NICE)
    source = asked.recv_bytes().decode()
    with within(COMPILE_S):
        grammar = _Grammar(tokenizer, source, vocab_size)
        answer = grammar.answer()
    asked.send_bytes(answer)
    while True:
        take_back, *tokens = (number for (number,) in struct.iter_unpack("<i", asked.recv_bytes()))
        with within(MASK_S):
            grammar.go(take_back, tokens)
            answer = grammar.answer()
        asked.send_bytes(answer)


class _Grammar:
    def __init__(self, tokenizer: Any, source: str, vocab_size: int) -> None:
        from llguidance import LLMatcher

        failed, messages = LLMatcher.validate_grammar_with_warnings(source, tokenizer)
        self._wrong = messages[0] if failed else ""
        self._start = None if failed else LLMatcher(tokenizer, source, log_level=_LOG_NOTHING)
        self._state = None if self._start is None else self._start.deep_copy()
        self._bits = bytearray(4 * (-(-vocab_size // 32)))

    def go(self, take_back: int, tokens: list[int]) -> None:
        if self._start is None or self._state is None:
            return
        if take_back == RESTART:
            self._state = self._start.deep_copy()
        elif take_back:
            self._state.rollback(take_back)
        self._state.consume_tokens(tokens)

    def answer(self) -> bytes:
        if self._state is None:
            return WRONG + self._wrong.encode()
        if not self._state.is_error():
            address = ctypes.addressof(ctypes.c_char.from_buffer(self._bits))
            self._state.unsafe_compute_mask_ptr(address, len(self._bits))
        if self._state.is_error():
            return FAILED + self._state.get_error().partition("<state>")[0].encode()
        return MASK + self._bits


def main() -> None:
    """Arguments: descriptor, vocabulary size, end tokens; the tokenizer comes on the standard input."""
    control_fd, vocab_size, *ends = map(int, sys.argv[1:])
    serve_forever(control_fd, sys.stdin.read(), vocab_size, ends)


if __name__ == "__main__":
    main()
