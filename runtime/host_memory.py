"""How much memory of the host this process may still take."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")


def available_bytes(proc: Path = _PROC, groups: Path = _GROUPS) -> int | None:
    """What the system can give without swapping, or less where a control group or a limit on the address space
    (`ulimit -v`) allows less. None: it does not tell, as others than Linux do not."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", (proc / "meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return min([int(found[1]) << 10, *_left_in_groups(proc, groups), *_left_in_address_space(proc)]) if found else None


def _left_in_address_space(proc: Path) -> Iterator[int]:
    import resource  # there is none on Windows

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        pages = int((proc / "self" / "statm").read_text().split()[0])
        yield max(0, limit - pages * os.sysconf("SC_PAGE_SIZE"))


def _left_in_groups(proc: Path, groups: Path) -> Iterator[int]:
    """Of the process's control group and all that it lies in. Source: the kernel's admin guide, cgroup v2 and v1."""
    for path, limit_name, used_name, cache_name in (
        (_group_of(proc, groups, r"^0::(.*)$"), "memory.max", "memory.current", "inactive_file"),
        (
            _group_of(proc, groups / "memory", r"^\d+:[^:]*\bmemory\b[^:]*:(.*)$"),
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ):
        while path is not None and (path == groups or groups in path.parents):
            limit, used = _number(path / limit_name), _number(path / used_name)
            if limit is not None and used is not None:
                yield max(0, limit - used + _cached(path / "memory.stat", cache_name))
            path = path.parent


def _group_of(proc: Path, root: Path, pattern: str) -> Path | None:
    try:
        found = re.search(pattern, (proc / "self" / "cgroup").read_text(), re.MULTILINE)
    except OSError:
        return None
    if not found:
        return None
    # A container sees its own group as the root, under whatever name it has outside.
    inside = root / found[1].lstrip("/")
    return inside if inside.is_dir() else root


def _number(path: Path) -> int | None:
    """None where the file is not there or says "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _cached(path: Path, name: str) -> int:
    """Pages of files that are given back when memory is needed."""
    try:
        found = re.search(rf"^{name} (\d+)$", path.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0
