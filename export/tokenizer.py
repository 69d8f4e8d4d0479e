"""Write the GGUF's own vocabulary as `tokenizer.json` (tokenizers library), its template as `chat_template.jinja`.

Byte-level BPE with the qwen35 pre-split and no normaliser, so ids equal llama.cpp's. The token types decide how a
token is used: control tokens are special (hidden in text), user-defined ones are matched in text but shown, unused
ones (the vocabulary's padding) are left out: no text leads to them and they stand for none.

Source: llama.cpp, src/llama-vocab.cpp (types, pre-split, end tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from engines.errors import ModelFileError, ResourceError
from engines.manifest import TokenizerInfo
from export.gguf_file import GGUFFile

TOKENIZER_NAME = "tokenizer.json"
TEMPLATE_NAME = "chat_template.jinja"

# Contractions; a word with its combining marks and at most one other character before it; single digits;
# punctuation with the line ends after it; line ends; space runs, their last space left to the word that follows.
PRE_SPLIT_QWEN35 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
    r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)

# Kinds of tokens, as tokenizer.ggml.token_type has them.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_KEY = "tokenizer.ggml."
_TEMPLATE_KEY = "tokenizer.chat_template"
# The first names the token that a model emits at its end; the others end a generation as well.
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# End tokens by their text, whatever the keys say; a token with such a text counts as control.
_END_TEXTS = frozenset(
    f"<|{name}|>"
    for name in ["endoftext", "im_end", "fim_pad", "repo_name", "file_sep", "end_of_text", "eot_id", "eom_id"]
)


def write_tokenizer(file: GGUFFile, folder: Path) -> TokenizerInfo:
    """Write `tokenizer.json` and, if the file has a template, `chat_template.jinja` into ``folder``.

    Returns what the manifest says of them: the end tokens (the file's own first) and the token to put in front, which
    exists only where the file says ``add_bos_token``. Raises ModelFileError: unsupported for another kind of tokenizer,
    content for parts that are missing or contradict each other.
    """
    tokens, _ = vocabulary(file)
    template = file.get(_TEMPLATE_KEY, str, "")
    info = TokenizerInfo(end_tokens(file, tokens), bos_token(file, len(tokens)), bool(template))
    _write(folder / TOKENIZER_NAME, build_tokenizer(file).to_str())
    if template:
        _write(folder / TEMPLATE_NAME, template)
    return info


def vocabulary(file: GGUFFile) -> tuple[list[str], list[int]]:
    """Token texts and kinds, both indexed by id. Raises ModelFileError, as `write_tokenizer` does."""
    model, pre = file.get(_KEY + "model", str), file.get(_KEY + "pre", str, "default")
    if (model, pre) != ("gpt2", "qwen35"):
        raise ModelFileError(
            "unsupported",
            f"{file.path}: tokenizer {model!r} with pre-split {pre!r} ({_KEY}model, {_KEY}pre); "
            "supported: 'gpt2' with 'qwen35'",
        )
    tokens = file.get(_KEY + "tokens", list[str])
    types = file.get(_KEY + "token_type", list[int], [NORMAL] * len(tokens))
    if not tokens or len(types) != len(tokens):
        raise _content(file, f"{_KEY}tokens has {len(tokens)} entries, {_KEY}token_type {len(types)}; wanted as many")
    for token_id, kind in enumerate(types):
        if not NORMAL <= kind <= BYTE:
            raise _content(file, f"{_KEY}token_type of token {token_id} is {kind}; wanted {NORMAL} to {BYTE}")
    return tokens, types


def build_tokenizer(file: GGUFFile) -> Tokenizer:
    """The tokenizer of a file. Raises ModelFileError, as `write_tokenizer` does."""
    tokens, types = vocabulary(file)
    ids: dict[str, int] = {}
    special, shown = [], []
    for token_id, (text, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind in (UNUSED, BYTE) or not text:
            continue
        if text in ids:
            raise _content(file, f"{_KEY}tokens: tokens {ids[text]} and {token_id} are both {text!r}")
        ids[text] = token_id
        if kind in (CONTROL, UNKNOWN) or text in _END_TEXTS:
            special.append(AddedToken(text, special=True, normalized=False))
        elif kind == USER_DEFINED:
            shown.append(AddedToken(text, special=False, normalized=False))
    built = Tokenizer(models.BPE(vocab=ids, merges=_merges(file, ids), ignore_merges=False))
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_SPLIT_QWEN35), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens(special)
    built.add_tokens(shown)
    return built


def _merges(file: GGUFFile, ids: dict[str, int]) -> list[tuple[str, str]]:
    """Merges in order of rank, each once; every part and every result is a token."""
    merges: dict[tuple[str, str], None] = {}
    for rank, text in enumerate(file.get(_KEY + "merges", list[str])):
        left, _, right = text.partition(" ")
        if not left or not right or " " in right:
            raise _content(file, f"{_KEY}merges: merge {rank} is {text!r}; wanted two tokens with a space between")
        for part in (left, right, left + right):
            if part not in ids:
                raise _content(file, f"{_KEY}merges: merge {rank}, {text!r}, needs {part!r}, which is no token")
        merges.setdefault((left, right))
    return list(merges)


def end_tokens(file: GGUFFile, tokens: Sequence[str]) -> tuple[int, ...]:
    """Ids that end a generation: the file's eos first, the rest ascending."""
    named = [_token_id(file, f"{_KEY}{name}_token_id", len(tokens)) for name in _END_KEYS]
    found = {token_id for token_id in named if token_id is not None}
    found.update(token_id for token_id, text in enumerate(tokens) if text in _END_TEXTS)
    if not found:
        raise _content(file, f"no end token: {_KEY}eos_token_id is missing and no token is <|im_end|> or <|endoftext|>")
    first = [] if named[0] is None else [named[0]]
    return (*first, *sorted(found.difference(first)))


def bos_token(file: GGUFFile, n_tokens: int) -> int | None:
    if not file.get(_KEY + "add_bos_token", bool, False):
        return None
    bos = _token_id(file, _KEY + "bos_token_id", n_tokens)
    if bos is None:
        raise _content(file, f"{_KEY}add_bos_token is true, but {_KEY}bos_token_id is missing")
    return bos


def _token_id(file: GGUFFile, key: str, n_tokens: int) -> int | None:
    """The id under ``key``; None when the key is absent or -1, which some writers put for "none"."""
    value = file.get(key, int, -1)
    if value in (-1, 2**32 - 1):
        return None
    if not 0 <= value < n_tokens:
        raise _content(file, f"{key} is {value}; wanted 0 to {n_tokens - 1}")
    return value


def _content(file: GGUFFile, message: str) -> ModelFileError:
    return ModelFileError("content", f"{file.path}: {message}")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        raise ResourceError(
            f"{path}: cannot be written ({error.strerror}); free space or choose another folder"
        ) from error
