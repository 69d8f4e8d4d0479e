"""What a text may look like: grammars, compiled by llguidance for a model's tokens, and how far a text got in one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from engines.errors import EngineError, UsageError
from runtime.tokenizer import TOKENIZER_NAME

_LOG_NOTHING = 0
# After a think block the model writes line ends before its answer.
_SPACE = "SPACE: /[ \\n]{1,4}/\n"


@dataclass(frozen=True)
class Grammar:
    """A compiled grammar. May be shared by threads and sequences."""

    tokenizer: LLTokenizer
    source: str
    vocab_size: int

    def start(self) -> GrammarState:
        """The state of an empty text."""
        return GrammarState(self)


class GrammarState:
    """How far a text has got. Tokens can be taken back. End tokens are never pushed.

    Methods raise UsageError when nothing can follow: a schema may ask for what does not exist, or for too much work."""

    def __init__(self, grammar: Grammar) -> None:
        self._matcher = LLMatcher(grammar.tokenizer, grammar.source, log_level=_LOG_NOTHING)
        self._vocab_size = grammar.vocab_size
        self._check()

    def push(self, token: int) -> None:
        """``token`` must be one of those allowed."""
        self._matcher.consume_token(token)
        self._check()

    def pop(self, n: int) -> None:
        """Take the last n tokens back."""
        if n:
            self._matcher.rollback(n)
            self._check()

    def allowed(self) -> np.ndarray:
        """Which tokens may come next, bool [V]; end tokens among them once the text may end."""
        bits = np.zeros(-(-self._vocab_size // 32), np.uint32)
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self._check()
        return np.unpackbits(bits.view(np.uint8), bitorder="little")[: self._vocab_size].astype(bool)

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("<state>")[0]
            raise UsageError(f"no text can follow this schema or grammar any further ({_one_line(reason)})")


class GrammarCompiler:
    """Makes grammars for the tokens of an exported folder."""

    def __init__(self, folder: Path, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        """Raises EngineError when the library cannot use the tokenizer."""
        path = folder / TOKENIZER_NAME
        try:
            source = path.read_text(encoding="utf-8")
            self._tokenizer = LLTokenizer(source, n_vocab=vocab_size, eos_token=sorted(end_token_ids))
        except (OSError, ValueError) as error:
            raise EngineError(f"{path}: no grammars for this tokenizer ({_one_line(str(error))})") from error
        except TypeError as error:  # one end token only, in releases before 1.7
            raise EngineError("llguidance is too old for this server; pip install 'llguidance>=1.9'") from error
        self._vocab_size = vocab_size

    def json_object(self) -> Grammar:
        """Any JSON object."""
        return self.json_schema({"type": "object"})

    def json_schema(self, schema: Mapping[str, Any]) -> Grammar:
        """JSON that ``schema`` describes. Raises UsageError for what is no schema, or not understood whole."""
        return self.lark(f"start: SPACE? value\n{_SPACE}value: %json {json.dumps(schema)}\n")

    def lark(self, source: str) -> Grammar:
        """A grammar in the library's dialect of Lark. Raises UsageError."""
        compiled = LLMatcher.grammar_from_lark(source)
        failed, messages = LLMatcher.validate_grammar_with_warnings(compiled, self._tokenizer)
        if failed:
            raise UsageError(f"not a grammar that can be followed: {_one_line(messages[0])}")
        return Grammar(self._tokenizer, compiled, self._vocab_size)


def _one_line(message: str) -> str:
    return " ".join(message.split())[:300]
