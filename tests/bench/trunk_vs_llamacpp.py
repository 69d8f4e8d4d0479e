"""Is the trunk llama.cpp's, and is it the same with the draft head in the file and with drafting on?

    python -m tests.bench.trunk_vs_llamacpp [MODEL.gguf] [--corpus TEXT ...] [--json FILE]

Over every position of a corpus: the trunk without its head, with the head loaded, and in verify passes with drafts that
are rejected and rolled back, of this project and of llama.cpp (CPU). Compared are the next token (top-1) and the
distribution (KL). llama.cpp gets the model's values as float32, as it rounds activations to 8 bits where weights are
quantised; --as-is gives it the file itself. Exit code 1: a trunk is changed by its head, or another than llama.cpp's.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from engines.command import Parser, run_command
from engines.errors import EngineError, UsageError
from engines.report_files import check_places, json_text, write_report
from export.config import load_config
from export.exporter import export_model
from export.gguf_file import GGUFFile
from runtime.engine_onnxruntime import OnnxDraftEngine, OnnxTrunkEngine
from tests.compare import kl_divergence
from tests.dequantized import write_dequantized
from tests.exported import MAX_ROWS, Exported, append, greedy
from tests.peer.speculation import texts
from tests.vocabulary_files import TRAINED_MODEL

EXIT_FAILED = 1
# Of the values as float32: float32 sums in another order. Of the file as it is: llama.cpp's 8-bit activations.
KL_MEAN_MAX, TOP1_MIN = {False: 1e-7, True: 2e-2}, {False: 0.999, True: 0.93}
# Share of drafts that the two heads may differ by over the same text.
ACCEPTANCE_MAX_ABS = 0.02


@dataclass(frozen=True)
class Trunks:
    """Logits [N, V] over all texts: without a head, with it loaded, with drafting on; and drafts that were right."""

    bare: np.ndarray
    loaded: np.ndarray
    drafting: np.ndarray
    drafted: int
    accepted: int


@dataclass(frozen=True)
class Agreement:
    """Of logits with reference ones. first: the first row whose best token differs or whose KL is above the bound."""

    positions: int
    top1: float
    kl_mean: float
    kl_max: float
    max_abs: float
    same_bits: bool
    first: int | None

    @classmethod
    def of(cls, got: np.ndarray, want: np.ndarray, kl_bound: float) -> Agreement:
        kl, best = kl_divergence(want, got), got.argmax(axis=-1) == want.argmax(axis=-1)
        off = np.flatnonzero(~(kl <= kl_bound) | ~best)
        return cls(
            positions=len(kl),
            top1=float(best.mean()),
            kl_mean=float(kl.mean()),
            kl_max=float(kl.max()),
            max_abs=float(np.abs(got - want).max()),
            same_bits=bool(np.array_equal(got, want)),
            first=int(off[0]) if len(off) else None,
        )


def ours(model: Path, folder: Path, corpus: list[list[int]], n_drafts: int) -> Trunks:
    """This project's trunks, on ONNX Runtime."""
    size = max(map(len, corpus)) + MAX_ROWS
    alone = Exported(model, folder / "bare", export_model(model, folder / "bare", draft=False)).trunk(size)
    whole = Exported(model, folder / "whole", export_model(model, folder / "whole"))
    trunk, head = whole.engines(size)
    rows: dict[str, list[np.ndarray]] = {"bare": [], "loaded": [], "drafting": []}
    drafted = accepted = 0
    for text in corpus:
        for name, engine in (("bare", alone), ("loaded", trunk)):
            engine.start(greedy)
            rows[name].append(append(engine, text, 1)[0])
        logits, counts = _drafting(trunk, head, text, n_drafts)
        rows["drafting"].append(logits)
        drafted, accepted = drafted + counts[0], accepted + counts[1]
    return Trunks(**{name: np.concatenate(parts) for name, parts in rows.items()}, drafted=drafted, accepted=accepted)


def _drafting(
    trunk: OnnxTrunkEngine, head: OnnxDraftEngine, text: list[int], n_drafts: int
) -> tuple[np.ndarray, tuple[int, int]]:
    """Logits [T, V] over a text from verify passes: the next token and drafts, of which those stay that are its."""
    trunk.start(greedy)
    head.start(greedy)
    logits, drafted, accepted, position = [], 0, 0, 0
    pending, before = [text[0]], head.zero_hidden()
    while position < len(text):
        drafts = [int(token) for token in head.draft(pending, before, n_drafts)]
        result = trunk.verify([text[position], *drafts])
        kept = 1 + _leading(drafts, text[position + 1 :])
        logits.append(trunk.logits[:kept].copy())
        trunk.commit(kept)
        drafted, accepted = drafted + n_drafts, accepted + kept - 1
        position += kept
        pending, before = text[position - kept + 1 : position + 1], result.hidden[:kept].copy()
    return np.concatenate(logits), (drafted, accepted)


