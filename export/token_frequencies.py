"""`python -m export.token_frequencies MODEL.gguf TEXT... -o TABLE`: how often the model's tokens occur in texts.

The table serves --draft-head-table: counted once from much text, used for every export. It is text: a first line that
names the vocabulary, then a line "id<TAB>count" for every token that occurs, most frequent first.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from engines.command import Parser, report, run_command, say
from engines.draft_head import TABLE_MAGIC, DraftHeadOptions, table_head
from engines.errors import NextnError, ResourceError, UsageError
from engines.given_files import given_text, open_file, real_path, reason, write_text
from export.draft_tokens import choose_tokens
from export.gguf_file import GGUFFile
from export.tokenizer import build_tokenizer, vocabulary

_PIECE_CHARACTERS = _REST_CHARACTERS = 1 << 18  # and of the line that a piece ends in
_SHOWN_ROWS = (8192, 16384, 32768, 65536, 131072)


def wanted_counts(file: GGUFFile, options: DraftHeadOptions) -> np.ndarray | None:
    """Occurrences [V] i64 by the options' texts or table; None when they name neither. Raises UsageError."""
    if options.table:
        return read_table(file, options.table)
    return count_tokens(file, options.texts) if options.texts else None


def count_tokens(file: GGUFFile, texts: Sequence[Path]) -> np.ndarray:
    """Occurrences [V] i64 of each token in UTF-8 texts, control tokens spelled in them included. Raises UsageError."""
    tokenizer = build_tokenizer(file)
    counts = np.zeros(len(vocabulary(file)[0]), np.int64)
    for path in texts:
        for piece in _pieces(path):
            ids = tokenizer.encode(piece, add_special_tokens=False).ids
            counts += np.bincount(ids, minlength=len(counts))
    if not counts.any():
        raise UsageError(f"{', '.join(map(str, texts))}: no text to count tokens in")
    return counts


def write_table(file: GGUFFile, counts: np.ndarray, path: Path) -> None:
    """Write ``counts`` [V] whole or not at all. Raises UsageError, ResourceError."""
    order = np.lexsort((np.arange(len(counts)), -counts))[: np.count_nonzero(counts)]
    lines = [table_head(*vocabulary(file)), *(f"{token}\t{counts[token]}" for token in order)]
    path = real_path(path)
    try:
        write_text(path, "\n".join(lines) + "\n")
    except OSError as error:
        raise ResourceError(f"{path}: cannot be written ({error.strerror}); choose another -o") from error


def read_table(file: GGUFFile, path: Path) -> np.ndarray:
    """Occurrences [V] i64 from a table. Raises UsageError: not a table, damaged, or of another vocabulary."""
    first, *lines = given_text("", path, "make it with `python -m export.token_frequencies`").splitlines() or [""]
    if not first.startswith(TABLE_MAGIC):
        raise UsageError(
            f"{path}: is no table of token frequencies (make one with `python -m export.token_frequencies`); "
            "plain text goes to --draft-head-text"
        )
    if first != table_head(*vocabulary(file)):
        raise UsageError(f"{path}: was counted with another vocabulary than that of {file.path}; count again")
    counts = np.zeros(len(vocabulary(file)[0]), np.int64)
    for number, line in enumerate(lines, 2):
        token, _, count = line.partition("\t")
        if not (token.isdecimal() and count.isdecimal() and int(token) < len(counts)):
            raise UsageError(f"{path}: line {number} is {line!r}; wanted a token below {len(counts)}, a tab, a count")
        counts[int(token)] += int(count)
    return counts


def coverage(counts: np.ndarray, kept: np.ndarray) -> float:
    """Share of the occurrences ``counts`` [V] that falls to the ids ``kept``: no head that names only these can be
    right more often."""
    return float(counts[kept].sum() / counts.sum())


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = Parser(
        prog="python -m export.token_frequencies",
        description="Count a model's tokens in texts, for --draft-head-table.",
    )
    parser.add_argument("model", type=Path, metavar="MODEL.gguf", help="whose tokens are counted")
    parser.add_argument("texts", type=Path, nargs="+", metavar="TEXT", help="UTF-8 text")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="TABLE", help="the table to write; without it only the report"
    )
    try:
        given = parser.parse_args(arguments)
        file = GGUFFile.open(given.model)
        counts = count_tokens(file, given.texts)
        if given.output is not None:
            write_table(file, counts, given.output)
        say(_report(file, counts))
    except NextnError as error:
        return report(error)
    return 0


def _report(file: GGUFFile, counts: np.ndarray) -> str:
    """What heads of some sizes would hold of these texts, chosen by id alone, and by the texts themselves."""
    lines = [f"{counts.sum()} tokens, {np.count_nonzero(counts)} of {len(counts)} occur"]
    sizes = [rows for rows in _SHOWN_ROWS if rows < len(counts)] or [len(counts) // 4, len(counts) // 2]
    for rows in sizes:
        try:
            shares = [coverage(counts, choose_tokens(file, rows, each)) for each in (None, counts)]
        except UsageError:  # fewer rows than are always kept
            continue
        lines.append(f"{rows} rows hold {shares[0]:.4f} of them by id, {shares[1]:.4f} by these counts")
    return "\n".join(lines)


def _pieces(path: Path) -> Iterator[str]:
    """The text in pieces that end with a line where they can."""
    try:
        with io.TextIOWrapper(io.BufferedReader(open_file(path, regular=True)), "utf-8", newline="") as file:
            while piece := file.read(_PIECE_CHARACTERS):
                yield piece + file.readline(_REST_CHARACTERS)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as UTF-8 text ({reason(error)}); give a readable file") from None


if __name__ == "__main__":
    run_command(main)
