"""What a text may look like: grammars, compiled by llguidance for a model's tokens, and how far a text got in one.

The work is done in other processes (`runtime.grammar_process`): it may take long, and cannot be interrupted otherwise.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from engines.errors import EngineError
from engines.given_files import read_bytes
from runtime.grammar_process import READY
from runtime.grammar_state import GrammarError, GrammarState, one_line
from runtime.tokenizer import MOST_FILE_BYTES, TOKENIZER_NAME

_OLDEST_LIBRARY = (1, 9)
_STARTS_WITHIN_S = 120.0  # the process, with a large vocabulary on a busy machine
_SPACE_IN_JSON = "[ \\t\\r\\n]{0,40}"
# After a think block the model writes line ends before its answer.
_SPACE = "SPACE: /[ \\n]{1,4}/\n"


def json_text(schema: Mapping[str, Any]) -> str:
    """What a rule of Lark says for JSON that ``schema`` describes. Space in it is bounded: some models, once they have
    begun to indent, go on for ever."""
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': _SPACE_IN_JSON}})}"


class GrammarCompiler:
    """Makes grammars for the tokens of an exported folder. May be shared by threads. Its process starts with the first
    grammar, or with `warm_up`, and ends with `close`."""

    def __init__(self, folder: Path, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        """Raises EngineError when the library is too old."""
        version = importlib.metadata.version("llguidance")
        if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < _OLDEST_LIBRARY:
            raise EngineError(f"llguidance {version} is too old for this server; pip install 'llguidance>=1.9'")
        self._path, self.vocab_size, self._ends = folder / TOKENIZER_NAME, vocab_size, list(end_token_ids)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._control: socket.socket | None = None

    def json_object(self, field: str = "") -> Grammar:
        """Any JSON object."""
        return self.json_schema({"type": "object"}, field)

    def json_schema(self, schema: Mapping[str, Any], field: str = "") -> Grammar:
        """JSON that ``schema`` describes. Raises GrammarError for what is no schema, or not understood whole."""
        return self.lark(f"start: SPACE? value\n{_SPACE}value: {json_text(schema)}\n", field)

    def lark(self, source: str, field: str = "") -> Grammar:
        """A grammar in the library's dialect of Lark. Raises GrammarError, EngineError."""
        return Grammar(self, source, field)

    def warm_up(self) -> None:
        """Raises EngineError when the library cannot use the tokenizer."""
        with self._lock:
            self._started()

    def connect(self) -> Connection:
        """To a process of its own for a sequence. Raises EngineError."""
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            try:
                socket.send_fds(self._started(), [b"c"], [theirs.fileno()])
            except OSError:  # it has ended: once more
                self._end()
                socket.send_fds(self._started(), [b"c"], [theirs.fileno()])
        return Connection(ours.detach())

    def close(self) -> None:
        with self._lock:
            self._end()

    def _started(self) -> socket.socket:
        if self._control is not None:
            return self._control
        ours, theirs = socket.socketpair()
        with theirs:
            numbers = [theirs.fileno(), self.vocab_size, *self._ends]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "runtime.grammar_process", *map(str, numbers)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # signals of a terminal are the server's affair
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                text=True,
                encoding="utf-8",
            )
        self._control = ours
        ours.settimeout(_STARTS_WITHIN_S)
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended, and says why
                assert self._process.stdin is not None
                with self._process.stdin as stdin:
                    stdin.write(read_bytes(self._path, MOST_FILE_BYTES).decode())
            said = ours.recv(1 << 16)
        except (OSError, ValueError) as error:
            self._end()
            raise EngineError(f"{self._path}: no grammars for this tokenizer ({one_line(str(error))})") from error
        if said != READY:
            self._end()
            why = one_line(said[1:].decode("utf-8", "replace")) or "their process ended at once"
            raise EngineError(f"{self._path}: no grammars for this tokenizer ({why})")
        return ours

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.wait()
            self._process = None


class Grammar:
    """A compiled grammar. May be shared by threads and sequences."""

    def __init__(self, compiler: GrammarCompiler, source: str, field: str) -> None:
        """Raises GrammarError."""
        self.vocab_size = compiler.vocab_size
        self._compiler, self._source, self._field = compiler, source, field
        self._first: GrammarState | None = self._state()
        try:
            self._first.allowed()
        except GrammarError as error:
            raise GrammarError(f"not a grammar that can be followed: {error.reason}", field) from None

    def start(self) -> GrammarState:
        """The state of an empty text."""
        first, self._first = self._first, None
        return first or self._state()

    def _state(self) -> GrammarState:
        return GrammarState(self._compiler.connect, self._source, self.vocab_size, self._field)
