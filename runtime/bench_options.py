"""The flags of `python -m runtime.bench`, and what is wrong with them before anything is loaded."""

from __future__ import annotations

import argparse
from pathlib import Path

from engines.command import whole_numbers
from engines.errors import UsageError
from engines.report_files import check_places
from runtime.benchmark.chart import check_chart_can_be_drawn
from runtime.command_line import Parser, add_model_arguments
from runtime.session import DRAFT_N_DEFAULT, SpecOptions

REPEATS, PREDICT = 5, 128
DEPTHS, PREFILL = (0, 4096, 16384), (512, 4096)
# The first token comes from the prompt, and a round keeps room for the trunk's own.
_MIN_TOKENS = 3
_MOST = 1 << 20


def bench_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m runtime.bench",
        description="Measure plain decoding and every number of drafts on the same prompts.",
    )
    add_model_arguments(parser)
    group = parser.add_argument_group("what is measured")
    group.add_argument(
        "--spec-draft-n-max",
        type=int,
        default=DRAFT_N_DEFAULT,
        metavar="N",
        help="most drafts a round, 0: plain decoding only (default: %(default)s, or what the engines take)",
    )
    group.add_argument(
        "--drafts",
        type=whole_numbers,
        metavar="N,...",
        help="numbers of drafts to always make (default: 1 to the most)",
    )
    group.add_argument(
        "--depths",
        type=whole_numbers,
        default=list(DEPTHS),
        metavar="N,...",
        help=f"tokens of text before the prompts; those that fit (default: {_shown(DEPTHS)})",
    )
    group.add_argument("--fill", action="store_true", help="also as much text before the prompt as the context holds")
    group.add_argument(
        "--prefill",
        type=whole_numbers,
        default=list(PREFILL),
        metavar="N,...",
        help=f"lengths of prompts whose reading is timed; empty: none (default: {_shown(PREFILL)})",
    )
    group.add_argument(
        "-n", "--predict", type=int, default=PREDICT, metavar="N", help="tokens after a prompt (default: %(default)s)"
    )
    group.add_argument(
        "--repeats", type=int, default=REPEATS, metavar="N", help="after one to warm up (default: %(default)s)"
    )
    group.add_argument(
        "-f", "--prompt-file", type=Path, metavar="FILE", help="UTF-8 text to go on from (default: four passages)"
    )
    group.add_argument(
        "--expect", type=Path, metavar="FILE", help="JSON: the text and the accepted drafts as they must be"
    )
    group.add_argument(
        "--bandwidth", type=float, metavar="GB/s", help="what 100 %% is (default: measured by reads of memory)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="draw a PNG there (needs matplotlib)")
    return parser


def check_options(options: argparse.Namespace) -> SpecOptions:
    """The drafting asked for. Raises UsageError."""
    spec = SpecOptions("auto", options.spec_draft_n_max)
    spec.validate()
    for flag, value, least in (("--predict", options.predict, _MIN_TOKENS), ("--repeats", options.repeats, 1)):
        if not least <= value <= _MOST:
            raise UsageError(f"{flag} {value}: wanted {least} to {_MOST}")
    for flag, values, least in (
        ("--drafts", options.drafts or [], 1),
        ("--depths", options.depths, 0),
        ("--prefill", options.prefill, 1),
    ):
        for value in values:
            if not least <= value <= _MOST:
                raise UsageError(f"{flag} {value}: wanted {least} to {_MOST}")
    if options.drafts and max(options.drafts) > options.spec_draft_n_max:
        raise UsageError(
            f"--drafts {max(options.drafts)}: --spec-draft-n-max allows {options.spec_draft_n_max}; raise it"
        )
    if options.bandwidth is not None and not options.bandwidth > 0:
        raise UsageError(f"--bandwidth {options.bandwidth:g}: wanted GB/s above 0")
    if options.chart:
        check_chart_can_be_drawn()
    check_places(json=options.json, chart=options.chart)
    return spec


def _shown(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))