def _leading(drafts: list[int], text: list[int]) -> int:
    for count, (draft, token) in enumerate(zip(drafts, text, strict=False)):
        if draft != token:
            return count
    return min(len(drafts), len(text))


def llamacpp(model: Path, corpus: list[list[int]], n_drafts: int, threads: int) -> Trunks:
    """llama.cpp's trunks."""
    from tests.peer.llamacpp import LlamaCpp

    size = max(map(len, corpus)) + MAX_ROWS
    rows: dict[str, list[np.ndarray]] = {"bare": [], "loaded": [], "drafting": []}
    peer = LlamaCpp(model, n_ctx=size, threads=threads, mtp=False)
    for text in corpus:
        peer.clear()
        rows["bare"].append(peer.step(peer.trunk, text, 0)[0])
    peer.close()
    peer = LlamaCpp(model, n_ctx=size, threads=threads, max_drafts=n_drafts)
    drafted = accepted = 0
    for text in corpus:
        rows["loaded"].append(peer.trunk_rows(text)[0])
        logits, rounds = peer.follow(text, n_drafts)
        rows["drafting"].append(logits)
        drafted, accepted = drafted + n_drafts * len(rounds), accepted + sum(rounds)
    peer.close()
    return Trunks(**{name: np.concatenate(parts) for name, parts in rows.items()}, drafted=drafted, accepted=accepted)


def judge(ours: Trunks, peer: Trunks, first_positions: list[int], as_is: bool) -> dict[str, Any]:
    """The report. first_positions: of each row, its position in its text."""
    bound = KL_MEAN_MAX[as_is]
    compared = {
        "ours, head loaded / bare": Agreement.of(ours.loaded, ours.bare, bound),
        "ours, drafting / bare": Agreement.of(ours.drafting, ours.bare, bound),
        "llama.cpp, head loaded / bare": Agreement.of(peer.loaded, peer.bare, bound),
        "llama.cpp, drafting / bare": Agreement.of(peer.drafting, peer.bare, bound),
        "ours / llama.cpp, bare": Agreement.of(ours.bare, peer.bare, 100 * bound),
        "ours / llama.cpp, head loaded": Agreement.of(ours.loaded, peer.loaded, 100 * bound),
        "ours / llama.cpp, drafting": Agreement.of(ours.drafting, peer.drafting, 100 * bound),
    }
    failures = []
    for name in ("ours, head loaded / bare", "ours, drafting / bare"):
        if not compared[name].same_bits:
            what = "state after rejected drafts (rollback, or its precision)" if "drafting" in name else "the head"
            failures.append(f"{name}: other bits in the trunk's logits; suspect {what}")
    unchanged, bare = not failures, compared["ours / llama.cpp, bare"]
    agrees = bare.kl_mean <= bound and bare.top1 >= TOP1_MIN[as_is]
    if not agrees:
        position = None if bare.first is None else first_positions[bare.first]
        failures.append(f"the trunk is not llama.cpp's, from position {position} on; suspect {_where(position)}")
    rates = {name: each.accepted / max(each.drafted, 1) for name, each in (("ours", ours), ("llama.cpp", peer))}
    # Of a trunk that is wrong the head gets wrong rows, and cannot be right.
    if not failures and not as_is and abs(rates["ours"] - rates["llama.cpp"]) > ACCEPTANCE_MAX_ABS:
        failures.append(
            f"drafts that are the text's tokens: ours {rates['ours']:.3f}, llama.cpp's {rates['llama.cpp']:.3f}; "
            "suspect the head (order of eh_proj's halves, its norms), not the trunk"
        )
    return {
        "passed": not failures,
        "trunk_unchanged_by_head": unchanged,
        "trunk_agrees": agrees,
        "compared": {name: asdict(each) for name, each in compared.items()},
        "drafts_right": rates,
        "failures": failures,
    }


def _where(position: int | None) -> str:
    if position == 0:
        return "what the first token meets: weights, norms, order of heads"
    return "what only later tokens meet: rope, positions, the convolution's window, recurrent state"


