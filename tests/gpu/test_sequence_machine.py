"""The state machine of `tests.runtime.sequence_machine` on the engines: two sequences, prompts kept and taken up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.gpu.conftest import Opened
from tests.gpu.prepare import TRAINED_MODELS
from tests.runtime.sequence_machine import Backend, SequenceMachine

pytestmark = [pytest.mark.gpu, pytest.mark.trt]

CONTEXT = 600
SETTINGS = settings(
    deadline=None, max_examples=30, stateful_step_count=25, derandomize=True, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("name", TRAINED_MODELS)
def test_any_order_of_steps(opened: Callable[[str], Opened], name: str) -> None:
    engines = opened(name)
    ends = (*engines.manifest.tokenizer.end_token_ids, 3)
    trunk, more, plain = (engines.trunk.another() for _ in range(3))
    for each in (trunk, more, plain):
        each.context_size = CONTEXT  # of several passes over a prompt, and quick to compare
    pairs = tuple((each, engines.draft.another(each)) for each in (trunk, more))
    backend = Backend(pairs, (plain, None), engines.vocab_size, ends, shared=True)
    run_state_machine_as_test(lambda: SequenceMachine(backend), settings=SETTINGS)
