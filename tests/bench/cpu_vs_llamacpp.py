"""Tokens per second on this CPU: plain decoding against llama.cpp, and drafting against plain decoding, in one run.

    python -m tests.bench.cpu_vs_llamacpp [MODEL.gguf ...] [--random] [--rounds 5] [--tokens 64] [--threads N]

Without a MODEL, the trained model of the tests. --random adds a random model of the 0.8B geometry, written to a
temporary folder (2 GB with its export). The contestants take turns, so that what else the machine does hits them alike;
times are of decoding alone, without the prompt. llama.cpp runs with its own defaults, NextN head not loaded.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from engines.command import Parser, run_command
from engines.errors import UsageError
from export.exporter import export_model
from runtime.sampling import SamplingParams
from runtime.session import Session, open_session
from runtime.speculative import SpecStats
from tests.bench.large_random import write_08b
from tests.vocabulary_files import TRAINED_MODEL

CONTEXT, _PROMPT = 1024, 64
PROMPTS = Path(__file__).parents[1] / "data" / "prompts.json"

# (prompt, new tokens) -> tokens per second, accepted drafts, drafted.
Contestant = Callable[[list[int], int], tuple[float, int, int]]


def ours(session: Session, plain: bool) -> Contestant:
    def run(prompt: list[int], n: int) -> tuple[float, int, int]:
        stats = SpecStats()
        for _ in session.generate(prompt, SamplingParams(), max_tokens=n, stats=stats, plain=plain, heed_ends=False):
            pass
        # The first token comes from the prompt pass.
        return 1000 * (stats.predicted_n - 1) / stats.predicted_ms, stats.draft_n_accepted, stats.draft_n

    return run


def llama_cpp(path: Path, threads: int) -> Contestant:
    from tests.peer.llamacpp import LlamaCpp

    peer = LlamaCpp(path, n_ctx=CONTEXT, threads=threads, mtp=False, fast=True)

    def run(prompt: list[int], n: int) -> tuple[float, int, int]:
        peer.clear()
        logits, _ = peer.step(peer.trunk, prompt, 0, last_only=True)
        began = time.perf_counter()
        for position in range(len(prompt), len(prompt) + n - 1):
            logits, _ = peer.step(peer.trunk, [int(logits[0].argmax())], position, last_only=True)
        return (n - 1) / (time.perf_counter() - began), 0, 0

    return run


def measure(model: Path, folder: Path, rounds: int, n_tokens: int, threads: int) -> None:
    """Export, run in turns, and print a table of medians."""
    manifest = export_model(model, folder)
    session = open_session(folder, context_size=CONTEXT, threads=threads)
    contestants = {"plain": ours(session, plain=True)}
    if manifest.has_draft:
        contestants["drafting"] = ours(session, plain=False)
    if importlib.util.find_spec("llama_cpp_py_sync"):
        contestants["llama.cpp"] = llama_cpp(model, threads)
    else:
        print("llama.cpp is not installed (pip install '.[test]'): no comparison with it")
    prompts = [session.tokenizer.encode(text)[:_PROMPT] for text in json.loads(PROMPTS.read_text())]
    for run in contestants.values():
        run(prompts[0], 16)  # first passes allocate
    results: dict[str, list[tuple[float, int, int]]] = {name: [] for name in contestants}
    for index in range(rounds):
        prompt = prompts[index % len(prompts)]
        for name, run in contestants.items():
            results[name].append(run(prompt, n_tokens))
    print(f"{model.name}, {threads} threads, {rounds} rounds of {n_tokens} tokens")
    print_table(results)


def print_table(results: dict[str, list[tuple[float, int, int]]]) -> None:
    """Per contestant: median, least and most tokens/s, and how many times as fast as plain in the same round."""
    print(f"  {'':10} {'tokens/s':>9} {'least':>8} {'most':>8} {'/ plain':>8}  acceptance")
    for name, runs in results.items():
        rates = [rate for rate, _, _ in runs]
        ratios = [rate / plain for rate, (plain, _, _) in zip(rates, results["plain"], strict=True)]
        drafted = sum(drafted for _, _, drafted in runs)
        acceptance = f"{sum(accepted for _, accepted, _ in runs) / drafted:.2f}" if drafted else ""
        print(
            f"  {name:10} {statistics.median(rates):9.1f} {min(rates):8.1f} {max(rates):8.1f}"
            f" {statistics.median(ratios):8.2f}  {acceptance}"
        )


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    cores = len(os.sched_getaffinity(0))
    parser = Parser(
        prog="python -m tests.bench.cpu_vs_llamacpp",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--random", action="store_true", help="also a random model of the 0.8B geometry")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=cores)
    args = parser.parse_args(arguments)
    for flag, value, low, high in (
        ("--rounds", args.rounds, 1, 10_000),
        ("--tokens", args.tokens, 2, CONTEXT - _PROMPT),
        ("--threads", args.threads, 1, cores),
    ):
        if not low <= value <= high:
            raise UsageError(f"{flag} {value}: wanted {low} to {high}")
    for model in args.models:
        if not model.is_file():
            raise UsageError(f"{model}: no such file; give a .gguf file")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = args.models or [TRAINED_MODEL]
        if args.random:
            models = [*models, write_08b(folder / "random-0.8B-Q4_K_M.gguf")]
        for index, model in enumerate(models):
            measure(model, folder / str(index), args.rounds, args.tokens, args.threads)
    return 0


if __name__ == "__main__":
    run_command(main)
