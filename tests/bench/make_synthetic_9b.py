"""A GGUF of the 9B geometry whose text and accepted drafts are known: `python -m tests.bench.make_synthetic_9b OUT`.

Every block is random, valid and on disk, tensor types are llama.cpp's for Q4_K_M; 5.8 GB, in well under two minutes on
16 cores. Needs NumPy alone. How the text comes about, by the model's ordinary path:

- Embedding rows are random with RMS 64, each layer adds less than RMS 1: what leaves the trunk is still, to a few per
  cent, the embedding e(t) of the last token t.
- output_norm passes half A of the hidden values and scales half B by 1/32; the draft head's norm does the opposite. So
  trunk and draft head read different halves of one LM head.
- LM head row j is [half A of e(i) | half B of e(k)] for trunk[i] = j, draft[k] = j (`SyntheticText`): the embedding's
  own values, exact in Q6_K.
- eh_proj is [64 * identity | 0], exact in Q4_K: the draft head sees e(t) again.

    ... OUT --acceptance 0.783                   the text is the same for every acceptance
    ... OUT --acceptance 0.3 --rewrite-head      change a file: output.weight alone is written
    ... OUT --acceptance 0.9,0,0.6,0.3 --change-every 250    each for 250 tokens of the text, in turn
    ... --expect 512 --drafts 3                  what a run of 512 tokens after "x" gives, without writing a model
    ... --expect 512 --table FILE                its tokens as a table for --draft-head-table
    ... --expect 512 --write-expected FILE       text and right drafts for `python -m runtime.bench --expect`

A trimmed draft head is measured fairly only if it has the rows of the text. By default the text keeps to ids below
30000 (as real text mostly does), which --draft-head-rows 32768 keeps without any table; with another --text-ids, or
fewer rows, make the table. Begin with a prompt that ends in a printable ASCII character.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from engines.draft_head import table_head
from tests.bench.synthetic_file import TensorPlace, header, place_tensors, tensor_list, write_piece
from tests.bench.synthetic_text import GEOMETRIES, SyntheticText, vocabulary

DEFAULT_ACCEPTANCE, DEFAULT_TEXT_IDS = 0.625, 30000
_PIECE_BYTES = 8 << 20


def write_model(path: Path, text: SyntheticText, jobs: int = 1, rewrite_head: bool = False) -> Path:
    """Write the model of ``text`` by ``jobs`` processes, or, into a model of another acceptance, its LM head alone.

    Raises ValueError when the file there is of another geometry."""
    places = place_tensors(tensor_list(text.geometry))
    head = header(text.geometry, places)
    size = places[-1].end
    if rewrite_head:
        with open(path, "rb") as file:
            if file.read(len(head)) != head or path.stat().st_size != len(head) + size:
                raise ValueError(f"{path}: is no synthetic model of this geometry")
    else:
        with open(path, "wb") as file:
            file.write(head)
            file.truncate(len(head) + size)
    # The LM head is made from the embedding in the file.
    for wanted in [True] if rewrite_head else [False, True]:
        tasks = [
            (path, len(head), text, place, first, last)
            for place in places
            if (place.kind == "head") == wanted
            for first, last in _pieces(place)
        ]
        if jobs == 1:
            for task in tasks:
                write_piece(*task)
        else:
            with ProcessPoolExecutor(jobs) as pool:
                for _ in pool.map(write_piece, *zip(*tasks, strict=True), chunksize=4):
                    pass
    return path


def write_table(path: Path, text: SyntheticText, counts: np.ndarray) -> None:
    """The tokens of ``counts`` [V] as `export.token_frequencies` writes them."""
    lines = [f"{token}\t{counts[token]}" for token in np.argsort(-counts, kind="stable") if counts[token]]
    path.write_text("\n".join([table_head(*vocabulary(text.geometry)), *lines]) + "\n", encoding="utf-8")


def write_expected(path: Path, text: SyntheticText, last: int, n_tokens: int) -> None:
    """The text after ``last`` as `runtime.benchmark.expected` reads it."""
    tokens = text.after(last, n_tokens)
    right = [int(text.draft[before] == token) for before, token in zip([last, *tokens], tokens, strict=False)]
    path.write_text(json.dumps({"after": last, "tokens": tokens, "right": right}), encoding="utf-8")


def _chances(value: str) -> tuple[float, ...]:
    return tuple(map(float, value.split(",")))


def _pieces(place: TensorPlace) -> list[tuple[int, int]]:
    step = max(1, _PIECE_BYTES // place.row_nbytes)
    return [(first, min(first + step, place.rows)) for first in range(0, place.rows, step)]


def main(arguments: list[str] | None = None) -> None:
    given = _parser().parse_args(arguments)
    chances = given.acceptance if len(given.acceptance) > 1 else given.acceptance[0]
    text = SyntheticText(GEOMETRIES[given.geometry], chances, given.text_ids, given.change_every)
    if given.out:
        write_model(given.out, text, given.jobs, given.rewrite_head)
        print(f"{given.out}: {given.out.stat().st_size / 1e9:.3f} GB, acceptance {','.join(map(str, text.chances))}")
    if given.expect:
        last = ord(given.prompt_end)
        run = text.run(last, given.expect, given.drafts)
        tokens, _ = vocabulary(text.geometry)
        print("".join(tokens[token] for token in run.tokens).replace(tokens[32], " "))
        print(
            f"{len(run.tokens)} tokens, {run.verify_steps} steps, accepted {run.draft_n_accepted}/{run.draft_n}, "
            f"{1 + run.draft_n_accepted / max(1, run.verify_steps):.4f} tokens a step",
            file=sys.stderr,
        )
        if given.table:
            write_table(given.table, text, text.counts(last, given.expect))
        if given.write_expected:
            write_expected(given.write_expected, text, last, given.expect)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, metavar="OUT", help="the file to write")
    parser.add_argument("--geometry", choices=GEOMETRIES, default="9b")
    parser.add_argument(
        "--acceptance", type=_chances, default=(DEFAULT_ACCEPTANCE,), metavar="P[,P...]", help="of each draft"
    )
    parser.add_argument(
        "--change-every", type=int, default=0, metavar="N", help="tokens of the text that each of several P is for"
    )
    parser.add_argument("--text-ids", type=int, default=DEFAULT_TEXT_IDS, metavar="N", help="ids of the text lie below")
    parser.add_argument("--rewrite-head", action="store_true", help="change the acceptance of the model at OUT")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="processes")
    parser.add_argument("--expect", type=int, default=0, metavar="N", help="print the text and counts of N tokens")
    parser.add_argument("--drafts", type=int, default=3, metavar="N", help="drafts a round of --expect")
    parser.add_argument("--prompt-end", default="x", metavar="CHARACTER", help="what the prompt of --expect ends with")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="write the tokens of --expect, for --draft-head-table"
    )
    parser.add_argument(
        "--write-expected", type=Path, metavar="FILE", help="write text and right drafts of --expect, for runtime.bench"
    )
    return parser


if __name__ == "__main__":
    main()
