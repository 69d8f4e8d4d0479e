"""Memory does not grow with the rounds: Python's own objects, and what the process holds."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable

from runtime.controller import FixedDraft
from runtime.engine_onnxruntime import OnnxDraftEngine, OnnxTrunkEngine
from runtime.speculative import SpecStats, generate
from tests.exported import Exported, greedy
from tests.memory import PROCESS_GROWTH, ROUNDS, needs_peak, resident_bytes

PYTHON_GROWTH = 128 << 10


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


@needs_peak
def test_rounds_leave_nothing(exported: Callable[[str], Exported]) -> None:
    engines = exported("trained").engines(context_size=256, max_rows=6)
    rounds(engines, 150)  # every size of pass has been bound once
    process = resident_bytes()
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
    assert resident_bytes() - process < PROCESS_GROWTH
