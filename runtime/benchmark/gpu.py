"""What a benchmark asks of the GPU beside the engines: its name, its read bandwidth, the memory taken."""

from __future__ import annotations

import ctypes
import statistics
from ctypes import c_int32, c_size_t, c_void_p
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engines.engine_manifest import load_engine_manifest
from engines.errors import EngineError
from plugins.load import KERNELS_NAME, find_library
from runtime import cuda
from runtime.benchmark.machine import GpuWatch
from runtime.session import Session

# Far more than any cache holds.
_READ_BYTES = 2 << 30
_READS = 9


class Gpu:
    """The GPU that engines are about to be loaded on. Raises EngineError when there is none."""

    def __init__(self) -> None:
        self._device = cuda.open_device()
        self._free_before, self._total = cuda.free_and_total_bytes()
        self._watch = GpuWatch(cuda.pci_bus_id())

    def sample(self) -> None:
        """Note clocks, temperature and power."""
        self._watch.sample()

    def read_gb_per_s(self) -> float:
        return read_gb_per_s()

    def facts(self, session: Session) -> tuple[dict[str, Any], dict[str, Any]]:
        """(the GPU, the memory of the session's engines)."""
        engines = load_engine_manifest(session.folder)
        gpu = {
            "name": str(self._device),
            "tensorrt": f"{engines.tensorrt} {engines.tensorrt_version}",
            "engines": asdict(engines.options),
            "watch": self._watch.facts(),
        }
        plan = getattr(session.trunk, "plan", None)
        taken = self._free_before - cuda.free_and_total_bytes()[0]
        planned = None if plan is None else asdict(plan)
        text = f"planned {plan}, taken {taken / 1e9:.2f} of {self._total / 1e9:.1f} GB"
        return gpu, {"planned_bytes": planned, "taken_bytes": taken, "total_bytes": self._total, "text": text}


def read_gb_per_s(library: Path | None = None) -> float:
    """Median of a few reads of 2 GB, or of a quarter of the free memory. library: the plugin library, beside which the
    kernels lie. Raises EngineError, ResourceError."""
    path = (library or find_library()).with_name(KERNELS_NAME)
    try:
        read = ctypes.CDLL(str(path)).nextn_read
    except (OSError, AttributeError) as error:
        raise EngineError(f"{path}: the kernel library does not load ({error}); build it again") from error
    read.argtypes = (c_void_p, c_size_t, c_void_p, c_void_p)
    read.restype = c_int32
    free, _ = cuda.free_and_total_bytes()
    nbytes = min(_READ_BYTES, free // 4) // cuda.ALIGNMENT * cuda.ALIGNMENT
    stream, data, sink = cuda.Stream(), cuda.DeviceBuffer(nbytes), cuda.DeviceBuffer(cuda.ALIGNMENT)
    stream.clear(data.address, nbytes)
    stream.clear(sink.address, sink.nbytes)

    def queue() -> None:
        cuda.check_launch(read(data.address, nbytes, sink.address, stream.handle), "reading could not be started")

    times = cuda.Recorder(stream).time_replays("read", queue, _READS)
    return nbytes / 1e6 / statistics.median(times)
