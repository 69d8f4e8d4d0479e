"""Files that a flag or a folder names, read whole, but never more than a bound, and never waited for in
vain; and files that a flag has written.

Standard library only; every package reads such files through here.
"""

from __future__ import annotations

import errno
import io
import os
import select
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from engines.errors import UsageError

MOST_BYTES = 64 << 20
_PIECE_BYTES = 1 << 20


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """The content of a regular file, or of a pipe that someone writes to, as shells make for ``<(command)``.

    Raises OSError, whose `strerror` says what is the matter: also for more than ``most`` bytes, for folders and
    devices."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise _too_large(most)
        return read_stream(file, most)


def read_stream(file: io.FileIO | BinaryIO, most: int = MOST_BYTES) -> bytes:
    """What is left of an open file. Raises OSError as `read_bytes` does."""
    pieces, nbytes = [], 0
    for piece in _pieces(file):
        nbytes += len(piece)
        if nbytes > most:
            raise _too_large(most)
        pieces.append(piece)
    return b"".join(pieces)


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all; what is no file, a pipe or a device, is written to. Raises OSError."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path = Path(os.path.realpath(path))  # a link stays one
    if path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    temporary = path.with_name(f".{path.name[:100]}.{os.getpid()}.part")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def given_text(flag: str, path: Path | None, cure: str, most: int = MOST_BYTES) -> str:
    """The text of a file that ``flag`` names ("" where the path says enough), or of stdin. Raises UsageError."""
    name = "stdin" if path is None else f"{flag} {path}".lstrip()
    try:
        content = read_stream(sys.stdin.buffer, most) if path is None else read_bytes(path, most)
        return content.decode("utf-8")
    except OSError as error:
        raise UsageError(f"{name}: cannot be read ({reason(error)}); {cure}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: cannot be read (byte {error.start} is not UTF-8); {cure}") from None


def reason(error: Exception) -> str:
    """Why a file cannot be read, without the number that Python puts before it."""
    return str(getattr(error, "strerror", None) or error)


def real_path(path: Path) -> Path:
    """Without links and dots. Raises UsageError for links that lead to themselves."""
    found = Path(os.path.realpath(path))
    if any(each.is_symlink() for each in (found, *found.parents)):
        raise UsageError(f"{path}: is a link that leads to itself; give another")
    return found


def home_path(path: Path) -> Path:
    """With the home folder that a ~ stands for. Raises UsageError where there is none."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise UsageError(f"{path}: there is no such home folder; write the path out") from error


def open_file(path: Path, regular: bool = False) -> io.FileIO:
    """Open without waiting. Raises OSError for folders and devices, and with ``regular`` also for pipes."""
    try:
        file = io.FileIO(path, "rb", opener=_open_at_once)
    except ValueError:  # NUL in the path
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL)) from None
    mode = os.fstat(file.fileno()).st_mode
    if stat.S_ISREG(mode) or (stat.S_ISFIFO(mode) and not regular):
        return file
    file.close()
    raise OSError(errno.EINVAL, "not a file")


def _open_at_once(name: str, flags: int) -> int:
    # A pipe would block until someone writes to it, and a terminal would become the process's own.
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))


def _pieces(file: io.FileIO | BinaryIO) -> Iterator[bytes]:
    while True:
        piece = file.read(_PIECE_BYTES)
        if piece is None:  # a pipe whose writer has not written yet
            waiting = select.poll()
            waiting.register(file, select.POLLIN)
            waiting.poll()
        elif piece:
            yield piece
        else:
            return


def _too_large(most: int) -> OSError:
    shown = f"{most >> 20} MiB" if most >= 1 << 20 else f"{most} bytes"
    return OSError(errno.EFBIG, f"it has more than {shown}")
