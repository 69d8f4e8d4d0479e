"""Peak memory of this process. Not getrusage's: a new process takes that figure over from the one that started it, and
it can only grow."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_PROCESS = Path("/proc/self")

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
