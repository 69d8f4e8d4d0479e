"""The command line on named models, its exports kept for the session; the TensorRT backend on stand-ins."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.engine_tensorrt import open_engines
from runtime.generate import main
from runtime.tensorrt_draft import TensorrtDraft
from runtime.tensorrt_trunk import TensorrtTrunk
from tests.runtime.command import Outcome, run_main
from tests.runtime.fake_passes import CONTEXT, MAX_ROWS
from tests.runtime.fake_tensorrt import FakeGpu, install, toy_manifest, write_engines

Generate = Callable[..., Outcome]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def generate(tiny: Callable[[str], Path], cache: Path) -> Generate:
    """``generate(name, flags...)``: run the command line on a named model."""

    def run(name: str, *flags: object, stdin: bytes | None = None) -> Outcome:
        return run_main(main, tiny(name), "--cache-dir", cache, "--threads", 1, *flags, stdin=stdin)

    return run


@pytest.fixture(scope="session")
def command(tiny: Callable[[str], Path], cache: Path) -> list[str]:
    """The ring model's command line, its export already made."""
    flags = [str(tiny("bigram_ring")), "--cache-dir", str(cache)]
    assert run_main(main, *flags, "--prompt-ids", 40, "-n", 1).code == 0
    return [sys.executable, "-m", "runtime.generate", *flags]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return install(monkeypatch)


@pytest.fixture
def engines(gpu: FakeGpu, tmp_path: Path) -> tuple[TensorrtTrunk, TensorrtDraft]:
    """The toy's, in ``tmp_path``."""
    write_engines(tmp_path, toy_manifest())
    trunk, draft = open_engines(tmp_path, toy_manifest(), context_size=CONTEXT, max_rows=MAX_ROWS)
    assert draft is not None
    return trunk, draft
