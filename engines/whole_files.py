"""Large files of an export by every byte, quickly: digests that a changed byte always changes.

`engines.manifest.file_digest` takes samples of large files, as it runs whenever a model is loaded. Building is rarer,
and says "up to date" of what it has looked at.
"""

from __future__ import annotations

import io
from hashlib import blake2b
from pathlib import Path

import numpy as np

from engines.errors import EngineError
from engines.manifest import Manifest

# The digests of files up to this size are of all their bytes already.
SAMPLED_FROM_BYTES = 64 << 20
_WORDS = 8192  # of 8 bytes, summed up together
_PIECE_BYTES = 1024 * _WORDS * 8
# Odd: a sum modulo 2^64 changes with any one of its words.
_FACTORS = np.arange(_WORDS, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C14) + np.uint64(1)


def whole_digest(path: Path) -> str:
    """Hex digest of a file's size and of weighted sums of its words; about 2 GB/s. Raises OSError."""
    digest = blake2b(path.stat().st_size.to_bytes(8, "little"), digest_size=16)
    buffer = np.zeros(_PIECE_BYTES, np.uint8)
    with open(path, "rb", buffering=0) as file:
        while count := _fill(file, buffer):
            rows = -(-count // (8 * _WORDS))
            buffer[count : rows * 8 * _WORDS] = 0
            words = buffer[: rows * 8 * _WORDS].view(np.uint64).reshape(rows, _WORDS)
            digest.update((words @ _FACTORS).tobytes())
    return digest.hexdigest()


def _fill(file: io.RawIOBase, buffer: np.ndarray) -> int:
    """Read until the buffer is full or the file ends; bytes read."""
    count = 0
    while count < len(buffer) and (got := file.readinto(buffer[count:].data)):
        count += got
    return count


def whole_digests(folder: Path, files: dict[str, str]) -> dict[str, str]:
    """Of the files by role that `engines.manifest.file_digest` takes samples of. Raises OSError."""
    return {
        role: whole_digest(folder / name)
        for role, name in files.items()
        if (folder / name).stat().st_size > SAMPLED_FROM_BYTES
    }


def verify_whole(folder: Path, manifest: Manifest) -> None:
    """Check every byte of an export against its manifest. Raises EngineError naming the first file that is off."""
    manifest.verify(folder)
    for role, known in manifest.whole.items():
        path = manifest.file(folder, role)
        try:
            found = whole_digest(path)
        except OSError as error:
            raise EngineError(f"{path}: cannot be read ({error.strerror})") from error
        if found != known:
            raise manifest.damaged(path)
