"""Engines of one build put into a folder together, whatever other builds do there, and looked up again."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from engines.engine_manifest import ENGINES_NAME, EngineManifest, load_engine_manifest
from engines.errors import EngineError
from engines.given_files import real_path
from engines.manifest import MANIFEST_NAME
from engines.signals import Terminated
from engines.work_folders import remove_leftovers, work_name

_PIECE_BYTES = 8 << 20
_WORK = "engines"


@contextlib.contextmanager
def work_folder(folder: Path) -> Iterator[Path]:
    """A folder in ``folder`` for what this process builds, as long as the block runs. What killed builds left there is
    removed first. Raises OSError."""
    remove_leftovers(folder, _WORK)
    work = folder / work_name(_WORK)
    work.mkdir()
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _others_build_in(folder: Path) -> bool:
    """Whether another process, or one that was killed a moment ago, builds engines there."""
    own = work_name(_WORK)
    return any(path.name.startswith(f".{_WORK}.") and path.name != own for path in folder.iterdir())


class Undone:
    """A context manager: Ctrl-C, SIGTERM and SIGHUP inside it leave no export behind that was `made` inside it."""

    def __init__(self) -> None:
        self._made: Path | None = None
        self._inode = 0

    def made(self, folder: Path) -> None:
        """``folder`` was not there before."""
        self._made, self._inode = real_path(folder), folder.stat().st_ino

    def __enter__(self) -> Undone:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt | Terminated)
        if self._made is None or not interrupted or not self._made.is_dir():
            return
        # Others may have begun or finished something there, or put another export in its place.
        theirs = self._made.stat().st_ino != self._inode or (self._made / ENGINES_NAME).exists()
        if not theirs and not _others_build_in(self._made):
            shutil.rmtree(self._made, ignore_errors=True)


def put_in_place(folder: Path, work: Path, made: EngineManifest) -> None:
    """Take the engines out of ``work``, then write their manifest. Raises OSError."""
    with _locked(folder):
        # Old engines are not described while they are being replaced.
        (folder / ENGINES_NAME).unlink(missing_ok=True)
        for engine in made.engines.values():
            with open(work / engine.file, "rb") as file:
                os.fsync(file.fileno())
            os.replace(work / engine.file, folder / engine.file)
        made.save(folder)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait for the folder, and hold it. The system gives it up when the process ends, however it does."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            # NFS locks what is open for writing, which folders never are.
            os.close(handle)
            handle = os.open(folder / MANIFEST_NAME, os.O_RDWR)
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
