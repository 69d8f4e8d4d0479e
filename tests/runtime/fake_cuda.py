"""A CUDA runtime of host memory. Work waits until its stream is synchronised, so what is read too early is poison."""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

POISON = 0xFB
Work = Callable[[], None]


class FakeStream:
    """Queued work; while it is captured, the work goes into a list instead."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.queue: list[Work] = []
        self.captured: list[Work] | None = None

    def __int__(self) -> int:
        return self.handle

    def add(self, work: Work) -> None:
        (self.queue if self.captured is None else self.captured).append(work)

    def drain(self) -> None:
        assert self.captured is None, "waited for while being captured"
        queue, self.queue = self.queue, []
        for work in queue:
            work()


class FakeCuda:
    """Stands in for `cuda.bindings.runtime`. Counts calls; ``errors``: status by function name, for faults."""

    def __init__(self, capability: tuple[int, int] = (9, 0), free: int = 1 << 30, devices: int = 1) -> None:
        self.capability, self.free, self.devices = capability, free, devices
        self.errors: dict[str, int] = {}
        self.calls: dict[str, int] = {}
        self.copies_to_host = 0
        self.allocated: dict[int, int] = {}
        self.streams: dict[int, FakeStream] = {}
        self._memory: list[Any] = []
        self._time = 0.0
        self._handles = itertools.count(77)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cuda"):
            raise AttributeError(name)
        method = getattr(FakeCuda, "_" + name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls[name] = self.calls.get(name, 0) + 1
            if self.errors.get(name):
                return (self.errors[name],)
            result = method(self, *arguments)
            values = result if isinstance(result, tuple) else () if result is None else (result,)
            return (0, *values)

        return call

    def cudaError_t(self, status: int) -> int:
        return status

    def cudaMemcpyKind(self, kind: int) -> int:
        return kind

    def cudaStreamCaptureMode(self, mode: int) -> int:
        return mode

    def stream(self, handle: int) -> FakeStream:
        return self.streams[handle]

    def _cudaGetErrorString(self, status: int) -> bytes:
        return f"fault {status}".encode()

    def _cudaGetDeviceCount(self) -> int:
        return self.devices

    def _cudaSetDevice(self, device: int) -> None:
        assert device == 0

    def _cudaGetDeviceProperties(self, device: int) -> SimpleNamespace:
        major, minor = self.capability
        return SimpleNamespace(name=b"Fake GPU", major=major, minor=minor)

    def _cudaDeviceGetPCIBusId(self, length: int, device: int) -> bytes:
        return b"0000:0A:00.0\0"

    def _cudaMemGetInfo(self) -> tuple[int, int]:
        return self.free, 1 << 34

    def _cudaMalloc(self, nbytes: int) -> int:
        memory = mmap.mmap(-1, nbytes)
        self._memory.append(memory)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        ctypes.memset(address, POISON, nbytes)
        self.allocated[address] = nbytes
        return address

    def _cudaFree(self, address: int) -> None:
        del self.allocated[address]

    def _cudaHostAlloc(self, nbytes: int, flags: int) -> int:
        return self._cudaMalloc(nbytes)

    def _cudaFreeHost(self, address: int) -> None:
        self._cudaFree(address)

    def _cudaStreamCreateWithFlags(self, flags: int) -> FakeStream:
        stream = FakeStream(next(self._handles))
        self.streams[stream.handle] = stream
        return stream

    def _cudaStreamDestroy(self, stream: FakeStream) -> None:
        del self.streams[stream.handle]

    def _cudaStreamSynchronize(self, stream: FakeStream) -> None:
        stream.drain()

    def _cudaMemcpyAsync(self, target: int, source: int, nbytes: int, kind: int, stream: FakeStream) -> None:
        self.copies_to_host += kind == 2
        stream.add(lambda: ctypes.memmove(target, source, nbytes) and None)

    def _cudaMemsetAsync(self, address: int, value: int, nbytes: int, stream: FakeStream) -> None:
        stream.add(lambda: ctypes.memset(address, value, nbytes) and None)

    def _cudaStreamBeginCapture(self, stream: FakeStream, mode: int) -> None:
        assert stream.captured is None
        stream.captured = []

    def _cudaStreamEndCapture(self, stream: FakeStream) -> list[Work]:
        captured, stream.captured = stream.captured, None
        return captured or []

    def _cudaGraphGetNodes(self, graph: list[Work], count: int = 0) -> tuple[list[Work], int]:
        return graph[:count], len(graph)

    def _cudaGraphNodeGetType(self, node: Work) -> int:
        return 0  # a kernel

    def _cudaGraphInstantiate(self, graph: list[Work], flags: int) -> list[Work]:
        return graph

    def _cudaGraphDestroy(self, graph: list[Work]) -> None: ...

    def _cudaGraphExecDestroy(self, graph: list[Work]) -> None: ...

    def _cudaGraphLaunch(self, graph: list[Work], stream: FakeStream) -> None:
        for work in graph:
            stream.add(work)

    def _cudaEventCreate(self) -> dict[str, Any]:
        return {}

    def _cudaEventDestroy(self, event: dict[str, Any]) -> None: ...

    def _cudaEventRecordWithFlags(self, event: dict[str, Any], stream: FakeStream, flags: int) -> None:
        assert flags == (stream.captured is not None)

        def tick() -> None:
            self._time += 1.0
            event["ms"] = self._time

        event["stream"] = stream
        stream.add(tick)

    def _cudaEventSynchronize(self, event: dict[str, Any]) -> None:
        event["stream"].drain()

    def _cudaEventElapsedTime(self, start: dict[str, Any], end: dict[str, Any]) -> float:
        return end["ms"] - start["ms"]
