"""Engines loaded to be timed: passes layer by layer, and as one recorded graph. Their text is of no interest."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from engines.engine_manifest import Binding, EngineManifest, load_engine_manifest
from plugins.load import find_library, load_plugins, trt
from plugins.log import messages
from runtime import cuda
from runtime.device_weights import DeviceWeights
from runtime.tensorrt_session import EngineLoader

PROFILE = "decode"
# The host queues a pass slower than the device does it; so much work before it keeps the device busy meanwhile.
_AHEAD_BYTES, _AHEAD = 256 << 20, 60


class ProfiledEngine:
    """An engine and buffers for passes of up to ``tokens`` tokens in its decode profile.

    Everywhere raises EngineError, ResourceError."""

    def __init__(
        self, loader: EngineLoader, folder: Path, manifest: EngineManifest, role: str, stream: cuda.Stream
    ) -> None:
        self._spec, self._path = manifest.engines[role], manifest.file(folder, role)
        self._loader, self._stream = loader, stream
        self._engine = loader.load(self._path, self._spec)
        self._context = loader.context(self._engine, self._path)
        index = [profile.name for profile in self._spec.profiles].index(PROFILE)
        self.limits = self._spec.profiles[index]
        with messages() as log:
            if not self._context.set_optimization_profile_async(index, stream.handle):
                raise loader.error(f"{self._path}: profile {PROFILE} cannot be chosen", log)
        stream.synchronize()
        nbytes = int(self._engine.get_device_memory_size_for_profile_v2(index))
        self._scratch = cuda.DeviceBuffer(nbytes)
        self._context.set_device_memory(self._scratch.address, nbytes)
        names = {name: place for name, place in manifest.weights.items() if name in self._spec.weights}
        self._weights = DeviceWeights(folder, names, stream) if names else None
        self._buffers: dict[str, Any] = {}
        for name, address in (self._weights.addresses if self._weights else {}).items():
            self._bind(name, address)
        for binding in (*self._spec.inputs, *(each for each in self._spec.outputs if not each.alias)):
            buffer = cuda.DeviceBuffer(self._nbytes(binding))
            stream.clear(buffer.address, buffer.nbytes)
            self._keep(binding.name, buffer)
        for binding in self._spec.outputs:
            if binding.alias:
                self._bind(binding.name, self._buffers[binding.alias].address)

    def prepare(self, tokens: int, position: int) -> None:
        """Be ready for passes of ``tokens`` tokens after ``position`` others."""
        self.tokens, self.rows = tokens, min(tokens, self.limits.max_rows)
        numbers = {
            "position": np.array([position], np.int32),
            "slot": np.array([0], np.int32),
            "rows": np.arange(tokens - self.rows, tokens, dtype=np.int32),
        }
        for binding in self._spec.inputs:
            if binding.name in numbers:
                self._keep(binding.name, self._stream.upload(numbers[binding.name]))
            if any(isinstance(size, str) for size in binding.shape):
                shape = tuple(self._size(size) for size in binding.shape)
                with messages() as log:
                    if not self._context.set_input_shape(binding.name, shape):
                        raise self._loader.error(f"{self._path}: takes no {binding.name} of shape {list(shape)}", log)

    def enqueue(self) -> None:
        with messages() as log:
            if not self._context.execute_async_v3(self._stream.handle):
                raise self._loader.error(f"{self._path}: a pass of {self.tokens} tokens failed", log)

    def graph(self, repeats: int) -> tuple[list[float], int, int]:
        """Milliseconds of each of ``repeats`` replays of a recorded pass; its kernels and copies. Before `layers`."""
        self.enqueue()
        self._stream.synchronize()
        graph = self._stream.capture(self.enqueue)
        events = [cuda.Event() for _ in range(repeats + 1)]
        for event in events:
            self._stream.launch(graph)
            self._stream.record(event)
        self._stream.synchronize()
        times = [later.ms_since(earlier) for earlier, later in itertools.pairwise(events)]
        return times, graph.kernels, graph.copies

    def layers(self, repeats: int) -> list[tuple[str, float]]:
        """(layer, median milliseconds) in order, each between two events. Passes take longer from now on."""
        profiler = _profiler()
        self._context.enqueue_emits_profile = False
        self._context.profiler = profiler
        ahead = cuda.DeviceBuffer(min(_AHEAD_BYTES, cuda.free_and_total_bytes()[0] // 4))
        runs: list[list[tuple[str, float]]] = []
        for _ in range(repeats + 1):
            for _ in range(_AHEAD):
                self._stream.clear(ahead.address, ahead.nbytes)
            self.enqueue()
            self._stream.synchronize()
            with messages() as log:
                if not self._context.report_to_profiler():
                    raise self._loader.error(f"{self._path}: no times of layers", log)
            runs.append(profiler.taken())
        names = [name for name, _ in runs[0]]
        times = [statistics.median(run[i][1] for run in runs[1:]) for i in range(len(names))]
        return list(zip(names, times, strict=True))

    def _keep(self, name: str, buffer: cuda.DeviceBuffer) -> None:
        self._buffers[name] = buffer
        self._bind(name, buffer.address)

    def _bind(self, name: str, address: int) -> None:
        with messages() as log:
            if not self._context.set_tensor_address(name, address):
                raise self._loader.error(f"{self._path}: takes no memory for {name}", log)

    def _nbytes(self, binding: Binding) -> int:
        most = {"T": self.limits.max_tokens, "R": self.limits.max_rows}
        sizes = [size if isinstance(size, int) else most[size] for size in binding.shape]
        return int(np.prod(sizes, dtype=np.int64)) * np.dtype(binding.dtype).itemsize

    def _size(self, size: int | str) -> int:
        return size if isinstance(size, int) else {"T": self.tokens, "R": self.rows}[size]


def open_profiled(folder: Path) -> tuple[EngineManifest, dict[str, ProfiledEngine], cuda.Device]:
    """All engines of a folder. Raises EngineError (no GPU, no engines, others' engines), ResourceError."""
    manifest = load_engine_manifest(folder)
    device = cuda.open_device()
    load_plugins(find_library())
    loader, stream = EngineLoader(device), cuda.Stream()
    engines = {role: ProfiledEngine(loader, folder, manifest, role, stream) for role in manifest.engines}
    return manifest, engines, device


def _profiler() -> Any:
    class Profiler(trt.IProfiler):
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)
            self._times: list[tuple[str, float]] = []

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            self._times.append((layer_name, ms))

        def taken(self) -> list[tuple[str, float]]:
            times, self._times = self._times, []
            return times

    return Profiler()
