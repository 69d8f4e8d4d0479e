"""CUDA as the TensorRT backend needs it: device, stream, memory, graphs. The only file that calls the CUDA runtime.

Every failing call raises: EngineError for a missing or unusable driver or GPU, ResourceError for memory,
DeviceLostError for what the device does not recover from in this process; no call is made after that. Objects free what
they hold when they are collected; all work goes through one stream, so memory may be given back in that order.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.errors import DeviceLostError, EngineError, ResourceError

ALIGNMENT = 256  # of device addresses that begin an array
_OUT_OF_MEMORY = 2
_DRIVER_TOO_OLD = 35  # also what the runtime answers when there is no driver at all
_NO_DEVICE = 100
_NO_KERNEL_IMAGE = (98, 209)
# After these every call fails until the process ends: uncorrectable memory and links, faults and assertions of kernels.
_LASTING = frozenset({214, 220, 226, 700, 702, 710, *range(714, 720), 721, 999})
_HOST_TO_DEVICE, _DEVICE_TO_HOST, _DEVICE_TO_DEVICE = 1, 2, 3
_RELAXED_CAPTURE = 2
_NON_BLOCKING = 1
_RECORD_EXTERNAL = 1
_KERNEL_NODE, _COPY_NODE = 0, 1


@dataclass(frozen=True)
class Device:
    """The GPU in use. ``compute_capability``: (major, minor)."""

    name: str
    compute_capability: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.name}, compute capability {self.compute_capability[0]}.{self.compute_capability[1]}"


def open_device() -> Device:
    """Make the first visible GPU current. Raises EngineError when there is no driver or no GPU."""
    if not _call("cudaGetDeviceCount"):
        raise EngineError("no NVIDIA GPU found (the driver shows none); check CUDA_VISIBLE_DEVICES and nvidia-smi")
    _call("cudaSetDevice", 0)
    properties = _call("cudaGetDeviceProperties", 0)
    name = properties.name.decode() if isinstance(properties.name, bytes) else str(properties.name)
    return Device(name.rstrip("\0"), (properties.major, properties.minor))


def pci_bus_id() -> str:
    """Of the first visible GPU, which other tools count otherwise."""
    name = _call("cudaDeviceGetPCIBusId", 32, 0)
    return (name.decode() if isinstance(name, bytes) else str(name)).rstrip("\0")


def free_and_total_bytes() -> tuple[int, int]:
    """Device memory: free now, and in all."""
    free, total = _call("cudaMemGetInfo")
    return int(free), int(total)


def has_no_kernel(status: int) -> bool:
    """Whether a launch failed because the code holds nothing for this GPU."""
    return status in _NO_KERNEL_IMAGE


def check_launch(status: int, what: str) -> None:
    """Raise EngineError when a launcher of ours returned an error."""
    if status:
        api = _api()
        if status in _LASTING:
            raise _lost(what, status, api)
        raise EngineError(f"{what}: {_text(api, status)} (CUDA error {status})")


def check_device() -> None:
    """Raise DeviceLostError when the GPU has failed; for when something else reports an error that may come of it."""
    api = _api()
    # A question to the device: what the last call said is kept by each copy of the runtime for itself, and the plugins
    # and TensorRT have their own.
    status = int(api.cudaMemGetInfo()[0])
    if status in _LASTING:
        raise _lost("the pass", status, api)


class DeviceBuffer:
    """Device memory of ``nbytes`` bytes at ``address``, contents undefined. Raises ResourceError."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.address = int(_call("cudaMalloc", max(nbytes, 1)))
        weakref.finalize(self, _api().cudaFree, self.address)


