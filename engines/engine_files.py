"""Engines of one build put into a folder together, whatever other builds do there, and looked up again."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from engines.engine_manifest import ENGINES_NAME, EngineManifest, load_engine_manifest
from engines.errors import EngineError

_PIECE_BYTES = 8 << 20


def part_of(path: Path) -> Path:
    """The name under which this process writes an engine until it is whole."""
    return path.with_name(f"{path.name}.{os.getpid()}.part")


def put_in_place(folder: Path, made: EngineManifest) -> None:
    """Give the engines that lie under `part_of` their names, then write their manifest. Raises OSError."""
    with _locked(folder):
        # Old engines are not described while they are being replaced.
        (folder / ENGINES_NAME).unlink(missing_ok=True)
        for engine in made.engines.values():
            part = part_of(folder / engine.file)
            with open(part, "rb") as file:
                os.fsync(file.fileno())
            os.replace(part, folder / engine.file)
        made.save(folder)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait for the folder, and hold it. The system gives it up when the process ends, however it does."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def kept_engines(folder: Path, key: str) -> EngineManifest | None:
    """The manifest of engines that are whole and were made from the same things."""
    try:
        manifest = load_engine_manifest(folder)
        if manifest.build_key != key:
            return None
        for role, engine in manifest.engines.items():
            if _digest(manifest.file(folder, role)) != engine.digest:
                return None
    except (EngineError, OSError):  # not there, or not usable: to be built
        return None
    return manifest


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=20)
    with open(path, "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()
