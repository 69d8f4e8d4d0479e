"""A byte-level BPE vocabulary small enough to read: id b is byte b, then a few merges, special tokens, padding."""

from __future__ import annotations

from typing import Any

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
_SPACE = chr(256 + 32)  # how byte-level BPE writes byte 32
_MERGES = (
    ("t", "h"), ("th", "e"), (_SPACE, "the"), ("i", "n"), ("e", "r"), ("a", "n"), ("o", "n"), (_SPACE, "a"),
    ("an", "d"), (_SPACE, "and"), ("r", "e"), ("o", "r"), (_SPACE, "w"), ("l", "l"), ("o", "u"), (_SPACE, "s"),
    ("in", "g"), (_SPACE, "b"), ("e", "s"), ("e", "d"),
)  # fmt: skip
FIRST_SPECIAL = 256 + len(_MERGES)
ENDOFTEXT, IM_START, IM_END, THINK, END_THINK = range(FIRST_SPECIAL, FIRST_SPECIAL + len(SPECIAL))
FIRST_PAD = FIRST_SPECIAL + len(SPECIAL)

TEMPLATE = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content | trim + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}"
    "{%- else %}{{- '<think>\\n' }}{%- endif %}{%- endif %}"
)


def byte_characters() -> list[str]:
    """The character byte-level BPE shows for each byte: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def vocabulary_metadata(size: int) -> dict[str, Any]:
    """The tokenizer keys of a vocabulary of ``size`` tokens, ``size`` >= FIRST_PAD."""
    assert size >= FIRST_PAD
    tokens = byte_characters() + [left + right for left, right in _MERGES]
    types = [NORMAL] * len(tokens)
    for token in SPECIAL:
        tokens.append(token)
        types.append(USER_DEFINED if "think" in token else CONTROL)
    pads = size - len(tokens)
    tokens += [f"[PAD{index}]" for index in range(pads)]
    types += [UNUSED] * pads
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in _MERGES],
        "tokenizer.ggml.eos_token_id": IM_END,
        "tokenizer.ggml.padding_token_id": ENDOFTEXT,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }
