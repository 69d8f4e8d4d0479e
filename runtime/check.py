"""`python -m runtime.check MODEL`: does drafting leave the text alone, and is the draft head any good?

SPEC_AGREE compares, token by token, texts generated with drafts and in a reference run that drafts nothing. A broken
draft head does not show there, since every draft is verified, so the head is measured too: DRAFT_TOP1 (its best guess
after true rows is the trunk's), KL(trunk || draft), and the acceptance rate by place. The state that a verify pass
leaves, whatever part of it is kept, must be that of one-token passes to the bit; one that is not is named. A build that
is wrong in itself agrees with itself: --against MODEL.gguf compares it with what the model's equations give.

Exit codes: 0 passed, 1 failed (SPEC_AGREE below 1, another state, another build, or acceptance below
--min-acceptance), others as runtime.generate.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from engines.draft_head import draft_head_options
from engines.errors import UsageError
from engines.given_files import given_text
from engines.report_files import json_text
from runtime.agreement import HARDLY_ANY, SUSPICIOUS_ACCEPTANCE, Report, compare, sampled_prompts
from runtime.command_line import Parser, add_against_argument, add_model_arguments, run_command, say
from runtime.diagnosis import diagnose, naming
from runtime.evaluation.prompts import MOST_PROMPTS
from runtime.model_cache import exported_folder
from runtime.sampling import SamplingParams
from runtime.session import DRAFT_N_DEFAULT, Session, SpecOptions, open_session
from runtime.state_probe import probed, state_faults

EXIT_FAILED = 1
# The first token comes from the prompt, and a round keeps room for the trunk's own.
_MIN_TOKENS = 3
_MOST = 1 << 20  # of anything that is counted: all prompts are drawn before the first is run


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    _check_numbers(options)
    params = SamplingParams(temperature=options.temp, seed=options.seed).resolved()
    spec = SpecOptions("draft-mtp", options.spec_draft_n_max)
    spec.validate()
    session = open_session(
        exported_folder(options.model, draft=True, cache_dir=options.cache_dir, draft_head=draft_head_options(options)),
        backend=options.backend,
        context_size=options.ctx_size,
        threads=options.threads,
        spec=spec,
    )
    prompts = [] if options.prompts is None else _read_prompts(options.prompts, session)
    _check_room(max(map(len, prompts), default=options.prompt_length), session.context_size)
    diagnosis = diagnose(session, options.against, probe_state=False) if options.against else None
    with naming(diagnosis):
        prompts = prompts or sampled_prompts(session, options.n_prompts, options.prompt_length, options.seed)
        report = Report.of([compare(session, prompt, params, options.predict) for prompt in prompts])
        rows = min(options.spec_draft_n_max + 1, session.context_size - 1)
        faults = state_faults(session.trunk, probed(prompts[0], rows), rows)
    failures = report.failures(options.min_acceptance) + [f"state: {fault}" for fault in faults]
    failures += [f"build: {fault}" for fault in diagnosis.faults] if diagnosis else []
    if options.json:
        about = {
            "passed": not failures,
            "backend": session.backend,
            "draft_n": options.spec_draft_n_max,
            "temperature": params.temperature,
            "seed": params.seed,
            "state_faults": [asdict(fault) for fault in faults],
            "against": diagnosis.as_dict() if diagnosis else None,
        }
        say(json_text({**about, **report.as_dict()}))
    else:
        say(_table(session, report, options))
        told = "of a pass, whatever part of it is kept: " + ("as of one-token passes" if not faults else "other bits")
        say(f"  {'state':<20}{'equal' if not faults else 'differs':>8}   {told}")
        if diagnosis:
            told = f"worst NMSE {diagnosis.worst:.1e} at {len(diagnosis.places)} places"
            say(f"  {'equations':<20}{'equal' if not diagnosis.faults else 'differs':>8}   {told}")
    for line in failures:
        say(f"failed: {line}", to=sys.stderr)
    if report.drafting.acceptance_rate < SUSPICIOUS_ACCEPTANCE:
        say(f"warning: {HARDLY_ANY}", to=sys.stderr)
    return EXIT_FAILED if failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m runtime.check",
        description="Check that drafting leaves the text alone, and how good the head is.",
    )
    add_model_arguments(parser)
    group = parser.add_argument_group("check")
    group.add_argument("--prompts", type=Path, metavar="FILE", help="UTF-8, one prompt a line (default: sampled ones)")
    group.add_argument("--n-prompts", type=int, default=8, metavar="N", help="sampled prompts (default: %(default)s)")
    group.add_argument("--prompt-length", type=int, default=32, metavar="N", help="their tokens (default: %(default)s)")
    group.add_argument(
        "-n", "--predict", type=int, default=128, metavar="N", help="tokens a prompt (default: %(default)s)"
    )
    group.add_argument(
        "--spec-draft-n-max",
        type=int,
        default=DRAFT_N_DEFAULT,
        metavar="N",
        help="drafts a round (default: %(default)s)",
    )
    group.add_argument(
        "--temp", type=float, default=0.0, metavar="T", help="temperature of the compared texts (default: 0)"
    )
    group.add_argument(
        "-s", "--seed", type=int, default=20240229, metavar="N", help="of prompts and sampling (default: %(default)s)"
    )
    group.add_argument(
        "--min-acceptance", type=float, default=0.0, metavar="R", help="fail below this acceptance rate (default: 0)"
    )
    add_against_argument(group)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of the table")
    return parser


def _check_numbers(options: argparse.Namespace) -> None:
    for flag, value in (
        ("--n-prompts", options.n_prompts),
        ("--prompt-length", options.prompt_length),
        ("--spec-draft-n-max", options.spec_draft_n_max),
    ):
        if not 1 <= value <= _MOST:
            raise UsageError(f"{flag} {value}: wanted 1 to {_MOST}")
    if options.predict < _MIN_TOKENS:
        raise UsageError(
            f"--predict {options.predict}: wanted {_MIN_TOKENS} or more; the first and the last token are never drafted"
        )
    if options.seed < 0:
        raise UsageError(f"--seed {options.seed}: wanted 0 or more, so that the check can be repeated")
    if not 0.0 <= options.min_acceptance <= 1.0:
        raise UsageError(f"--min-acceptance {options.min_acceptance}: wanted a rate from 0 to 1")


def _check_room(longest: int, context_size: int) -> None:
    """Texts that the context cuts before anything is drafted would compare nothing."""
    if longest + _MIN_TOKENS > context_size:
        raise UsageError(
            f"a prompt of {longest} tokens leaves too little of a context of {context_size}; "
            f"wanted room for {_MIN_TOKENS} more: shorten it or raise --ctx-size"
        )


def _read_prompts(path: Path, session: Session) -> list[list[int]]:
    lines = [line for line in given_text("--prompts", path, "give one prompt a line").splitlines() if line]
    if not 1 <= len(lines) <= MOST_PROMPTS:
        raise UsageError(f"--prompts {path}: holds {len(lines)} prompts; wanted 1 to {MOST_PROMPTS}, one a line")
    return [session.tokenizer.encode(line, most=session.context_size) for line in lines]


def _table(session: Session, report: Report, options: argparse.Namespace) -> str:
    n_equal = sum(r.first_difference is None for r in report.results)
    n_rows = sum(r.head.n for r in report.results)
    drafting, plain = report.drafting, report.plain
    by_place = " ".join(f"{rate:.3f}" for rate in report.acceptance_by_position)
    rows = [
        ("SPEC_AGREE", f"{report.spec_agree:.3f}", f"{n_equal} of {len(report.results)} texts equal"),
        ("DRAFT_TOP1", f"{report.draft_top1:.3f}", f"over {n_rows} positions"),
        ("draft head knows", f"{report.draft_known:.3f}", "of the trunk's tokens"),
        ("KL(trunk || draft)", "-" if report.kl is None else f"{report.kl:.3f}", "nats a position"),
        ("acceptance rate", f"{drafting.acceptance_rate:.3f}", f"by place {by_place}"),
        ("tokens per step", f"{drafting.tokens_per_step:.3f}", f"{drafting.predicted_n} tokens"),
        ("tokens a second", f"{drafting.predicted_per_second:.1f}", f"plain {plain.predicted_per_second:.1f}"),
    ]
    head = (
        f"{session.manifest.model_name} on {session.backend}: {len(report.results)} prompts,"
        f" {options.predict} tokens each, draft_n {options.spec_draft_n_max}, temperature {options.temp:g}"
    )
    return "\n".join([head, *(f"  {name:<20}{value:>8}   {note}" for name, value, note in rows)])


if __name__ == "__main__":
    run_command(main)
