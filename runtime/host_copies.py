"""Copies between device memory and ordinary host memory, by way of page-locked memory: several times as fast."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from runtime.cuda import PinnedBuffer, Stream

_STAGING_BYTES = 32 << 20
Span = tuple[int, int]  # device address, bytes


class HostCopies:
    """One staging buffer, for one thread. Every call waits for the stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._staging: PinnedBuffer | None = None  # until it is needed

    def fetch(self, spans: Sequence[Span]) -> np.ndarray:
        """A copy of all spans, one behind the other, u8."""
        copy = np.empty(sum(nbytes for _, nbytes in spans), np.uint8)
        staging = self._buffer()
        for begin, pieces in _filled(spans, staging.nbytes):
            end = begin
            for address, nbytes in pieces:
                self._stream.to_host(staging, address, nbytes, end - begin)
                end += nbytes
            self._stream.synchronize()
            copy[begin:end] = staging.array[: end - begin]
        return copy

    def put(self, spans: Sequence[Span], copy: np.ndarray) -> None:
        """Write back what `fetch` gave for spans of the same sizes."""
        staging = self._buffer()
        for begin, pieces in _filled(spans, staging.nbytes):
            end = begin + sum(nbytes for _, nbytes in pieces)
            staging.array[: end - begin] = copy[begin:end]
            offset = 0
            for address, nbytes in pieces:
                self._stream.to_device(address, staging, nbytes, offset)
                offset += nbytes
            self._stream.synchronize()

    def _buffer(self) -> PinnedBuffer:
        if self._staging is None:
            self._staging = PinnedBuffer(_STAGING_BYTES)
        return self._staging


def _filled(spans: Sequence[Span], limit: int) -> Iterator[tuple[int, list[Span]]]:
    """Pieces of the spans, in groups of ``limit`` bytes at the most, each with the place of its first byte."""
    begin, room, group = 0, limit, list[Span]()
    for address, nbytes in spans:
        while nbytes:
            taken = min(nbytes, room)
            group.append((address, taken))
            address, nbytes, room = address + taken, nbytes - taken, room - taken
            if not room:
                yield begin, group
                begin, room, group = begin + limit, limit, []
    if group:
        yield begin, group
