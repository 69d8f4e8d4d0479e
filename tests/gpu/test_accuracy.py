"""Close to ONNX Runtime and to llama.cpp: logits, text, acceptance."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from runtime.sampling import SamplingParams
from tests.compare import kl_divergence
from tests.gpu.checks import run
from tests.gpu.conftest import Opened
from tests.gpu.prepare import (
    CUT_HEAD,
    DRAFTS,
    LLAMACPP,
    MAX_ROWS,
    ONNXRUNTIME,
    RANDOM_MODELS,
    TRAINED_MODELS,
    read_acceptance,
    read_reference,
    texts,
)
from tests.peer.speculation import NEW_TOKENS, recorded

pytestmark = [pytest.mark.gpu, pytest.mark.trt]

Open = Callable[[str], Opened]

# Quantised activations and f16 keys and values against float32 on the same weights; int8 ones against the same
# rounding there.
KL_MEAN_MAX, TOP1_MIN = 1e-4, 0.998
RANDOM_TOP1_MIN = 0.95  # of few positions, and flat distributions
# Share of drafts by which acceptance may differ from the others' on the same prompts.
ACCEPTANCE_MAX_ABS = 0.01


@pytest.mark.parametrize("begin", [0, 44])
@pytest.mark.parametrize(
    ("name", "program"),
    [("trained", LLAMACPP), *((name, ONNXRUNTIME) for name in (*TRAINED_MODELS, *RANDOM_MODELS))],
)
def test_logits_are_the_others(opened: Open, prepared: Path, name: str, program: str, begin: int) -> None:
    """In verify passes from ``begin`` on, after a prefill chunk up to there. At least 2000 positions of text."""
    engines, (want, best) = opened(name), read_reference(prepared, name, program)
    got = []
    for text in texts(prepared, name):
        engines.prefill(text[:begin])
        got.append(engines.append(text[begin:], MAX_ROWS)[0])
    logits, want, best = np.stack(got), want[:, begin:], best[:, begin:]
    kl = kl_divergence(want, logits)
    top1 = (best == logits.argmax(axis=-1)).mean()
    print(
        f"{name} against {program}, {kl.size} positions: KL mean {kl.mean():.3g} max {kl.max():.3g}, top-1 {top1:.5f}"
    )
    assert kl.size >= (2000 if name in TRAINED_MODELS and not begin else 20)
    assert kl.mean() <= KL_MEAN_MAX
    assert top1 >= (TOP1_MIN if name in TRAINED_MODELS else RANDOM_TOP1_MIN)


@pytest.mark.parametrize("name", TRAINED_MODELS)
def test_acceptance_is_the_others(opened: Open, prepared: Path, name: str) -> None:
    engines, accepted, drafted, unlike = opened(name), 0, 0, 0
    for one in recorded():
        text, stats = run(engines, one.prompt, DRAFTS, NEW_TOKENS, SamplingParams())
        accepted, drafted = accepted + stats.draft_n_accepted, drafted + stats.draft_n
        unlike += text != one.greedy
    rounds = [count for one in recorded() for count in one.accepted[DRAFTS]]
    ours, onnxruntime, peer = accepted / drafted, read_acceptance(prepared, name), sum(rounds) / (DRAFTS * len(rounds))
    print(f"acceptance {ours:.4f}, ONNX Runtime {onnxruntime:.4f}, llama.cpp {peer:.4f}; {unlike} texts differ")
    assert ours == pytest.approx(onnxruntime, abs=ACCEPTANCE_MAX_ABS)
    assert ours == pytest.approx(peer, abs=ACCEPTANCE_MAX_ABS)
    # Engines of different rounding part only where the best two logits are closer than that.
    assert unlike <= len(recorded()) // 3


def test_acceptance_of_a_cut_draft_head(opened: Open, prepared: Path) -> None:
    engines, accepted, drafted = opened(CUT_HEAD), 0, 0
    for one in recorded():
        _, stats = run(engines, one.prompt, DRAFTS, NEW_TOKENS, SamplingParams())
        accepted, drafted = accepted + stats.draft_n_accepted, drafted + stats.draft_n
    whole, onnxruntime = read_acceptance(prepared, "trained"), read_acceptance(prepared, CUT_HEAD)
    print(f"acceptance {accepted / drafted:.4f}, ONNX Runtime {onnxruntime:.4f}, with the whole head {whole:.4f}")
    assert accepted / drafted == pytest.approx(onnxruntime, abs=ACCEPTANCE_MAX_ABS)
    assert onnxruntime < whole
