"""What is generated after: passages of text, and text that fills a context before them. Never random tokens.

`passages.txt` was written for this project (prose, code, a tale, a letter); `filler.txt` is the beginning of Alice's
Adventures in Wonderland (in the public domain), a paragraph a line.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from engines.errors import UsageError
from engines.given_files import given_text
from runtime.tokenizer import Tokenizer

_BETWEEN_PASSAGES = "\n%%\n"


@dataclass(frozen=True)
class Texts:
    """Tokens of the passages, and of the text that fills long contexts. digest: of the texts, 12 hex digits."""

    passages: tuple[tuple[int, ...], ...]
    filler: tuple[int, ...]
    digest: str

    def prompts(self, depth: int) -> list[list[int]]:
        """Every passage; after ``depth`` tokens of filler, which is repeated where it is shorter, only the first."""
        if depth == 0:
            return [list(passage) for passage in self.passages]
        return [[*self.filling(depth), *self.passages[0]]]

    def filling(self, count: int) -> list[int]:
        """``count`` tokens of filler."""
        repeats = -(-count // len(self.filler))
        return (list(self.filler) * repeats)[:count]


def load_texts(
    tokenizer: Tokenizer, prompt_file: Path | None = None, last: Sequence[int] = (), most: int | None = None
) -> Texts:
    """The texts of this package, or of ``prompt_file`` as the one passage. last: tokens put behind each passage.
    most: tokens that a passage may have (see `Tokenizer.encode`).

    Raises UsageError when the file holds no text."""
    filler = _text("filler.txt")
    if prompt_file is None:
        passages = _text("passages.txt").rstrip("\n").split(_BETWEEN_PASSAGES)
    else:
        passages = [_given(prompt_file)]
    tokens = [(*tokenizer.encode(passage, most=most), *last) for passage in passages]
    digest = hashlib.blake2b("\0".join([*passages, filler]).encode(), digest_size=6).hexdigest()
    return Texts(tuple(tokens), tuple(tokenizer.encode(filler)), digest)


def _text(name: str) -> str:
    return resources.files("runtime.benchmark").joinpath(name).read_text(encoding="utf-8")


def _given(path: Path) -> str:
    text = given_text("--prompt-file", path, "give a file of text").rstrip("\n")
    if not text:
        raise UsageError(f"{path}: is empty; give some text to go on from")
    return text
