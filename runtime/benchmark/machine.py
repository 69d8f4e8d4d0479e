"""What a benchmark ran on: processor, versions, the device's read bandwidth, and the GPU's clocks while it ran."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

_CPU_READ_BYTES = 256 << 20
_CPU_READS = 5
_SAMPLE_EVERY_S = 1.0
# Figures of `GpuWatch`, and what nvidia-smi calls them.
_SMI_FIELDS = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "celsius": "temperature.gpu",
    "watts": "power.draw",
}


def machine_facts(threads: int) -> dict[str, Any]:
    """Processor, versions, and how busy it is now. threads: as asked for, 0: one per core."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": threads or os.cpu_count(),
        "load_average": None if load is None else round(load, 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("numpy", "onnxruntime", "cuda-bindings")},
    }


def cpu_read_gb_per_s(threads: int) -> float:
    """The best of a few reads of a large array by ``threads`` threads (0: one per core)."""
    count = threads or os.cpu_count() or 1
    parts = np.array_split(np.ones(_CPU_READ_BYTES // 8, np.int64), count)
    best = 0.0
    with ThreadPoolExecutor(count) as pool:
        for _ in range(_CPU_READS):
            began = time.perf_counter()
            list(pool.map(np.max, parts))
            best = max(best, _CPU_READ_BYTES / 1e9 / (time.perf_counter() - began))
    return best


class GpuWatch:
    """Samples a GPU's clocks, temperature and power, by NVML (package nvidia-ml-py) or else nvidia-smi."""

    def __init__(self, pci_bus_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._next = clock, -np.inf
        self._values: dict[str, list[float]] = {}
        self.absent = ""  # why there are no figures
        try:
            self._read = _nvml_reader(pci_bus_id) if importlib.util.find_spec("pynvml") else _smi_reader(pci_bus_id)
        except _NoFiguresError as error:
            self.absent = str(error)

    def sample(self) -> None:
        """Read the figures, once a second at the most."""
        if self.absent or self._clock() < self._next:
            return
        self._next = self._clock() + _SAMPLE_EVERY_S
        try:
            for name, value in self._read().items():
                self._values.setdefault(name, []).append(value)
        except _NoFiguresError as error:
            self.absent = str(error)

    def facts(self) -> dict[str, Any]:
        """Least, median and most of each figure, or why there is none."""
        if self.absent or not self._values:
            return {"absent": self.absent or "no figure was read"}
        return {
            name: {"least": min(values), "median": statistics.median(values), "most": max(values)}
            for name, values in self._values.items()
        }


class _NoFiguresError(Exception):
    """Neither way of asking works."""


def _nvml_reader(pci_bus_id: str) -> Callable[[], dict[str, float]]:
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id.encode())
    except pynvml.NVMLError as error:
        raise _NoFiguresError(f"NVML: {error}") from error

    def read() -> dict[str, float]:
        try:
            return {
                "sm_mhz": float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
                "memory_mhz": float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM)),
                "celsius": float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
                "watts": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000.0,
            }
        except pynvml.NVMLError as error:
            raise _NoFiguresError(f"NVML: {error}") from error

    return read


def _smi_reader(pci_bus_id: str) -> Callable[[], dict[str, float]]:
    command = [
        *("nvidia-smi", "-i", pci_bus_id, "--format=csv,noheader,nounits"),
        "--query-gpu=" + ",".join(_SMI_FIELDS.values()),
    ]

    def read() -> dict[str, float]:
        try:
            out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
            return dict(zip(_SMI_FIELDS, map(float, out.split(",")), strict=True))
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            raise _NoFiguresError(
                f"neither the package nvidia-ml-py nor a working nvidia-smi ({type(error).__name__})"
            ) from error

    return read


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
