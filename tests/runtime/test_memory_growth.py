"""Memory does not grow with the rounds: Python's own objects, and what the process holds."""

from __future__ import annotations

import gc
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.controller import FixedDraft
from runtime.engine_onnxruntime import OnnxDraftEngine, OnnxTrunkEngine
from runtime.speculative import SpecStats, generate
from tests.exported import Exported, greedy

# 10,000 for a long look; a leak of 1 KiB a round then shows in the process as well.
ROUNDS = int(os.environ.get("NEXTN_TEST_ROUNDS", "300"))
PYTHON_GROWTH = 128 << 10
PROCESS_GROWTH = 8 << 20
STATM = Path("/proc/self/statm")


def rounds(engines: tuple[OnnxTrunkEngine, OnnxDraftEngine], least: int) -> None:
    """Texts with 0..5 drafts a round until ``least`` rounds were made."""
    made = n = 0
    while made < least:
        stats = SpecStats()
        text = generate(
            *engines,
            [40, 41, 42],
            sampler=greedy,
            controller=FixedDraft(n % 6),
            max_tokens=40,
            end_token_ids=(),
            context_size=256,
            stats=stats,
        )
        assert len(list(text)) == 40
        made, n = made + stats.verify_steps, n + 1


def resident() -> int:
    gc.collect()
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not STATM.exists(), reason="resident memory is read from Linux's /proc")
def test_rounds_leave_nothing(exported: Callable[[str], Exported]) -> None:
    engines = exported("trained").engines(context_size=256, max_rows=6)
    rounds(engines, 150)  # every size of pass has been bound once
    process = resident()
    tracemalloc.start()
    try:
        rounds(engines, 30)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        rounds(engines, ROUNDS)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < PYTHON_GROWTH
    assert resident() - process < PROCESS_GROWTH
