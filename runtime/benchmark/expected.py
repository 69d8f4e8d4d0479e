"""What a model of known text must say and accept: `--expect FILE`.

The file is a JSON object: "after", a token id, "tokens", the greedy text after any prompt that ends in that token, and
"right", for each token of the text 1 where the draft head, given the one before it, drafts just this token, else 0
(left out: unknown).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.errors import UsageError
from engines.given_files import given_text
from runtime.controller import Round


@dataclass(frozen=True)
class Expected:
    """Contents of the file; ``right`` empty: unknown."""

    after: int
    tokens: tuple[int, ...]
    right: tuple[bool, ...]

    def failure(self, tokens: Sequence[int], rounds: Sequence[Round]) -> str:
        """What is wrong with a generation, "" if nothing."""
        for place, (got, wanted) in enumerate(zip(tokens, self.tokens, strict=False)):
            if got != wanted:
                return f"token {place} of the text is {got}, {wanted} was expected"
        if not self.right:
            return ""
        done = 1  # the first token comes from the prompt
        for index, each in enumerate(rounds):
            wanted_n = _leading(self.right[done : done + each.draft_n])
            if each.n_accept != wanted_n:
                return f"round {index} accepted {each.n_accept} of {each.draft_n} drafts, {wanted_n} were expected"
            done += each.n_accept + 1
        return ""


def load_expected(path: Path, n_tokens: int, vocab_size: int) -> Expected:
    """Read the file for texts of ``n_tokens``. Raises UsageError saying what is wrong with it."""
    try:
        raw = json.loads(given_text("--expect", path, "give a file of JSON"))
        after, tokens, right = raw["after"], list(raw["tokens"]), list(raw.get("right", []))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UsageError(f'{path}: wanted a JSON object with "after" and "tokens" ({error!r})') from None
    for token in (after, *tokens):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise UsageError(f"{path}: {token!r} is no token of this model, which has ids 0 to {vocab_size - 1}")
    for name, entries in (("tokens", tokens), ("right", right)):
        if len(entries) < n_tokens and not (name == "right" and not entries):
            raise UsageError(f'{path}: "{name}" has {len(entries)} entries, --predict asks for {n_tokens}')
    return Expected(after, tuple(tokens), tuple(map(bool, right)))


def _leading(right: Sequence[bool]) -> int:
    return next((i for i, one in enumerate(right) if not one), len(right))
