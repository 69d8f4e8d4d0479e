"""Rows of hidden states that stay on the device."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from runtime.cuda import DeviceBuffer, Stream

_F32_BYTES = 4


class DeviceRows:
    """``count`` rows [count, width] float32 at ``address``. Slices are views; ``owner`` keeps the memory alive."""

    def __init__(self, address: int, count: int, width: int, owner: Any) -> None:
        self.address, self.count, self.width, self._owner = address, count, width, owner

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, rows: slice) -> DeviceRows:
        first, last, step = rows.indices(self.count)
        assert step == 1, rows
        address = self.address + first * self.width * _F32_BYTES
        return DeviceRows(address, max(0, last - first), self.width, self._owner)

    def resized(self, count: int) -> DeviceRows:
        """The rows from the first on, ``count`` of them."""
        return DeviceRows(self.address, count, self.width, self._owner)

    @property
    def nbytes(self) -> int:
        return self.count * self.width * _F32_BYTES

    def read(self, stream: Stream) -> np.ndarray:
        """A host copy."""
        return stream.read(self.address, (self.count, self.width), np.float32)


class RowPool:
    """Memory for rows that outlive the pass that made them, used again once nobody holds them.

    Safe without waiting, because everything that touches rows goes through one stream."""

    def __init__(self, stream: Stream, width: int) -> None:
        self._stream, self._width = stream, width
        self._free: dict[int, list[DeviceBuffer]] = {}

    def joined(self, parts: Sequence[DeviceRows]) -> DeviceRows:
        """A copy of all rows of ``parts``, one after the other."""
        rows = self._take(sum(map(len, parts)))
        address = rows.address
        for part in parts:
            self._stream.on_device(address, part.address, part.nbytes)
            address += part.nbytes
        return rows

    def extended(self, kept: DeviceRows | None, rows: DeviceRows, capacity: int) -> DeviceRows:
        """``kept``, which an earlier call with the same capacity returned, and a copy of ``rows`` behind it, in place
        if there is room for so many rows; kept None: of ``rows`` alone."""
        count = 0 if kept is None else len(kept)
        block = self._take(capacity) if kept is None else kept
        assert count + len(rows) <= capacity, (count, len(rows), capacity)
        address = block.address + count * self._width * _F32_BYTES
        self._stream.on_device(address, rows.address, rows.nbytes)
        return block.resized(count + len(rows))

    def zeros(self) -> DeviceRows:
        """One row of zeros."""
        rows = self._take(1)
        self._stream.clear(rows.address, rows.nbytes)
        return rows

    def _take(self, count: int) -> DeviceRows:
        capacity = 1 << max(0, count - 1).bit_length()
        free = self._free.setdefault(capacity, [])
        buffer = free.pop() if free else DeviceBuffer(capacity * self._width * _F32_BYTES)
        owner = _Owner()
        weakref.finalize(owner, free.append, buffer)
        return DeviceRows(buffer.address, count, self._width, owner)


class _Owner:
    """Collected when the last view of some rows is."""
