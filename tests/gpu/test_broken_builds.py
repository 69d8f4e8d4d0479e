"""Builds that are wrong in themselves, on a real GPU: against the model's equations each fault is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engines.engine_manifest import EngineOptions
from runtime.diagnosis import diagnose
from runtime.host_copies import Span
from runtime.session import SpecOptions, open_session
from runtime.tensorrt_trunk import TensorrtTrunk
from tests.faults import CONV, EH_PROJ, GRAPH, HALF, ROPE, V_HEADS
from tests.gpu.prepare import INT8_CACHES, SINGLE_OPS, model_file
from tests.vocabulary_files import TRAINED_MODEL

pytestmark = [pytest.mark.gpu, pytest.mark.trt]
Patch = pytest.MonkeyPatch
OPTIONS = EngineOptions(max_rows=4, context=256, prefill_chunk=64, embed_weights=False)
SPEC = SpecOptions("draft-mtp", 3)


def _windows(trunk: TensorrtTrunk, slot: int) -> list[Span]:
    """Where the convolution windows of a slot lie."""
    return [(first + slot * nbytes, nbytes) for _, (first, nbytes) in trunk.memory._slot_0().values()]


def state_in_half_precision(patch: Patch) -> None:
    commit = TensorrtTrunk.commit

    def rounding(self: TensorrtTrunk, n_keep: int) -> None:
        commit(self, n_keep)
        saved = self.save_recurrent()
        sizes = [part.size for pair in self.memory.read_recurrent().values() for part in pair]
        parts = np.split(np.frombuffer(saved.data.tobytes(), np.float32).copy(), np.cumsum(sizes)[:-1])
        parts[::2] = [state.astype(np.float16).astype(np.float32) for state in parts[::2]]
        data = np.concatenate(parts).view(saved.data.dtype).reshape(saved.data.shape)
        self.memory.load_recurrent(replace(saved, data=data))

    patch.setattr(TensorrtTrunk, "commit", rounding)


def last_window_kept(patch: Patch) -> None:
    """The convolution window is that after the whole pass, rejected drafts and all; recurrent state is right."""
    commit = TensorrtTrunk.commit

    def keeping(self: TensorrtTrunk, n_keep: int) -> None:
        last, host = _windows(self, self._pending - 1), self._shared.host
        commit(self, n_keep)
        windows = host.fetch(last)
        self._settle()
        host.put(_windows(self, 0), windows)

    patch.setattr(TensorrtTrunk, "commit", keeping)


def last_slot_kept(patch: Patch) -> None:
    """Recurrent state and convolution window are those after the whole pass, rejected drafts and all."""
    commit = TensorrtTrunk.commit

    def keeping(self: TensorrtTrunk, n_keep: int) -> None:
        pending = self._pending
        commit(self, n_keep)
        self._slot = pending - 1

    patch.setattr(TensorrtTrunk, "commit", keeping)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (EH_PROJ, "suspect eh_proj: its halves are the other way round (which explains it)"),
        (ROPE, "suspect rope: each pair turns with the frequency of the next one (which explains it)"),
    ],
)
def test_faults_of_the_export(tmp_path: Path, monkeypatch: Patch, fault: str, named: str) -> None:
    export, build = pytest.importorskip("export.exporter"), pytest.importorskip("engines.build")
    with monkeypatch.context() as patch:
        GRAPH[fault](patch)
        export.export_model(TRAINED_MODEL, tmp_path, target="tensorrt")
    build.build_engines(tmp_path, OPTIONS)
    (said,) = diagnose(open_session(tmp_path, spec=SPEC), TRAINED_MODEL).faults
    assert named in said


def test_value_heads_in_another_order(tmp_path: Path) -> None:
    """The kernels' own order is fixed; a file may have another."""
    export, build = pytest.importorskip("export.exporter"), pytest.importorskip("engines.build")
    from tests.named_inputs import GEOMETRIES, NAMED
    from tests.runtime.test_diagnosis import value_heads_by_key_head

    sound = NAMED["heads_256"](tmp_path / "sound.gguf")
    altered = value_heads_by_key_head(GEOMETRIES["heads_256"], tmp_path / "altered.gguf")
    export.export_model(altered, tmp_path / "x", target="tensorrt")
    build.build_engines(tmp_path / "x", OPTIONS)
    (said,) = diagnose(open_session(tmp_path / "x", spec=SPEC), sound).faults
    assert "suspect the order of value heads: rows of the file are in another order (by key head)" in said, V_HEADS


@pytest.mark.parametrize(
    ("fault", "build", "named"),
    [
        (
            HALF,
            state_in_half_precision,
            ("suspect the recurrent state, which is rounded between passes (half precision?)", "of it is a float16"),
        ),
        (
            CONV,
            last_window_kept,
            ("blk.0.conv after 1 of 4", "suspect the convolution's window, which is not taken back"),
        ),
        (CONV, last_slot_kept, ("suspect the convolution's window, which is not taken back",)),
    ],
)
def test_faults_of_the_state(
    prepared: Path, monkeypatch: Patch, fault: str, build: Callable[[Patch], None], named: tuple[str, ...]
) -> None:
    build(monkeypatch)
    faults = diagnose(open_session(prepared / "trained", spec=SPEC), TRAINED_MODEL).faults
    assert all(any(name in said for said in faults) for name in named), (fault, faults)


@pytest.mark.parametrize("name", ["trained", f"trained{INT8_CACHES}", "mixed_types", "yarn", f"q4_k_m{SINGLE_OPS}"])
def test_good_builds(prepared: Path, name: str) -> None:
    found = diagnose(open_session(prepared / name, spec=SPEC), model_file(prepared, name))
    print(name, found)
    assert found.faults == ()