def table(report: dict[str, Any]) -> str:
    compared = report["compared"]
    lines = [f"{'':32}{'positions':>10}{'top-1':>9}{'KL mean':>11}{'KL max':>10}{'max error':>11}  bits"]
    for name, each in compared.items():
        bits = "same" if each["same_bits"] else "other"
        lines.append(
            f"{name:32}{each['positions']:>10}{each['top1']:9.4f}{each['kl_mean']:11.1e}{each['kl_max']:10.1e}"
            f"{each['max_abs']:11.1e}  {bits}"
        )
    rates = report["drafts_right"]
    lines.append(
        "drafts that are the text's tokens: " + ", ".join(f"{name} {rate:.3f}" for name, rate in rates.items())
    )
    changed = "UNCHANGED" if report["trunk_unchanged_by_head"] else "CHANGED"
    agrees = "agrees" if report["trunk_agrees"] else "DISAGREES"
    verdict = (
        f"the trunk is {changed} by the head's presence and by drafting, bit for bit, and {agrees} with llama.cpp's"
    )
    lines.append(f"verdict: {verdict}")
    return "\n".join(lines)


def _corpus(given: argparse.Namespace, peer_model: Path) -> list[list[int]]:
    from tests.peer.llamacpp import LlamaCpp

    try:
        contents = [path.read_text(encoding="utf-8") for path in given.corpus] or texts()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--corpus: cannot be read as UTF-8 text ({error})") from None
    peer = LlamaCpp(peer_model, n_ctx=64, mtp=False)
    ids = [peer.tokenize(text) for text in contents]
    peer.close()
    chunks = [part[i : i + given.tokens] for part in ids for i in range(0, len(part), given.tokens)]
    chunks = [chunk for chunk in chunks if len(chunk) > 1][: given.texts]
    if not chunks:
        raise UsageError("--corpus: no text of two tokens or more in it")
    return chunks


def _check(given: argparse.Namespace) -> None:
    """Raise UsageError for what cannot be compared, ModelFileError for a file that is no model with a head."""
    for flag, value, low, high in (
        ("--texts", given.texts, 1, 1 << 20),
        ("--tokens", given.tokens, 2, 1 << 14),
        ("--drafts", given.drafts, 1, MAX_ROWS - 1),
        ("--threads", given.threads, 1, os.cpu_count() or 1),
    ):
        if not low <= value <= high:
            raise UsageError(f"{flag} {value}: wanted {low} to {high}")
    check_places(json=given.json)
    if not given.model.is_file():
        raise UsageError(f"{given.model}: no such file; give a .gguf file")
    file = GGUFFile.open(given.model)
    config = load_config(file)
    if config.draft is None:
        raise UsageError(f"{given.model}: has no NextN head, whose presence is what is looked into")
    if len(file.paths) > 1:
        raise UsageError(f"{given.model}: is split into {len(file.paths)} files; give one that is whole")
    context = config.context_length
    if given.tokens + MAX_ROWS > context:
        raise UsageError(f"--tokens {given.tokens}: wanted at most {context - MAX_ROWS} of the model's {context}")
    if find_spec("llama_cpp_py_sync") is None:
        raise UsageError("llama.cpp is not installed; pip install 'nextn-trt[test]'")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    given = _parser().parse_args(arguments)
    _check(given)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        try:
            peer_model = given.model if given.as_is else write_dequantized(given.model, folder / "f32.gguf")
            corpus = _corpus(given, peer_model)
            mine = ours(given.model, folder, corpus, given.drafts)
            theirs = llamacpp(peer_model, corpus, given.drafts, given.threads)
        except (RuntimeError, OSError) as error:  # llama.cpp's refusals, and a disk that is full
            raise EngineError(str(error)) from error
    positions = [position for text in corpus for position in range(len(text))]
    report = {"model": given.model.name, "texts": len(corpus), **judge(mine, theirs, positions, given.as_is)}
    write_report(given.json, json_text(report, indent=1) + "\n")
    print(table(report))
    for line in report["failures"]:
        print(f"failed: {line}", file=sys.stderr)
    return EXIT_FAILED if report["failures"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m tests.bench.trunk_vs_llamacpp",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", type=Path, default=TRAINED_MODEL, metavar="MODEL.gguf")
    parser.add_argument("--corpus", type=Path, nargs="+", default=[], metavar="TEXT", help="UTF-8 (default: prompts)")
    parser.add_argument("--texts", type=int, default=32, metavar="N", help="pieces of the corpus (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=96, metavar="N", help="of a piece (default %(default)s)")
    parser.add_argument("--drafts", type=int, default=3, metavar="N", help="a round (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of llama.cpp (default %(default)s)")
    parser.add_argument("--as-is", action="store_true", help="give llama.cpp the file itself")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    return parser


if __name__ == "__main__":
    run_command(main)
