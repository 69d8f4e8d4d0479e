"""Folders that a process works in until what they hold is whole. They are named after it, so that the next one can tell
which of them a killed process left behind."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

_LONGEST_NAME = 100  # what is put behind it must fit a file name, too
# Work takes minutes. What is this old belongs to no process any more, whatever machine shares the folder.
_LONGEST_WORK_SECONDS = 86400.0


@contextlib.contextmanager
def new_parents_removed(path: Path) -> Iterator[None]:
    """Where what is done inside fails, the folders above ``path`` that it has made go again, unless something lies in
    them."""
    new = list(itertools.takewhile(lambda each: not os.path.lexists(each), path.parents))
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for each in new:
                each.rmdir()
        raise


def work_name(name: str, kind: str = "") -> str:
    """Of the folder in which this process makes ``name``, or of another ``kind`` of it."""
    return f".{name[:_LONGEST_NAME]}{kind}.{this_node()}.{os.getpid()}"


def this_node() -> str:
    """Where the numbers of processes are what they are here: a machine, of which a container sees a part."""
    try:
        return f"{platform.node()}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # a system without /proc
        return platform.node()


def leftovers(folder: Path, names: str) -> Iterator[Path]:
    """Work folders in ``folder`` that nobody works in any more; of this process none may be in use. names: of what was
    made in them, a regular expression."""
    pattern = re.compile(rf"\.(?:{names})\.(?P<node>.*)\.(?P<pid>\d+)", re.DOTALL)
    for path in folder.iterdir():
        match = pattern.fullmatch(path.name)
        if match and not path.is_symlink() and path.is_dir() and _is_nobodys(path, match["node"], int(match["pid"])):
            yield path


def remove_leftovers(folder: Path, names: str) -> None:
    """Remove the `leftovers`, as far as this user may."""
    for path in list(leftovers(folder, names)):
        shutil.rmtree(path, ignore_errors=True)  # another process may be at it, too


def names_of(name: str) -> str:
    """The regular expression of one name, as it is put into that of its work folder."""
    return re.escape(name[:_LONGEST_NAME])


def _is_nobodys(path: Path, node: str, pid: int) -> bool:
    try:
        age = time.time() - path.stat().st_mtime
    except OSError:  # gone meanwhile
        return False
    if age > _LONGEST_WORK_SECONDS:
        return True
    # Only where it was given does the number of a process mean anything.
    return node == this_node() and os.name == "posix" and not _runs(pid)


def _runs(pid: int) -> bool:
    if pid == os.getpid():  # it was another's before
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # another user's; no number of a process
        return True
    return True
