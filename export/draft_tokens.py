"""Which tokens a cut-down LM head of the drafts can name."""

from __future__ import annotations

import re

import numpy as np

from engines.errors import UsageError
from export.gguf_file import GGUFFile
from export.tokenizer import BYTE, CONTROL, UNKNOWN, UNUSED, USER_DEFINED, bos_token, end_tokens, vocabulary

# Tokens with a part in chats whatever kind the file gives them; in some files these are ordinary ones.
_MARKUP = re.compile(r"<\|[^|<>]+\|>|</?(?:think|tool_call|tool_response|tools|function|parameter)>")


def tokens_always_kept(file: GGUFFile) -> np.ndarray:
    """Ids, ascending, that every head keeps: control, user-defined and byte tokens, the 256 letters that stand for
    single bytes, ends of text, and the markup of chats, thoughts and tool calls."""
    tokens, kinds = vocabulary(file)
    kept = set(end_tokens(file, tokens))
    bos = bos_token(file, len(tokens))
    if bos is not None:
        kept.add(bos)
    for token_id, (text, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind == UNUSED:
            continue
        if kind in (UNKNOWN, CONTROL, USER_DEFINED, BYTE) or len(text) == 1 or _MARKUP.fullmatch(text):
            kept.add(token_id)
    return np.array(sorted(kept), np.int64)


def choose_tokens(file: GGUFFile, rows: int, counts: np.ndarray | None) -> np.ndarray:
    """Ids, ascending, int32 [rows], of the tokens that a head of ``rows`` rows keeps, fewer than there are tokens.

    First `tokens_always_kept`, then by ``counts`` ([V], occurrences), the lower id first among equals; None: by id
    alone. A byte-level BPE numbers its tokens in the order in which it merged them, most frequent pairs first, so low
    ids are the frequent ones; padding that no text leads to comes last. Raises UsageError for too few rows."""
    _, kinds = vocabulary(file)
    always = tokens_always_kept(file)
    if rows < len(always):
        raise UsageError(
            f"--draft-head-rows {rows}: wanted {len(always)} or more; bytes, control tokens and markup are always kept"
        )
    is_kept = np.zeros(len(kinds), bool)
    is_kept[always] = True
    is_unused = np.array(kinds) == UNUSED
    frequent = np.zeros(len(kinds), np.int64) if counts is None else counts
    order = np.lexsort((np.arange(len(kinds)), -frequent, is_unused, ~is_kept))
    return np.sort(order[:rows]).astype(np.int32)
