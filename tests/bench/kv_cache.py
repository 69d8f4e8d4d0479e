"""What int8 keys and values cost: `python -m tests.bench.kv_cache`.   The trained model on ONNX Runtime, no GPU.

KL(float32 || kind) in nats and the share of equal best tokens, along texts that were in no training text; acceptance of
drafts, and how many texts stay the same, when each kind generates for itself.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from runtime.sampling import SamplingParams
from runtime.session import make_sampler
from tests.compare import kl_divergence
from tests.exported import Exported, export, generate_tokens, trunk_rows
from tests.peer.speculation import NEW_TOKENS, recorded
from tests.rounded_caches import with_rounded_caches
from tests.vocabulary_files import TRAINED_MODEL

KINDS = ("f16", "int8")
DRAFTS = (1, 3)
SAMPLING = {"greedy": SamplingParams(), "temperature 0.8": SamplingParams(0.8, seed=11)}


def logits_along(exported: Exported, texts: Sequence[Sequence[int]]) -> np.ndarray:
    """Of every position [N, V]."""
    trunk = exported.trunk()
    return np.concatenate([trunk_rows(trunk, text)[0] for text in texts])


def generated(exported: Exported, draft_n: int, params: SamplingParams) -> tuple[list[list[int]], float]:
    """The continuation of every recorded prompt, and the acceptance rate."""
    trunk, draft = exported.engines()
    texts, accepted, drafted = [], 0, 0
    for run in recorded():
        text, _, stats = generate_tokens(trunk, draft, run.prompt, NEW_TOKENS, draft_n, make_sampler(params))
        texts.append(text)
        accepted, drafted = accepted + stats.draft_n_accepted, drafted + stats.draft_n
    return texts, accepted / drafted


def main() -> None:
    texts = [run.prompt + run.greedy for run in recorded()]
    with tempfile.TemporaryDirectory() as folder:
        models = {"f32": export(TRAINED_MODEL, Path(folder) / "f32")}
        models |= {kind: with_rounded_caches(models["f32"], Path(folder) / kind, kind) for kind in KINDS}
        want = logits_along(models["f32"], texts)
        for kind in KINDS:
            got = logits_along(models[kind], texts)
            kl = kl_divergence(want, got)
            top1 = (want.argmax(axis=1) == got.argmax(axis=1)).mean()
            print(f"{kind}: KL mean {kl.mean():.2e}, largest {kl.max():.2e}, top-1 {top1:.4f}, {len(kl)} positions")
        for name, params in SAMPLING.items():
            for draft_n in DRAFTS:
                plain, rate = generated(models["f32"], draft_n, params)
                print(f"{name}, {draft_n} drafts: acceptance f32 {rate:.4f}", end="")
                for kind in KINDS:
                    other, rate = generated(models[kind], draft_n, params)
                    same = sum(a == b for a, b in zip(plain, other, strict=True))
                    print(f", {kind} {rate:.4f} ({same} of {len(plain)} texts the same)", end="", flush=True)
                print()


if __name__ == "__main__":
    main()