class PinnedBuffer:
    """Page-locked host memory, which copies to and from the device overlap with other work. ``array``: uint8 view."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.address = int(_call("cudaHostAlloc", nbytes, 0))
        self.array = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self.address))
        weakref.finalize(self, _api().cudaFreeHost, self.address)


class Event:
    """A point on a stream whose time can be read."""

    def __init__(self) -> None:
        self.handle = _call("cudaEventCreate")
        weakref.finalize(self, _api().cudaEventDestroy, self.handle)

    def wait(self) -> None:
        """Until the stream has passed this point."""
        _call("cudaEventSynchronize", self.handle)

    def ms_since(self, earlier: Event) -> float:
        """Milliseconds between two points that have passed."""
        return float(_call("cudaEventElapsedTime", earlier.handle, self.handle))


class Graph:
    """Recorded work, to be repeated as it is. kernels, copies: how many of its nodes are launches, how many copies."""

    def __init__(self, graph: Any) -> None:
        kinds = _node_kinds(graph)
        self.kernels, self.copies = kinds.count(_KERNEL_NODE), kinds.count(_COPY_NODE)
        self.handle = _call("cudaGraphInstantiate", graph, 0)
        weakref.finalize(self, _api().cudaGraphExecDestroy, self.handle)
        _call("cudaGraphDestroy", graph)


class Stream:
    """The stream that all work of a pair of engines goes through."""

    def __init__(self) -> None:
        self._stream = _call("cudaStreamCreateWithFlags", _NON_BLOCKING)
        self.handle = int(self._stream)
        self._capturing = False
        weakref.finalize(self, _api().cudaStreamDestroy, self._stream)

    def synchronize(self) -> None:
        _call("cudaStreamSynchronize", self._stream)

    def to_device(self, address: int, source: PinnedBuffer, nbytes: int, offset: int = 0) -> None:
        self._copy(address, source.address + offset, nbytes, _HOST_TO_DEVICE)

    def to_host(self, target: PinnedBuffer, address: int, nbytes: int, offset: int = 0) -> None:
        self._copy(target.address + offset, address, nbytes, _DEVICE_TO_HOST)

    def on_device(self, address: int, source: int, nbytes: int) -> None:
        self._copy(address, source, nbytes, _DEVICE_TO_DEVICE)

    def clear(self, address: int, nbytes: int) -> None:
        _call("cudaMemsetAsync", address, 0, nbytes, self._stream)

    def read(self, address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """A host copy of an array on the device, once all earlier work is done."""
        out = np.empty(shape, dtype)
        self._copy(out.ctypes.data, address, out.nbytes, _DEVICE_TO_HOST)
        self.synchronize()
        return out

    def upload(self, array: np.ndarray) -> DeviceBuffer:
        """A copy of a small array on the device, once all earlier work is done."""
        staging, buffer = PinnedBuffer(array.nbytes), DeviceBuffer(array.nbytes)
        staging.array[:] = np.ascontiguousarray(array).view(np.uint8).ravel()
        self.to_device(buffer.address, staging, array.nbytes)
        self.synchronize()
        return buffer

    def record(self, event: Event) -> None:
        _call("cudaEventRecordWithFlags", event.handle, self._stream, _RECORD_EXTERNAL if self._capturing else 0)

    def capture(self, work: Callable[[], None]) -> Graph:
        """What ``work`` queues, recorded instead of done."""
        self._capturing = True
        try:
            _call("cudaStreamBeginCapture", self._stream, _kind("cudaStreamCaptureMode", _RELAXED_CAPTURE))
            work()
            return Graph(_call("cudaStreamEndCapture", self._stream))
        except BaseException:
            _api().cudaStreamEndCapture(self._stream)  # ended or not; the first error is the one to show
            raise
        finally:
            self._capturing = False

    def launch(self, graph: Graph) -> None:
        _call("cudaGraphLaunch", graph.handle, self._stream)

    def _copy(self, target: int, source: int, nbytes: int, kind: int) -> None:
        _call("cudaMemcpyAsync", target, source, nbytes, _kind("cudaMemcpyKind", kind), self._stream)


class Recorder:
    """Work on a stream that is recorded when it is first done, and repeated from then on."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._graphs: dict[Hashable, Graph] = {}

    def replay(self, key: Hashable, work: Callable[[], None]) -> None:
        """Queue ``work``; recorded under ``key`` the first time, so it must queue the same work every time."""
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._stream.capture(work)
        self._stream.launch(graph)

    def time_replays(self, key: Hashable, work: Callable[[], None], repeats: int) -> list[float]:
        """Milliseconds of each of ``repeats`` replays in a row, after one more that keeps the device busy meanwhile."""
        events = [Event() for _ in range(repeats + 1)]
        self.replay(key, work)
        self._stream.record(events[0])
        for event in events[1:]:
            self.replay(key, work)
            self._stream.record(event)
        self._stream.synchronize()
        return [later.ms_since(earlier) for earlier, later in itertools.pairwise(events)]


def _node_kinds(graph: Any) -> list[int]:
    """Of every node of a graph that is not instantiated yet."""
    _, count = _call("cudaGraphGetNodes", graph)
    nodes, _ = _call("cudaGraphGetNodes", graph, count) if count else ([], 0)
    return [int(_call("cudaGraphNodeGetType", node)) for node in nodes[:count]]


@functools.cache
def _api() -> Any:
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise EngineError(
            f"the CUDA Python package does not load ({error}); pip install 'nextn-trt[tensorrt]', "
            "or run the .gguf itself, on ONNX Runtime"
        ) from error
    return runtime


def _kind(name: str, value: int) -> Any:
    return getattr(_api(), name)(value)


def _call(name: str, *arguments: Any) -> Any:
    """Call the CUDA runtime; what it returns beside the status."""
    api = _api()
    if _failed:
        raise DeviceLostError(_failed[0])
    try:
        status, *values = getattr(api, name)(*arguments)
    except Exception as error:
        if type(error).__name__ != "DynamicLibNotFoundError":  # raised by the bindings where no driver is installed
            raise
        status, values = _DRIVER_TOO_OLD, []
    if int(status):
        raise _error(name, int(status), api)
    return values[0] if len(values) == 1 else tuple(values)


def _error(name: str, status: int, api: Any) -> EngineError | ResourceError:
    if status == _DRIVER_TOO_OLD:
        return EngineError(
            "no NVIDIA driver found, or one too old for CUDA 13; install a driver >= 580, or run the .gguf itself, on "
            "ONNX Runtime"
        )
    if status == _NO_DEVICE:
        return EngineError("no NVIDIA GPU found (the driver shows none); check CUDA_VISIBLE_DEVICES and nvidia-smi")
    if status == _OUT_OF_MEMORY:
        return ResourceError("out of GPU memory; close other programs, or use engines with a smaller --context")
    if status in _LASTING:
        return _lost(name, status, api)
    return EngineError(f"{name} failed: {_text(api, status)} (CUDA error {status})")


# What the device failed of, once it did: CUDA, too, remembers it for the life of the process.
_failed: list[str] = []


def _lost(name: str, status: int, api: Any) -> DeviceLostError:
    _failed.append(
        f"the GPU failed at {name}: {_text(api, status)} (CUDA error {status}); this process can use it no more: start "
        "it again, and if that does not help, look at nvidia-smi and run it under compute-sanitizer"
    )
    return DeviceLostError(_failed[0])


def _text(api: Any, status: int) -> str:
    text = api.cudaGetErrorString(_status(api, status))[1]
    return text.decode() if isinstance(text, bytes) else str(text)


def _status(api: Any, status: int) -> Any:
    return api.cudaError_t(status)
