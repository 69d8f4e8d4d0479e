"""`python -m tests.soak [--seconds 180]`: mixed load on the real server, over HTTP, in a process of its own.

Every reply must be the one of its own run; no sequence may stay taken, nobody may wait for ever, and the server's
memory must not grow once it is warm. Exits with 1, and says why, if not. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from tests.soak.load import Load, fill, known_replies
from tests.vocabulary_files import TRAINED_MODEL

ROOT = Path(__file__).parents[2]
NUM_CLIENTS, SEQUENCES, QUEUE, CACHE_MIB, CONTEXT = 8, 4, 4, 32, 1536
GROWTH_MAX = 24 << 20  # bytes: allocators keep some; leaked states would be more by far
_IDLE_WITHIN_S = 30.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--requests", type=int, default=0, help="go on until there were so many")
    parser.add_argument("--model", type=Path, default=TRAINED_MODEL, help="the trained one, or engines of it")
    options = parser.parse_args(arguments)
    flags = ["-t", 1, "-c", CONTEXT, "--sequences", SEQUENCES, "--queue", QUEUE, "--cache-ram", CACHE_MIB]
    with server(options.model, *flags) as (process, url):
        fill(url, SEQUENCES, CONTEXT)
        load = Load(url, known_replies(url))
        sizes: list[int] = []
        begun = time.monotonic()
        load.run(
            options.seconds,
            NUM_CLIENTS,
            lambda: sizes.append(resident_bytes(process.pid)),
            options.requests,
        )
        seconds = time.monotonic() - begun
        findings = [*load.failures, *still_taken(url)]
        if not findings:
            load.compare_afterwards()
            findings = [*load.failures, *growth(sizes)]
        rate = sum(load.counts.values()) / seconds
        print(f"{seconds:.0f} s of mixed load, {NUM_CLIENTS} clients, {rate:.1f} requests a second")
        for what, count in sorted(load.counts.items()):
            print(f"{count:7} {what}")
        print(f"memory: {', '.join(f'{size / 1e6:.0f}' for size in sizes[:: max(1, len(sizes) // 12)])} MB")
        if process.poll() is not None:
            findings.append(f"the server ended with {process.returncode}")
        process.send_signal(signal.SIGTERM)
        if process.wait(60) not in (0, -signal.SIGTERM):
            findings.append(f"the server was asked to end and returned {process.returncode}")
    print("\n".join(f"FAILED: {finding}" for finding in findings) or "no leak, no stuck sequence, no wrong text")
    return int(bool(findings))


@contextlib.contextmanager
def server(model: Path, *flags: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`runtime.serve`: the process, and its address. Its log goes to a file."""
    words = [sys.executable, "-m", "runtime.serve", model, "--port", 0, *flags]
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        process = subprocess.Popen(list(map(str, words)), cwd=ROOT, stderr=log, text=True)
        try:
            for _ in range(600):
                found = re.search(r"listening on (http://[^,\s]+)", Path(log.name).read_text())
                if found or process.poll() is not None:
                    break
                time.sleep(0.1)
            if not found:
                raise SystemExit(f"the server did not start:\n{Path(log.name).read_text()[-2000:]}")
            yield process, found[1]
        finally:
            process.kill()
            process.wait()


def resident_bytes(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) << 10 if found else 0


def still_taken(url: str) -> list[str]:
    """What is not free again soon after the last client has left."""
    until = time.monotonic() + _IDLE_WITHIN_S
    while True:
        lines = httpx.get(f"{url}/metrics", timeout=_IDLE_WITHIN_S).text.splitlines()
        found = [line for line in lines if re.match(r"nextn_(sequences_active|requests_queued) [^0]", line)]
        if not found or time.monotonic() > until:
            return [f"still taken: {line}" for line in found]
        time.sleep(0.2)


def growth(sizes: Sequence[int]) -> list[str]:
    """What memory grew by from the second quarter of the time to the last one, if that is too much."""
    quarter = len(sizes) // 4
    if not quarter:
        return ["too short to see whether memory grows"]
    grown = statistics.median(sizes[-quarter:]) - statistics.median(sizes[quarter : 2 * quarter])
    return [f"memory grew by {grown / 1e6:.0f} MB"] if grown > GROWTH_MAX else []


if __name__ == "__main__":
    sys.exit(main())
