"""Weights on the device: one copy of each, uploaded from the mapped files, for all engines and profiles."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from engines.engine_manifest import WeightPiece, WeightPlace
from engines.errors import EngineError
from engines.memory_plan import padded, weights_nbytes
from runtime.cuda import DeviceBuffer, Event, PinnedBuffer, Stream

_CHUNK_BYTES = 32 << 20


class DeviceWeights:
    """``addresses``: where each weight lies. ``folder``: the exported folder that the places refer to.

    Raises EngineError (a file is missing or too short) or ResourceError (device memory)."""

    def __init__(
        self,
        folder: Path,
        places: Mapping[str, WeightPlace],
        stream: Stream,
        progress: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self._buffer = DeviceBuffer(weights_nbytes(places))
        self.addresses: dict[str, int] = {}
        address = self._buffer.address
        for name, place in places.items():
            self.addresses[name] = address
            address += padded(place.nbytes)
        staging = _Staging(stream)
        # In the order of the files, which is how they are read fastest.
        by_file: dict[str, list[tuple[int, WeightPiece]]] = {}
        for name, place in places.items():
            for piece in place.pieces:
                by_file.setdefault(piece.file, []).append((self.addresses[name] + piece.at, piece))
        for file, targets in sorted(by_file.items()):
            mapped = _mapped(folder / file, max(piece.offset + piece.nbytes for _, piece in targets))
            for address, piece in sorted(targets, key=lambda target: target[1].offset):
                for chunk, done in _chunks(mapped[piece.offset : piece.offset + piece.nbytes]):
                    staging.send(address + done, chunk)
                    progress(len(chunk))
        stream.synchronize()


class _Staging:
    """Two pinned buffers: while one is being copied to the device, the other is filled."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._buffers = [(PinnedBuffer(_CHUNK_BYTES), Event()) for _ in range(2)]
        self._used = 0

    def send(self, address: int, chunk: np.ndarray) -> None:
        buffer, copied = self._buffers[self._used % 2]
        if self._used >= 2:
            copied.wait()
        np.copyto(buffer.array[: len(chunk)], chunk)
        self._stream.to_device(address, buffer, len(chunk))
        self._stream.record(copied)
        self._used += 1


def _chunks(array: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    for first in range(0, len(array), _CHUNK_BYTES):
        yield array[first : first + _CHUNK_BYTES], first


def _mapped(path: Path, end: int) -> np.ndarray:
    """The file as bytes. Raises EngineError when it has fewer than ``end``."""
    try:
        with open(path, "rb") as file:
            mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except (OSError, ValueError) as error:
        raise EngineError(f"{path}: cannot be read ({error}); run `python -m engines.build` again") from error
    if len(mapped) < end:
        raise EngineError(
            f"{path}: {len(mapped)} bytes, but its weights reach to {end}; run `python -m engines.build` again"
        )
    return mapped
