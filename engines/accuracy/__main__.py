"""`python -m engines.accuracy MODEL.gguf -o DIR`: the TensorRT form against the canonical graph, place by place.

Both run the same passes over real tokens from real state, through Polygraphy: the canonical graph on ONNX Runtime, the
other on TensorRT or, without a GPU, by what each op means. Exit codes: 0 all within the tolerances, 1 not, others as
`engines.build`.
"""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from engines.command import Parser, report, run_command, say
from engines.draft_head import add_draft_head_arguments, draft_head_options, refuse_for_folder
from engines.errors import NextnError, UsageError
from engines.given_files import given_text
from engines.report_files import check_places, json_text, write_report

if TYPE_CHECKING:
    from engines.accuracy.compare import Comparison

EXIT_FAILED = 1
_PROMPT_N, _MAX_DRAFT = 48, 3
_MOST_PROMPT, _MOST_DRAFT = 4096, 7


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        return _run(_parser().parse_args(arguments))
    except NextnError as error:
        return report(error)


def _run(given: argparse.Namespace) -> int:
    if importlib.util.find_spec("polygraphy") is None:
        raise UsageError("Polygraphy is not installed; pip install 'nextn-trt[accuracy]'")
    from engines.accuracy.commands import commands, use_rtx_switch

    use_rtx_switch()
    from engines.accuracy import compare
    from engines.accuracy.equations import against_equations
    from engines.accuracy.plan import load_plan
    from engines.accuracy.scripts import print_measures
    from engines.accuracy.verdict import Verdict

    check_places(json=given.json)
    folder = _folder(given)
    plan, manifest = load_plan(folder)
    backend, why = _backend(given.backend)
    say(f"{manifest.model_name}: {backend} against ONNX Runtime, {plan.lowering}, {plan.kv_cache} KV cache{why}")
    if given.prepare_only:
        compare.run_reference(folder)
        say("\n".join(commands(folder, plan, manifest)))
        return 0
    done: list[Comparison] = []
    for each in compare.compare(folder, backend, reference=given.model.suffix == ".gguf" or given.again):
        done.append(each)
        if given.all or not each.ok:
            print_measures(each.measures, f"{each.role} {each.tokens}", plan.lowering == "layers")
    verdict = Verdict(done, *compare.damaged_weights(folder), layers=plan.lowering == "layers")
    if given.equations and not verdict.damaged:  # which the equations would take from the damaged file
        verdict = replace(verdict, equations=against_equations(folder))
    if verdict.layers and verdict.bad is not None:
        verdict = replace(verdict, inside=compare.inside_layer(folder, backend, verdict.bad))
    say(verdict.summary())
    if given.json:
        report = {"model": manifest.model_name, **verdict.as_dict(backend, plan)}
        write_report(given.json, json_text(report, indent=1) + "\n")
    if given.commands:
        say("\n".join(commands(folder, plan, manifest)))
    return 0 if verdict.passed else EXIT_FAILED


def _folder(given: argparse.Namespace) -> Path:
    """The prepared folder: made from a .gguf, or given as it is."""
    from engines.accuracy.compare import prepare
    from engines.accuracy.inputs import DEFAULT_TEXT
    from engines.accuracy.plan import Plan

    model: Path = given.model
    if model.is_dir():
        if given.output is not None or given.export is not None or not given.draft:
            raise UsageError(f"{model}: is prepared already; leave -o, --export and --no-draft out")
        refuse_for_folder(draft_head_options(given), model)
        return model
    if not model.exists():
        raise UsageError(f"{model}: no such file or folder; give a .gguf file or a prepared folder")
    if given.output is None:
        raise UsageError("-o DIR: say where the two exports may go; about twice the model's size")
    for flag, value, most in (("--tokens", given.tokens, _MOST_PROMPT), ("--max-draft", given.max_draft, _MOST_DRAFT)):
        if not 1 <= value <= most:
            raise UsageError(f"{flag} {value}: wanted 1 to {most}")
    if given.tokens <= given.max_draft + 1:
        raise UsageError(f"--tokens {given.tokens}: wanted more than --max-draft + 1, for a pass of the long kind")
    text = given_text("--text", given.text, "give a file of text") if given.text else DEFAULT_TEXT
    plan = Plan(given.tokens, given.max_draft + 1, given.lowering, given.kv_cache)
    prepare(model, given.output, plan, text, given.export, draft_head_options(given), given.draft)
    return Path(given.output)


def _backend(wanted: str) -> tuple[str, str]:
    """What runs the TensorRT form, and why if that was not asked for."""
    from engines.accuracy.commands import gpu_missing

    if wanted != "auto":
        return wanted, ""
    missing = gpu_missing()
    return ("oracle", f" ({missing}: each op by its meaning)") if missing else ("tensorrt", "")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m engines.accuracy", description="Compare the two forms of a model.")
    parser.add_argument("model", type=Path, metavar="MODEL.gguf|DIR", help="a model, or a folder that was prepared")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="where to prepare: exports, inputs, scripts")
    parser.add_argument(
        "--export", type=Path, metavar="DIR", help="check this export for TensorRT, not a fresh one (needs MODEL.gguf)"
    )
    parser.add_argument("--backend", choices=("auto", "tensorrt", "oracle"), default="auto", help="(default: auto)")
    parser.add_argument(
        "--lowering",
        choices=("ops", "layers"),
        default="ops",
        help="after which nodes: every op (default), or every layer, as engines are built",
    )
    parser.add_argument("--kv-cache", choices=("f16", "int8"), default="f16", help="(default: f16)")
    parser.add_argument("--no-draft", dest="draft", action="store_false", help="leave out the draft head")
    parser.add_argument("--text", type=Path, metavar="FILE", help="UTF-8, whose tokens are run (default: a short one)")
    parser.add_argument("--tokens", type=int, default=_PROMPT_N, metavar="N", help="of the long pass (%(default)s)")
    parser.add_argument("--max-draft", type=int, default=_MAX_DRAFT, metavar="N", help="of the verify pass")
    parser.add_argument("--all", action="store_true", help="print every place of every pass, not only of failed ones")
    parser.add_argument("--again", action="store_true", help="with a prepared DIR: run ONNX Runtime again too")
    parser.add_argument(
        "--no-equations",
        dest="equations",
        action="store_false",
        help="leave out whether the reference is what the model's equations give (minutes for a large model)",
    )
    parser.add_argument("--prepare-only", action="store_true", help="for another machine: only ONNX Runtime's side")
    parser.add_argument("--commands", action="store_true", help="print the same as commands of Polygraphy's own")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    add_draft_head_arguments(parser)
    return parser


if __name__ == "__main__":
    run_command(main)
