"""The verdict of tests/gpu/sanitize.sh, on a stand-in for compute-sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KERNEL_TESTS = [path.name for path in (ROOT / "tests" / "kernels").glob("test_*.py")]
NUM_RUNS = 2 * len([name for name in KERNEL_TESTS if name != "test_layer_chain.py"])
PASSED, NO_ERRORS, NO_HAZARDS = "7 passed in 1.00s", "ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards displayed"


@pytest.mark.skipif(not (shutil.which("bash") and shutil.which("timeout")), reason="needs bash and timeout")
@pytest.mark.parametrize(
    ("says", "code", "clean"),
    [
        (f"{PASSED}\n{NO_ERRORS}", 0, True),
        (f"{PASSED}\n{NO_HAZARDS}", 0, True),
        (f"========= Invalid __global__ read of size 4 bytes\n{PASSED}\nERROR SUMMARY: 1 error", 99, False),
        (f"1 failed, 6 passed\n{NO_ERRORS}", 1, False),
        (NO_ERRORS, 0, False),  # nothing has run to its end
        ("", 124, False),
    ],
)
def test_verdict(tmp_path: Path, says: str, code: int, clean: bool) -> None:
    prepared = clean
    stand_in = tmp_path / "compute-sanitizer"
    stand_in.write_text(f"#!/bin/sh\necho '{says}'\nexit {code}\n")
    stand_in.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "LOGS": str(tmp_path / "logs")}
    command = ["bash", "tests/gpu/sanitize.sh", *([str(tmp_path)] if prepared else [])]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    runs = NUM_RUNS + 2 * prepared
    assert sum(": exit " in line for line in lines) == runs
    assert done.returncode == (0 if clean else 1) and done.stderr == ""
    assert lines[-1] == f"sanitizer: {runs} runs, all clean" if clean else lines[-1].startswith("sanitizer: NOT clean")
