"""Memory does not grow with the rounds: what is held of the GPU, and what the process holds."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

from runtime import cuda
from runtime.sampling import SamplingParams
from tests.gpu.checks import run
from tests.gpu.conftest import Opened
from tests.memory import PROCESS_GROWTH, ROUNDS, resident_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.trt]

# Passes recorded, and buffers of another size, that the rounds before had not met.
FIRST_MET = 50
# Greedy, sampled on the device, and sampled on the host.
WAYS = ((SamplingParams(), False), (SamplingParams(temperature=0.9, seed=3), False), (SamplingParams(), True))


def rounds(engines: Opened, least: int) -> int:
    """Texts with 0 to 5 drafts a round until ``least`` rounds were made; how many were."""
    made = texts = 0
    while made < least:
        params, on_host = WAYS[texts % len(WAYS)]
        tokens, stats = run(engines, [40, 41, 42], texts % 6, 40, params, on_host=on_host)
        assert len(tokens) == 40
        made, texts = made + stats.verify_steps, texts + 1
    return made


def held_of_the_gpu() -> dict[str, int]:
    """How many of each kind. What is free of its memory also depends on other processes."""
    kinds = (cuda.DeviceBuffer, cuda.PinnedBuffer, cuda.Event, cuda.Graph, cuda.Stream)
    gc.collect()
    objects = gc.get_objects()
    return {kind.__name__: sum(type(each) is kind for each in objects) for kind in kinds}


def test_rounds_leave_nothing(opened: Callable[[str], Opened]) -> None:
    engines = opened("trained")
    rounds(engines, 600)  # every size of pass has been recorded once
    process, held = resident_bytes(), held_of_the_gpu()
    made = rounds(engines, ROUNDS)
    assert resident_bytes() - process < PROCESS_GROWTH, made
    for kind, count in held_of_the_gpu().items():
        assert count - held[kind] < FIRST_MET, (kind, made)
