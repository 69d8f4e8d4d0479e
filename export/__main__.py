"""`python -m export MODEL.gguf -o DIR`: parse, call, print."""

from __future__ import annotations

import sys
from pathlib import Path

from tqdm import tqdm

from engines.command import Parser, report, run_command, say
from engines.draft_head import add_draft_head_arguments, draft_head_options
from engines.errors import NextnError
from export.config import load_config
from export.exporter import TARGETS, count_weights, export_model
from export.gguf_file import GGUFFile


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = Parser(prog="python -m export", description="Export a qwen35 GGUF to ONNX.")
    parser.add_argument("model", type=Path, metavar="MODEL.gguf", help="the model; of a split model the first part")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--target", choices=TARGETS, default=TARGETS[0], help="form of the graphs (default: %(default)s)"
    )
    parser.add_argument("--no-draft", action="store_true", help="leave the NextN draft head out")
    add_draft_head_arguments(parser)
    try:
        options = parser.parse_args(arguments)
        draft_head = draft_head_options(options)
        file = GGUFFile.open(options.model)
        total = count_weights(file, load_config(file, draft=not options.no_draft), draft_head)
        with tqdm(
            total=total, unit="w", unit_scale=True, desc="export", file=sys.stderr, leave=False, disable=None
        ) as bar:
            manifest = export_model(
                options.model,
                options.output,
                draft=not options.no_draft,
                target=options.target,
                draft_head=draft_head,
                progress=bar.update,
            )
    except NextnError as error:
        return report(error)
    for note in manifest.notes:
        say(f"note: {note}", to=sys.stderr)
    size = sum(nbytes for _, nbytes in manifest.files.values())
    head = f"draft head at block {manifest.geometry.draft_layer}" if manifest.has_draft else "no draft head"
    say(f"{options.output}: {manifest.model_name}, {len(manifest.files)} files, {size / 1e6:.1f} MB, {head}")
    return 0


if __name__ == "__main__":
    run_command(main)
