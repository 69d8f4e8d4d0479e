"""`python -m tests.gpu.large DIR`: the exactness tests on any engines, at contexts of 0, 1000 and 16000 tokens.

For models too large for the test suite. Fails with what differs."""

from __future__ import annotations

import argparse
from pathlib import Path

from runtime.sampling import SamplingParams
from tests.gpu.checks import check_rows_agree, run
from tests.gpu.conftest import open_folder
from tests.gpu.prepare import MAX_ROWS

STARTS = (0, 1000, 16000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    engines = open_folder(parser.parse_args().folder)
    for start in STARTS:
        if start + 32 <= engines.trunk.context_size:
            check_rows_agree(engines, start, n=MAX_ROWS)
            print(f"passes of 2 to {MAX_ROWS} tokens after {start}: as one-token passes, bit by bit")
    for params in (SamplingParams(), SamplingParams(0.8, seed=3), SamplingParams(0.8, top_k=40, top_p=0.95, seed=3)):
        plain, stats = run(engines, [72, 105], 0, 128, params)
        for n_drafts in range(1, 6):
            text, drafting = run(engines, [72, 105], n_drafts, 128, params)
            assert text == plain, f"{n_drafts} drafts, {params}"
        print(
            f"{params}: same text with 1 to 5 drafts; {stats.predicted_per_second:.0f} tok/s plain, "
            f"{drafting.predicted_per_second:.0f} with 5 drafts, first runs included"
        )


if __name__ == "__main__":
    main()
