"""Sessions of ONNX Runtime's CPU provider: load, run, and the KV cache they write in place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from engines.errors import EngineError, ResourceError
from engines.manifest import Geometry
from runtime.engine import SavedState

# Softmax, and the product with the values, must sum a key's share the same way whatever the cache length is. With
# lengths of whole multiples of this, longer caches only append zeros to every partial sum.
CACHE_STEP = 256
PREFILL_CHUNK = 256
_MIN_VERSION = (1, 32)
_NO_MEMORY = ("bad_alloc", "Failed to allocate", "pthread_create failed")  # the last: for the stack of a thread


def check_version(version: str) -> None:
    """Raise EngineError when this ONNX Runtime lacks the operators of the canonical graph."""
    if tuple(int(part) for part in version.split(".")[:2]) < _MIN_VERSION:
        wanted = ".".join(map(str, _MIN_VERSION))
        raise EngineError(f"onnxruntime {version} lacks LinearAttention; install onnxruntime >= {wanted}")


def load_session(path: Path, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # what goes wrong is raised, and told once
    # The sessions take turns; a pool that spins after its run would steal the cores of the next one.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"], enable_fallback=0)
    except Exception as error:
        raise _translated(error, f"{path}: cannot be loaded; run `python -m export` again if it is damaged") from error


def check_inputs(path: Path, session: ort.InferenceSession, names: Iterable[str]) -> None:
    """Raise EngineError when the graph lacks an input that the manifest's sizes promise."""
    missing = set(names) - {each.name for each in session.get_inputs()}
    if missing:
        raise EngineError(
            f"{path}: the graph has no input {min(missing)}: it does not belong to the manifest beside it; "
            "run `python -m export` again"
        )


def run_session(session: ort.InferenceSession, binding: Any) -> None:
    """Run a pass. Raises ResourceError when memory runs out, EngineError when the session and its buffers disagree."""
    try:
        session.run_with_iobinding(binding)
    except Exception as error:
        raise _translated(error, "a pass failed") from error


def _translated(error: Exception, what: str) -> EngineError | ResourceError:
    """ONNX Runtime's binding raises classes of its own, RuntimeError and MemoryError alike."""
    if isinstance(error, MemoryError) or any(sign in str(error) for sign in _NO_MEMORY):
        return ResourceError(f"{what}: not enough memory; use a smaller --ctx-size or model")
    lines = str(error).splitlines() or [type(error).__name__]
    return EngineError(f"{what}: ONNX Runtime says: {lines[0]}")


class KvCache:
    """Keys and values of some attention layers: per layer and kind [1, KV, L, head_dim] f32.

    L is a multiple of CACHE_STEP. Rows past the committed position are dead, but always finite."""

    def __init__(self, layers: Sequence[int], geometry: Geometry) -> None:
        self._shape = (1, geometry.num_kv_heads, 0, geometry.head_dim)
        self._names = [f"blk.{layer}.{kind}_cache" for layer in layers for kind in ("key", "value")]
        self.buffers: dict[str, np.ndarray] = {}
        self.values: dict[str, ort.OrtValue] = {}
        self.length = self._used = 0

    def reserve(self, length: int) -> bool:
        """Make room for positions below ``length``, about to be written; whether the buffers moved."""
        self._used = max(self._used, length)
        wanted = -(-length // CACHE_STEP) * CACHE_STEP
        if wanted <= self.length:
            return False
        for name in self._names:
            grown = np.zeros((*self._shape[:2], wanted, self._shape[3]), np.float32)
            if self.length:
                grown[:, :, : self.length] = self.buffers[name]
            self.buffers[name] = grown
            self.values[name] = ort.OrtValue.ortvalue_from_numpy(grown)
        self.length = wanted
        return True

    def save(self, first: int, last: int) -> SavedState:
        """A copy of rows first .. last - 1."""
        copies = {name: buffer[:, :, first:last].copy() for name, buffer in self.buffers.items()}
        return SavedState(copies, sum(copy.nbytes for copy in copies.values()), last - first)

    def load(self, parts: Sequence[SavedState]) -> bool:
        """Write saved rows from position 0 on; whether the buffers moved."""
        moved, position = self.reserve(sum(part.count for part in parts)), 0
        for part in parts:
            for name, rows in part.data.items():
                self.buffers[name][:, :, position : position + part.count] = rows
            position += part.count
        return moved

    def clear(self, position: int) -> None:
        """Set the rows from ``position`` on to zero: a NaN in a dead row would reach the rows that count (0 * NaN)."""
        for buffer in self.buffers.values():
            buffer[:, :, position : self._used] = 0

    def forget(self) -> None:
        """For another sequence. What this one left behind may be NaN, although it was never asked for."""
        self.clear(0)
        self._used = 0

    def bind(self, binding: Any) -> None:
        """Bind every cache as input and, in place, as output."""
        for name, value in self.values.items():
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(f"{name}.out", value)


class RowStack:
    """Rows [n, width] f32 that are added to one end of an array with room for more."""

    def __init__(self, width: int) -> None:
        self._rows = np.empty((0, width), np.float32)

    def extended(self, kept: np.ndarray | None, rows: np.ndarray) -> np.ndarray:
        """``kept``, which the last call returned (None: nothing), and a copy of ``rows`` behind it."""
        first = 0 if kept is None else len(kept)
        last = first + len(rows)
        if last > len(self._rows):
            longer = np.empty((2 * last, rows.shape[1]), np.float32)
            longer[:first] = self._rows[:first]
            self._rows = longer
        self._rows[first:last] = rows
        return self._rows[:last]
