"""`python -m tests.gpu.rounds FOLDER...`: every kind of pass that engines make, in a few seconds.

For a run under a checker (sanitize.sh). Loading runs a pass of every size; then prompts and rounds, drafting and not.
`--few`: one way of choosing tokens and one number of drafts, for checkers that take a hundred times as long.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from runtime.sampling import SamplingParams
from tests.gpu.checks import run, token_ids
from tests.gpu.conftest import open_folder
from tests.gpu.prepare import MAX_ROWS

PARAMS = (SamplingParams(), SamplingParams(0.8, min_p=0.05, seed=3), SamplingParams(0.8, top_k=40, top_p=0.95, seed=3))
DRAFTS = (1, 3, MAX_ROWS - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--few", action="store_true")
    args = parser.parse_args()
    for folder in args.folders:
        engines = open_folder(folder)
        prompt = token_ids(engines.vocab_size, engines.trunk.prefill_chunk + MAX_ROWS + 5, seed=1).tolist()
        for params in PARAMS[2:] if args.few else PARAMS:
            plain, _ = run(engines, prompt, 0, 16, params)
            for n_drafts in DRAFTS[1:2] if args.few else DRAFTS:
                text, _ = run(engines, prompt, n_drafts, 16, params)
                assert text == plain, f"{folder}: {n_drafts} drafts, {params}: {text}, not {plain}"
        if args.few:
            continue
        # Up to the last row of the cache.
        end = token_ids(engines.vocab_size, engines.trunk.context_size - 5, seed=2).tolist()
        text, _ = run(engines, end, MAX_ROWS - 1, -1, PARAMS[0])
        assert len(text) == 5, text
    print("same texts with and without drafts")


if __name__ == "__main__":
    main()
