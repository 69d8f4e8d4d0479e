"""Decoding speed and memory of TensorRT engines: `python -m tests.bench.tensorrt FOLDER` on a GPU machine.

Per number of drafts: tokens per second of greedy decoding after a short prompt, in turns over several rounds (median),
and the share of drafts accepted. Then, asked for, a prompt that fills the context: its speed, and whether all state is
finite after it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np

from engines.engine_manifest import load_engine_manifest
from engines.manifest import load_manifest
from runtime import cuda
from runtime.controller import AdaptiveDraft, Controller, FixedDraft
from runtime.engine_tensorrt import open_engines
from runtime.sampling import SamplingParams
from runtime.session import make_sampler
from runtime.speculative import SpecStats, generate
from runtime.tensorrt_draft import TensorrtDraft
from runtime.tensorrt_trunk import TensorrtTrunk


def main() -> None:
    given = _arguments()
    options = load_engine_manifest(given.folder).options
    free_before, total = cuda_memory()
    began = time.perf_counter()
    manifest = load_manifest(given.folder)
    trunk, draft = open_engines(given.folder, manifest, context_size=options.context, max_rows=options.max_rows)
    assert draft is not None
    taken = free_before - cuda_memory()[0]
    print(f"opened in {time.perf_counter() - began:.1f} s; planned {trunk.plan}; taken {taken / 1e9:.2f} GB")

    drafts = [n for n in given.drafts if n < options.max_rows]
    texts, speeds, stats = {}, {n: [] for n in (0, *drafts, -1)}, {}
    for _ in range(given.rounds + 1):  # the first one records graphs
        for n in speeds:
            controller: Controller = AdaptiveDraft(max(drafts)) if n < 0 else FixedDraft(n)
            texts[n], stats[n] = decode(trunk, draft if n else None, given.prompt, controller, given.tokens)
            speeds[n].append(stats[n].predicted_per_second)
    for n, measured in speeds.items():
        name = "adaptive" if n < 0 else f"{n} drafts" if n else "plain"
        same = "same text" if texts[n] == texts[0] else "OTHER TEXT"
        median = statistics.median(measured[1:])
        print(
            f"{name}: {median:.1f} tok/s ({median / statistics.median(speeds[0][1:]):.3f}x), accepted "
            f"{stats[n].draft_n_accepted}/{stats[n].draft_n}, {stats[n].tokens_per_step:.3f} tokens a step, {same}"
        )
    print(f"last text: {texts[0][:12]} ...")
    if given.fill:
        fill(trunk, draft, options.context, manifest.geometry.vocab_size, given.tokens)
    print(f"memory taken at the end: {(free_before - cuda_memory()[0]) / 1e9:.2f} of {total / 1e9:.1f} GB")


def cuda_memory() -> tuple[int, int]:
    cuda.open_device()
    return cuda.free_and_total_bytes()


def decode(
    trunk: TensorrtTrunk, draft: TensorrtDraft | None, prompt: list[int], controller: Controller, tokens: int
) -> tuple[list[int], SpecStats]:
    stats = SpecStats()
    text = generate(
        trunk,
        draft,
        prompt,
        sampler=make_sampler(SamplingParams()),
        controller=controller,
        max_tokens=tokens,
        end_token_ids=(),
        context_size=trunk.context_size,
        stats=stats,
    )
    return list(text), stats


def fill(trunk: TensorrtTrunk, draft: TensorrtDraft, context: int, vocab: int, tokens: int) -> None:
    prompt = np.random.default_rng(1).integers(0, vocab, context - tokens).tolist()
    for n in (0, 3):
        text, stats = decode(trunk, draft if n else None, prompt, FixedDraft(n), tokens)
        print(
            f"{len(prompt)} tokens of prompt: {1000 * len(prompt) / stats.prompt_ms:.0f} tok/s, then {n} drafts: "
            f"{stats.predicted_per_second:.1f} tok/s, text begins {text[:4]}"
        )
    finite = all(np.isfinite(array).all() for array in trunk.state().values())
    print(f"position {trunk.position}: state {'finite' if finite else 'NOT FINITE'}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 3, 5])
    parser.add_argument("--prompt", type=int, nargs="+", default=[72, 101, 108, 108, 111])
    parser.add_argument("--fill", action="store_true", help="also a prompt that fills the context")
    return parser.parse_args()


if __name__ == "__main__":
    main()
