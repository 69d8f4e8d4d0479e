"""`python -m runtime.eval MODEL`: how well the head drafts, and what it gains, by category and length of the prompts.

Every prompt is answered plainly and with drafts in one run, greedily and at a temperature; the texts must be the same.
--server puts the same prompts to servers, in place of a model or beside one.

Exit codes: 0 done, 1 a text with drafts was another, or the build is (--against), others as runtime.generate.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from engines.command import whole_numbers
from engines.draft_head import draft_head_options
from engines.errors import UsageError
from engines.report_files import check_places, json_text, write_report
from runtime.command_line import Parser, add_against_argument, add_model_arguments, run_command, said_at_last, say
from runtime.diagnosis import Diagnosis, diagnose, naming
from runtime.evaluation.measure import LocalModel, Run, suspicious_head
from runtime.evaluation.page import page
from runtime.evaluation.prompts import Prompt, load_prompts
from runtime.evaluation.server import Server
from runtime.evaluation.summary import summarise
from runtime.evaluation.table import as_csv, table
from runtime.model_cache import exported_folder
from runtime.sampling import SamplingParams
from runtime.session import DRAFT_N_DEFAULT, Session, SpecOptions, open_session
from runtime.tokenizer import TooManyTokens

FORMAT = 1
EXIT_FAILED = 1
PREDICT = 128
TEMPERATURES, LENGTHS = (0.0, 0.6), (128, 512, 2048, 8192)


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    _check(options)
    prompts = load_prompts(options.prompts, options.per_category)
    servers = [Server(url, options.predict, options.seed, options.api_key) for url in options.server]
    models = [server.model() for server in servers]
    session = None if options.model is None else _open(options)
    evaluation = _Evaluation(options, prompts, session, list(zip(servers, models, strict=True)))
    report = evaluation.report()
    with said_at_last(table(report)):
        write_report(options.json, json_text(report, indent=1) + "\n")
        write_report(options.csv, as_csv(evaluation.runs))
        write_report(options.html, page(report))
    if evaluation.diagnosis:
        say(f"  build: {evaluation.diagnosis}")
    for line in report["failures"]:
        say(f"failed: {line}", to=sys.stderr)
    if warning := suspicious_head(evaluation.runs):
        say(f"warning: {warning}", to=sys.stderr)
    return EXIT_FAILED if report["failures"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m runtime.eval", description="Evaluate drafting by categories of prompts.")
    add_model_arguments(parser, optional=True)
    group = parser.add_argument_group("what is asked")
    group.add_argument(
        "--prompts", type=Path, action="append", default=[], metavar="FILE", help="JSON lines (default: a small set)"
    )
    group.add_argument("--per-category", type=int, default=0, metavar="N", help="the first N of each; 0: all (default)")
    group.add_argument("--raw", action="store_true", help="continue the texts as they are, without chat template")
    group.add_argument("-n", "--predict", type=int, default=PREDICT, metavar="N", help="tokens a text (%(default)s)")
    group.add_argument(
        "--temps", type=_temperatures, default=list(TEMPERATURES), metavar="T,...", help="0: greedy (default: 0,0.6)"
    )
    group.add_argument("-s", "--seed", type=int, default=0, metavar="N", help="of sampling (default: %(default)s)")
    group.add_argument(
        "--lengths",
        type=whole_numbers,
        default=list(LENGTHS),
        metavar="N,...",
        help=f"tokens of prompts at which length splits end (default: {','.join(map(str, LENGTHS))})",
    )
    group.add_argument(
        "--spec-draft-n-max", type=int, default=DRAFT_N_DEFAULT, metavar="N", help="drafts a round (%(default)s)"
    )
    group.add_argument(
        "--spec-type", choices=("draft-mtp", "auto"), default="draft-mtp", help="auto: as many as pay, up to these"
    )
    add_against_argument(group)
    group = parser.add_argument_group("servers")
    group.add_argument(
        "--server", action="append", default=[], metavar="URL", help="OpenAI-compatible; may be repeated"
    )
    group.add_argument("--api-key", default="", metavar="KEY", help="for the servers")
    group = parser.add_argument_group("reports")
    for name, what in (("json", "everything"), ("csv", "a line a text"), ("html", "a page with charts")):
        group.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"write {what} there")
    return parser


def _temperatures(text: str) -> list[float]:
    try:
        return list(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: wanted numbers, as in 0,0.6") from None


def _check(options: argparse.Namespace) -> None:
    if options.model is None and not options.server:
        raise UsageError("nothing to evaluate; give a MODEL, a --server URL, or both")
    if options.against and options.model is None:
        raise UsageError("--against: looks into a build; give a MODEL too")
    if options.raw and options.server:
        raise UsageError("--raw: servers put prompts into their chat template; leave --raw or --server out")
    for flag, value, least in (("--predict", options.predict, 1), ("--per-category", options.per_category, 0)):
        if value < least:
            raise UsageError(f"{flag} {value}: wanted {least} or more")
    if options.lengths != sorted({n for n in options.lengths if n > 0}):
        raise UsageError(f"--lengths {','.join(map(str, options.lengths))}: wanted rising numbers above 0")
    for temperature in options.temps:
        SamplingParams(temperature=temperature, seed=options.seed).resolved()
    if options.seed < 0:
        raise UsageError(f"--seed {options.seed}: wanted 0 or more, the same for all")
    check_places(json=options.json, csv=options.csv, html=options.html)


def _open(options: argparse.Namespace) -> Session:
    spec = SpecOptions(options.spec_type, options.spec_draft_n_max)
    spec.validate()
    head = draft_head_options(options)
    folder = exported_folder(options.model, draft=spec.wants_draft, cache_dir=options.cache_dir, draft_head=head)
    return open_session(
        folder, backend=options.backend, context_size=options.ctx_size, threads=options.threads, spec=spec
    )


class _Evaluation:
    """Prompt by prompt, on every source in turn, so that what else the machine does hits all alike."""

    def __init__(
        self,
        options: argparse.Namespace,
        prompts: list[Prompt],
        session: Session | None,
        servers: list[tuple[Server, str]],
    ) -> None:
        self._options, self._prompts, self._session, self._servers = options, prompts, session, servers
        self._local = None if session is None else LocalModel(session, options.raw, options.predict, options.seed)
        self.runs: list[Run] = []
        self._left_out: list[str] = []
        self.diagnosis: Diagnosis | None = None

    def report(self) -> dict[str, Any]:
        options, session, local = self._options, self._session, self._local
        self._run_all()
        return {
            "format": FORMAT,
            "model": session.manifest.model_name if session else "",
            "backend": session.backend if session else "",
            "servers": [{"url": server.base, "model": model} for server, model in self._servers],
            "how": {
                "prompts": len({run.prompt for run in self.runs}),
                "predict": options.predict,
                "draft_n": options.spec_draft_n_max,
                "spec_type": options.spec_type,
                "temperatures": options.temps,
                "seed": options.seed,
                "lengths": options.lengths,
            },
            "groups": summarise(self.runs, options.lengths),
            "left_out": self._left_out,
            "failures": local.failures if local else [],
            "against": self.diagnosis.as_dict() if self.diagnosis else None,
            "runs": [asdict(run) for run in self.runs],
        }

    def _run_all(self) -> None:
        asked = self._encoded()
        if not asked:
            raise UsageError(f"no prompt fits the context: {self._left_out[0]}")
        for server, model in self._servers:  # as warm-up, which does not count
            server.run(self._prompts[asked[0][0]], 0, 0.0, model)
        if self._local and self._options.against:
            self.diagnosis = diagnose(self._local.session, self._options.against, probe_state=False)
        with naming(self.diagnosis):
            self._run_texts(asked)
        if self.diagnosis and self._local:
            self._local.failures += [f"build: {fault}" for fault in self.diagnosis.faults]

    def _run_texts(self, asked: list[tuple[int, list[int]]]) -> None:
        if self._local:
            self._local.warm_up(asked[0][1])
        steps = [(temperature, *each) for temperature in self._options.temps for each in asked]
        for temperature, number, ids in tqdm(steps, desc="texts", file=sys.stderr, leave=False, disable=None):
            prompt = self._prompts[number]
            if self._local:
                self.runs += self._local.run(prompt, number, ids, temperature)
            self.runs += [server.run(prompt, number, temperature, model) for server, model in self._servers]
        if self._local:
            self._local.failures += self._local.suspects(asked[0][1])

    def _encoded(self) -> list[tuple[int, list[int]]]:
        """(number, token ids) of the prompts that fit; no ids without a model."""
        if self._local is None:
            return [(number, []) for number in range(len(self._prompts))]
        found = []
        for number, prompt in enumerate(self._prompts):
            try:
                ids = self._local.encode(prompt)
            except TooManyTokens as error:
                self._left_out.append(f"{prompt.place}: {error}")
                continue
            if self._local.has_room(ids):
                found.append((number, ids))
            else:
                self._left_out.append(f"{prompt.place}: {len(ids)} tokens, more than the context has room for")
        return found


if __name__ == "__main__":
    run_command(main)
