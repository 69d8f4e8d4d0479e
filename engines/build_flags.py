"""The flags of `python -m engines.build`."""

from __future__ import annotations

import argparse
from pathlib import Path

from engines.command import Parser
from engines.draft_head import add_draft_head_arguments
from engines.engine_manifest import EngineOptions
from engines.errors import UsageError
from plugins.ops import MAX_DECODE_T

LOWERINGS = ("layers", "ops")
KV_CACHES = ("f16", "int8")
DEFAULT_OPTIONS = EngineOptions(max_rows=6, context=16384, prefill_chunk=1024, embed_weights=False)
CONTEXT_AUTO = -1
PREFILL_CHUNK_MAX = 1 << 16
_GPU_MEMORY_MAX = 1e6


def build_parser() -> Parser:
    defaults = DEFAULT_OPTIONS
    parser = Parser(prog="python -m engines.build", description="Build TensorRT engines of a model.")
    parser.add_argument("model", type=Path, metavar="DIR|MODEL.gguf", help="an export for TensorRT, or a .gguf")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="with a .gguf: the folder to make")
    parser.add_argument(
        "--max-draft", type=int, default=defaults.max_rows - 1, metavar="N", help="longest draft (default %(default)s)"
    )
    parser.add_argument(
        "--context",
        type=_context,
        metavar="N",
        help="KV rows, tokens; auto: as many as fit the GPU's memory (default: the model's, "
        f"{defaults.context} at the most)",
    )
    parser.add_argument(
        "--gpu-memory", type=float, metavar="GB", help="for --context auto: what is free (default: on the GPU here)"
    )
    parser.add_argument(
        "--prefill-chunk", type=int, default=defaults.prefill_chunk, metavar="N", help="(default %(default)s)"
    )
    parser.add_argument(
        "--embed-weights", action="store_true", help="put the weights into the engines, for tools that know no inputs"
    )
    parser.add_argument(
        "--lowering",
        choices=LOWERINGS,
        default=defaults.lowering,
        help="a plugin a decoder layer, or one per op, to compare inside a layer (default %(default)s)",
    )
    parser.add_argument(
        "--kv-cache",
        choices=KV_CACHES,
        default=defaults.kv_cache,
        help="of trunk and draft head; int8: half the memory, and text that may differ (default %(default)s)",
    )
    parser.add_argument("--no-draft", action="store_true", help="with a .gguf: leave the NextN draft head out")
    parser.add_argument(
        "--plugins", type=Path, metavar="LIB.so", help="the plugin library (default: the one built here)"
    )
    parser.add_argument("--layers", action="store_true", help="print every layer of what is built")
    add_draft_head_arguments(parser)
    return parser


def _context(text: str) -> int:
    """Of --context: CONTEXT_AUTO for "auto"."""
    if text == "auto":
        return CONTEXT_AUTO
    number = int(text)
    if number == CONTEXT_AUTO:
        raise ValueError(text)
    return number


def check_numbers(given: argparse.Namespace) -> None:
    """Raise UsageError for what is wrong whatever the model is: before a long export."""
    rows = given.max_draft + 1
    for flag, value, low, high in (
        ("--max-draft", given.max_draft, 0, MAX_DECODE_T - 1),
        ("--prefill-chunk", given.prefill_chunk, 1, PREFILL_CHUNK_MAX),
    ):
        if not low <= value <= high:
            raise UsageError(f"{flag} {value}: wanted {low} to {high}")
    if given.context not in (None, CONTEXT_AUTO) and given.context < rows:
        raise UsageError(f"--context {given.context}: wanted at least --max-draft + 1 = {rows}")
    if given.gpu_memory is None:
        return
    if given.context != CONTEXT_AUTO:
        raise UsageError("--gpu-memory is for --context auto")
    if not 0 < given.gpu_memory < _GPU_MEMORY_MAX:
        raise UsageError(f"--gpu-memory {given.gpu_memory:g}: wanted GB above 0")
