"""`runtime.serve` on engines, in a process of its own: mixed load, and the turns of a long chat."""

# ruff: noqa: E402 - the imports after the check need packages that a host without a package registry may lack
from __future__ import annotations

from pathlib import Path

import pytest

for package in ("fastapi", "llguidance", "openai", "prometheus_client", "uvicorn"):
    pytest.importorskip(package, reason="the server's packages are not installed")

from tests.bench import second_turn
from tests.soak import __main__ as soak

pytestmark = [pytest.mark.gpu, pytest.mark.trt]

SOAK_S, REQUESTS = 20, 500  # on a busy host a server is warm only after more than so many seconds


def test_a_soak(prepared: Path) -> None:
    """No wrong text, no sequence that stays taken, no growth of memory, and an end when asked."""
    assert soak.main(["--seconds", str(SOAK_S), "--requests", str(REQUESTS), "--model", str(prepared / "trained")]) == 0


def test_turns_of_a_long_chat(prepared: Path) -> None:
    """They process the new tokens and few old ones, and are those of a server that has seen nothing."""
    assert second_turn.main([str(prepared / "trained")]) == 0
