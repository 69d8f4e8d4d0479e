"""The state machine of `sequence_machine` on the CPU: ONNX Runtime, and the TensorRT backend on its stand-ins."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from runtime.engine_tensorrt import open_engines
from tests.exported import Exported
from tests.named_inputs import GEOMETRIES
from tests.runtime.fake_engines import VOCAB
from tests.runtime.fake_passes import CONTEXT, MAX_ROWS
from tests.runtime.fake_tensorrt import install, toy_manifest, write_engines
from tests.runtime.sequence_machine import Backend, SequenceMachine

# The same few every time; for a long look other ones every time.
EXAMPLES = int(os.environ.get("NEXTN_TEST_EXAMPLES", "0"))
SETTINGS = settings(
    deadline=None,
    max_examples=EXAMPLES or 6,
    stateful_step_count=30 if EXAMPLES else 14,
    derandomize=not EXAMPLES,
    suppress_health_check=list(HealthCheck),
)


def check(backend: Backend) -> None:
    run_state_machine_as_test(lambda: SequenceMachine(backend), settings=SETTINGS)


@pytest.mark.parametrize("name", ["trained", "agreeing", *GEOMETRIES])
def test_onnxruntime(exported: Callable[[str], Exported], name: str) -> None:
    """Two sequences over one pair of sessions, with prefixes kept within budgets of every size; every geometry."""
    model = exported(name)
    trunk, draft = model.engines(context_size=288, max_rows=6)
    more = trunk.another()
    plain = trunk.another()
    pairs = ((trunk, draft), (more, draft.another(more)))
    ends = model.manifest.tokenizer.end_token_ids
    vocab = model.manifest.geometry.vocab_size
    check(Backend(pairs, (plain, draft.another(plain)), vocab, (*ends, 3), shared=True))


def test_onnxruntime_without_a_head(exported: Callable[[str], Exported]) -> None:
    trunk = exported("trained").trunk(context_size=288)
    vocab = exported("trained").manifest.geometry.vocab_size
    check(Backend(((trunk, None), (trunk.another(), None)), (trunk.another(), None), vocab, (3,), shared=True))


def test_tensorrt_on_stand_ins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two sequences; prompts are kept where their passes ended."""
    install(monkeypatch)
    write_engines(tmp_path, toy_manifest())
    trunk, draft = open_engines(tmp_path, toy_manifest(), context_size=CONTEXT, max_rows=MAX_ROWS)
    assert draft is not None
    more = trunk.another()
    check(Backend(((trunk, draft), (more, draft.another(more))), (trunk.another(), None), VOCAB, (12, 4), shared=True))
