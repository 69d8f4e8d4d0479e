"""Weights in external data as mapped files, for engines that get them inside: the process holds few of their pages."""

from __future__ import annotations

import mmap
from pathlib import Path
from threading import Event, Thread

import numpy as np
import onnx

from engines.errors import EngineError
from export.weight_inputs import external_weights

_FORGET_SECONDS = 0.25


class MappedWeights:
    """``places``: name, address and bytes of every initialiser in external data, which lies in ``folder``.

    A context manager. Until it is left, a thread keeps giving back the pages that were read: they come from the file
    again when they are wanted, and would else make the process as large as the model, beside the copy that TensorRT
    makes. Raises EngineError for a file that is missing or too short, which not every TensorRT notices."""

    def __init__(self, model: onnx.ModelProto, folder: Path) -> None:
        self._files: dict[Path, mmap.mmap] = {}
        self.places: list[tuple[str, int, int]] = []
        for tensor in external_weights(model):
            entries = {entry.key: entry.value for entry in tensor.external_data}
            path, offset, nbytes = folder / entries["location"], int(entries["offset"]), int(entries["length"])
            mapped = self._mapped(path)
            if offset + nbytes > len(mapped):
                raise EngineError(
                    f"{path}: {len(mapped)} bytes, but {tensor.name} ends at {offset + nbytes}; export again"
                )
            self.places.append((tensor.name, np.frombuffer(mapped, np.uint8).ctypes.data + offset, nbytes))
        self._done = Event()
        self._thread = Thread(target=self._keep_forgetting, name="mapped weights", daemon=True)

    def __enter__(self) -> MappedWeights:
        if self._files:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._files:
            self._thread.join()
        for mapped in self._files.values():
            mapped.close()

    def _mapped(self, path: Path) -> mmap.mmap:
        if path not in self._files:
            try:
                with open(path, "rb") as file:
                    self._files[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise EngineError(f"{path}: cannot be read ({error}); export again") from error
        return self._files[path]

    def _keep_forgetting(self) -> None:
        while not self._done.wait(_FORGET_SECONDS):
            for mapped in self._files.values():
                mapped.madvise(mmap.MADV_DONTNEED)
