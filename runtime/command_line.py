"""What the command lines share: flags of the model and of sampling, exit codes, Ctrl-C, closed pipes."""

from __future__ import annotations

import argparse
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from engines.command import EXIT_INTERRUPTED, EXIT_PIPE_CLOSED, Parser, run_command, said_at_last, say
from engines.draft_head import add_draft_head_arguments, draft_head_options
from engines.errors import UsageError
from engines.given_files import given_text
from engines.signals import handling
from runtime.model_cache import exported_folder
from runtime.sampling import SamplingParams
from runtime.session import BACKENDS, DRAFT_N_DEFAULT, SPEC_TYPES, Session, SpecOptions, open_session

# What every command line shares comes from `engines.command`; those of the runtime find all in one place.
__all__ = ["EXIT_INTERRUPTED", "EXIT_PIPE_CLOSED", "Parser", "run_command", "said_at_last", "say"]
_MOST_KEY_BYTES = 64 << 10


def add_model_arguments(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    parser.add_argument(
        "model",
        type=Path,
        metavar="MODEL",
        nargs="?" if optional else None,
        help=".gguf file (exported on first use) or exported folder",
    )
    group = parser.add_argument_group("model")
    group.add_argument(
        "-c",
        "--ctx-size",
        type=context_size,
        default=None,
        metavar="N",
        help="most tokens of prompt and text; 0: the model's, auto: those of them that fit the memory (default)",
    )
    group.add_argument(
        "-t",
        "--threads",
        type=int,
        default=0,
        metavar="N",
        help="CPU threads; 0: one per core, one alone for small models",
    )
    group.add_argument("--backend", choices=BACKENDS, default="auto", help="what computes (auto: what MODEL is for)")
    group.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help="where exports of .gguf files are kept (default: $NEXTN_CACHE, else ~/.cache/nextn-trt)",
    )
    add_draft_head_arguments(parser)


def add_against_argument(group: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--against",
        type=_gguf,
        metavar="MODEL.gguf",
        help="also compare state and logits with what the equations give for this file, and name what is off first; "
        "minutes for a large one",
    )


def _gguf(text: str) -> Path:
    """Said before anything is loaded."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text!r}: no such file; give the .gguf that the build was made from")
    return Path(text)


def context_size(text: str) -> int | None:
    """Of --ctx-size: None for "auto"."""
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: wanted a whole number or auto") from None


def add_spec_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("drafting (never changes the text)")
    group.add_argument(
        "--spec-type",
        choices=SPEC_TYPES,
        default="auto",
        help="auto: as many drafts as pay, if the model has a NextN head; draft-mtp: always the most; none: plain",
    )
    group.add_argument(
        "--spec-draft-n-max",
        type=int,
        default=DRAFT_N_DEFAULT,
        metavar="N",
        help="most drafts a round, 0: none (default: %(default)s)",
    )


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--temp", type=float, default=0.0, metavar="T", help="0: the most probable token (default)")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="keep the K most probable; 0: all (default)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="keep the top share P; 1: all (default)")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P", help="keep P times the best; 0: all (default)")
    group.add_argument("-s", "--seed", type=int, default=-1, metavar="N", help="-1: a random one, reported (default)")


def sampling_params(options: argparse.Namespace) -> SamplingParams:
    """Checked parameters with a seed drawn where none was given."""
    return SamplingParams(options.temp, options.top_k, options.top_p, options.min_p, options.seed).resolved()


def session_of(options: argparse.Namespace, sequences: int = 1, kept_bytes: int = 0) -> Session:
    """Load the model that the flags of `add_model_arguments` and `add_spec_arguments` name (see `open_session`)."""
    spec = SpecOptions(options.spec_type, options.spec_draft_n_max)
    spec.validate()  # before a long export
    folder = exported_folder(
        options.model, draft=spec.wants_draft, cache_dir=options.cache_dir, draft_head=draft_head_options(options)
    )
    return open_session(
        folder,
        backend=options.backend,
        context_size=options.ctx_size,
        threads=options.threads,
        spec=spec,
        sequences=sequences,
        kept_bytes=kept_bytes,
    )


def read_api_key(path: Path) -> str:
    """What --api-key-file names, without white space around it. Raises UsageError."""
    key = given_text("--api-key-file", path, "give a file that holds the key", _MOST_KEY_BYTES).strip()
    if not key:
        raise UsageError(f"--api-key-file {path}: is empty")
    return key


@contextlib.contextmanager
def interrupt_flag() -> Iterator[Callable[[], bool]]:
    """A function that tells whether Ctrl-C was pressed inside the block; a second one raises KeyboardInterrupt."""
    pressed = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    with handling(signal.SIGINT, on_signal):
        yield pressed.is_set
