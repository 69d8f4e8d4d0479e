"""Memory of this process: what it holds, and its peak. Not getrusage's: a new process takes that figure over from the
one that started it, and it can only grow."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path

import pytest

_PROCESS = Path("/proc/self")

# Of tests that look for growth; 10,000 for a long look: a leak of 1 KiB a round then shows in the process as well.
ROUNDS = int(os.environ.get("NEXTN_TEST_ROUNDS", "300"))
PROCESS_GROWTH = 8 << 20

needs_peak = pytest.mark.skipif(not (_PROCESS / "clear_refs").exists(), reason="peak memory is read from Linux's /proc")


def reset_peak() -> int:
    """Forget the peak so far; returns what is resident now, in bytes."""
    (_PROCESS / "clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    """Most resident bytes since the process began, or since `reset_peak`."""
    found = re.search(r"VmHWM:\s+(\d+) kB", (_PROCESS / "status").read_text())
    assert found
    return int(found[1]) << 10


def resident_bytes() -> int:
    """What the process holds, without what only waits to be collected."""
    gc.collect()
    return int((_PROCESS / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
