"""The state machine finds what it is there to find: builds that are broken in one place each are caught."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from runtime import speculative
from runtime.engine import SavedState
from runtime.engine_onnxruntime import OnnxTrunkEngine
from runtime.onnx_draft import OnnxDraftEngine
from runtime.onnx_session import KvCache
from tests.exported import Exported
from tests.runtime.sequence_machine import Backend, SequenceMachine

# No shrinking: that there is a failure is what is asked for.
SETTINGS = settings(
    deadline=None, max_examples=25, stateful_step_count=14, derandomize=True, database=None, phases=[Phase.generate],
    report_multiple_bugs=False, suppress_health_check=list(HealthCheck),
)  # fmt: skip
Patch = pytest.MonkeyPatch


def backend_of(model: Exported) -> Backend:
    trunk, draft = model.engines(context_size=288, max_rows=6)
    more, plain = trunk.another(), trunk.another()
    pairs = ((trunk, draft), (more, draft.another(more)))
    vocab = model.manifest.geometry.vocab_size
    return Backend(pairs, (plain, draft.another(plain)), vocab, (3,), shared=True)


def recurrent_state_not_taken_up(patch: Patch) -> None:
    real = OnnxTrunkEngine.load

    def load(self: OnnxTrunkEngine, rows: Any, recurrent: Any) -> None:
        real(self, rows, recurrent)
        for array in self._states[self._current]:
            array[:] = 0

    patch.setattr(OnnxTrunkEngine, "load", load)


def window_not_taken_up(patch: Patch) -> None:
    real = OnnxTrunkEngine.load

    def load(self: OnnxTrunkEngine, rows: Any, recurrent: Any) -> None:
        real(self, rows, recurrent)
        for array in self._convs:
            array[:] = 0

    patch.setattr(OnnxTrunkEngine, "load", load)


def saved_rows_one_short(patch: Patch) -> None:
    real = KvCache.save

    def save(self: KvCache, first: int, last: int) -> Any:
        saved = real(self, first, last)
        for rows in saved.data.values():
            rows[:, :, -1:] = 0
        return saved

    patch.setattr(KvCache, "save", save)


def saved_state_is_shared(patch: Patch) -> None:
    """Kept by reference: what is generated after it changes it."""

    def save_recurrent(self: OnnxTrunkEngine) -> Any:
        arrays = [*self._states[self._current], *self._convs]
        return SavedState(arrays, sum(each.nbytes for each in arrays))

    patch.setattr(OnnxTrunkEngine, "save_recurrent", save_recurrent)


def rollback_keeps_a_rejected_token(patch: Patch) -> None:
    real = OnnxTrunkEngine.commit

    def commit(self: OnnxTrunkEngine, n_keep: int) -> None:
        pending, real_replay = self._pending, self._replay
        self._replay = None if n_keep == pending - 1 else real_replay
        real(self, n_keep)
        self._replay = real_replay

    patch.setattr(OnnxTrunkEngine, "commit", commit)


def window_of_the_whole_pass(patch: Patch) -> None:
    real = OnnxTrunkEngine._keep_convs
    patch.setattr(
        OnnxTrunkEngine, "_keep_convs", lambda self, count: real(self, max(count, self._pending) if count else count)
    )


def head_not_taken_up(patch: Patch) -> None:
    real = OnnxDraftEngine.load

    def load(self: OnnxDraftEngine, rows: Any) -> None:
        real(self, rows)
        for buffer in self._cache.buffers.values():
            buffer[:] = 0

    patch.setattr(OnnxDraftEngine, "load", load)


def start_forgets_nothing(patch: Patch) -> None:
    real = OnnxTrunkEngine.start

    def start(self: OnnxTrunkEngine, sampler: Any) -> None:
        kept = [array.copy() for array in self._convs]
        real(self, sampler)
        for array, before in zip(self._convs, kept, strict=True):
            array[:] = before

    patch.setattr(OnnxTrunkEngine, "start", start)


def a_step_counts_twice(patch: Patch) -> None:
    """The bonus token of a round is given out again."""
    real = speculative.Generation.step

    def step(self: Any) -> Any:
        block = real(self)
        if len(block.tokens) > 2:
            block.tokens.append(block.tokens[-1])
        return block

    patch.setattr(speculative.Generation, "step", step)


MUTANTS: tuple[Callable[[Patch], None], ...] = (
    recurrent_state_not_taken_up,
    window_not_taken_up,
    saved_rows_one_short,
    saved_state_is_shared,
    rollback_keeps_a_rejected_token,
    window_of_the_whole_pass,
    head_not_taken_up,
    start_forgets_nothing,
    a_step_counts_twice,
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_caught(exported: Callable[[str], Exported], monkeypatch: Patch, mutant: Callable[[Patch], None]) -> None:
    backend = backend_of(exported("agreeing"))
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(lambda: SequenceMachine(backend), settings=SETTINGS)
