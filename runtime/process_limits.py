"""Bounds for processes that run what strangers wrote."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """The process ends if this takes more processor time: a library cannot be interrupted."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


def limit_memory(more_bytes: int) -> int:
    """Let the process take no more than ``more_bytes`` beyond what it has, or than it may anyway; how many that is."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limits = [each for each in resource.getrlimit(resource.RLIMIT_AS) if each != resource.RLIM_INFINITY]
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:  # where there is such a file
        used = int(file.read().split()[0]) * resource.getpagesize()
        most = min([used + more_bytes, *limits])
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        return max(0, most - used)
    return more_bytes
