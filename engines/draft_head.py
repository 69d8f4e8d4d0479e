"""How much of the LM head the draft head gets: its flags, and the key by which an export remembers them.

The draft head's LM head costs most of a draft. It may keep only the rows of tokens that are likely to come, and fewer
bits. Drafts that it cannot make are wrong drafts at worst: the trunk verifies with its whole head, so the text stays.

Standard library only; export, engine builder and runtime share it.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.errors import UsageError
from engines.given_files import open_file

HEAD_TYPES = ("keep", "q4_k")
ALL_ROWS = 0
TABLE_MAGIC = "# nextn token frequencies"
_FULL = "full"
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class DraftHeadOptions:
    """rows: of the draft head's LM head, those of the most useful tokens; ALL_ROWS keeps all. head_type: one of
    HEAD_TYPES. What counts as useful: how often a token occurs in ``texts``, or in a ``table`` that
    `export.token_frequencies` made; without either, low ids come first."""

    rows: int = ALL_ROWS
    head_type: str = HEAD_TYPES[0]
    texts: tuple[Path, ...] = ()
    table: Path | None = None

    def validate(self) -> None:
        """Raise UsageError for values that have no meaning, alone or together."""
        if self.rows < 0:
            raise UsageError(f"--draft-head-rows {self.rows}: wanted a number of tokens, or {_FULL}")
        if self.head_type not in HEAD_TYPES:
            raise UsageError(f"--draft-head-type {self.head_type}: wanted one of {', '.join(HEAD_TYPES)}")
        if self.texts and self.table:
            raise UsageError("--draft-head-text and --draft-head-table both say how often tokens occur; give one")
        if self.rows == ALL_ROWS and (self.texts or self.table):
            flag = "--draft-head-text" if self.texts else "--draft-head-table"
            raise UsageError(f"{flag} chooses rows, but all are kept; give --draft-head-rows N as well")

    @property
    def changes_nothing(self) -> bool:
        return self.rows == ALL_ROWS and self.head_type == HEAD_TYPES[0]

    def key(self) -> str:
        """Names what an export depends on beside the model; "" for a head left as it is.

        Covers the content of the files, not their names. Raises UsageError when one cannot be read."""
        if self.changes_nothing:
            return ""
        digest = hashlib.blake2b(f"{self.rows} {self.head_type} {bool(self.table)}".encode(), digest_size=10)
        for path in (*self.texts, *([self.table] if self.table else [])):
            try:
                with open_file(path, regular=True) as file:  # it is read again, for the counts
                    content = hashlib.blake2b(digest_size=16)
                    while piece := file.read(_READ_BYTES):
                        content.update(piece)
            except OSError as error:
                raise UsageError(f"{path}: cannot be read ({error.strerror}); give a readable file") from None
            digest.update(content.digest())
        return digest.hexdigest()


def add_draft_head_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("LM head of the drafts (never changes the text)")
    group.add_argument(
        "--draft-head-rows",
        type=_rows,
        default=_FULL,
        metavar="N|full",
        help="keep the rows of the N most useful tokens, 32768 or 65536, say (default: %(default)s)",
    )
    group.add_argument(
        "--draft-head-type",
        choices=HEAD_TYPES,
        default=HEAD_TYPES[0],
        help="requantise the rows (default: %(default)s)",
    )
    group.add_argument(
        "--draft-head-text",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="useful is what occurs in these UTF-8 texts (default: low ids first)",
    )
    group.add_argument(
        "--draft-head-table",
        type=Path,
        metavar="FILE",
        help="the same, counted by `python -m export.token_frequencies`",
    )


def draft_head_options(given: argparse.Namespace) -> DraftHeadOptions:
    """The checked options of `add_draft_head_arguments`."""
    options = DraftHeadOptions(
        given.draft_head_rows, given.draft_head_type, tuple(given.draft_head_text or ()), given.draft_head_table
    )
    options.validate()
    return options


def table_head(tokens: Sequence[str], kinds: Sequence[int]) -> str:
    """First line of a table of token frequencies: what it is, and the vocabulary that it is for."""
    digest = hashlib.blake2b("\n".join([*tokens, *map(str, kinds)]).encode(), digest_size=10)
    return f"{TABLE_MAGIC}, vocabulary {digest.hexdigest()}"


def refuse_for_folder(options: DraftHeadOptions, folder: Path) -> None:
    """Raise UsageError when ``options`` ask for something of a model that has been exported already."""
    if not options.changes_nothing:
        raise UsageError(f"{folder}: is exported already; --draft-head-... belongs to its export, so give the .gguf")


def _rows(text: str) -> int:
    if text == _FULL:
        return ALL_ROWS
    try:
        rows = int(text)
    except ValueError:
        rows = 0
    if rows < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: wanted a number of tokens, or {_FULL}")
    return rows
