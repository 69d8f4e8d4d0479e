"""Memory on the CPU: planned before it is taken, and the largest context that fits is named or, with auto, taken."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.errors import ResourceError, UsageError
from engines.manifest import load_manifest
from export.exporter import export_model
from runtime import session
from runtime.engine_onnxruntime import open_engines
from runtime.host_memory import available_bytes
from runtime.onnx_memory import plan_onnx_memory
from runtime.onnx_session import CACHE_STEP
from runtime.serve import server_parser, session_to_serve
from runtime.session import open_session
from tests.exported import Exported
from tests.memory import needs_peak, peak_bytes, reset_peak
from tests.runtime.conftest import Generate
from tests.tiny_gguf import Spec, write

Export = Callable[[str], Exported]
MODEL_CONTEXT = 4096
ROOM = 1000  # tokens


@pytest.fixture
def room(exported: Export, monkeypatch: pytest.MonkeyPatch) -> int:
    """The host has just enough memory for a context of so many tokens of the ring model."""
    needed = plan_onnx_memory(exported("bigram_ring").manifest, ROOM, draft=True).total
    monkeypatch.setattr(session, "available_bytes", lambda: needed)
    return -(-ROOM // CACHE_STEP) * CACHE_STEP


def test_auto_takes_the_largest_that_fits(room: int, exported: Export) -> None:
    folder = exported("bigram_ring").folder
    assert open_session(folder).context_size == room
    assert open_session(folder, context_size=room).context_size == room
    for asked in (0, room + 1):
        with pytest.raises(ResourceError, match=f"KV caches .* use --ctx-size {room} or less, or auto"):
            open_session(folder, context_size=asked)
    manifest = exported("bigram_ring").manifest
    without_head = plan_onnx_memory(manifest, ROOM, draft=False)
    assert without_head.total < plan_onnx_memory(manifest, ROOM, draft=True).total


def test_several_sequences_have_less_each(room: int, exported: Export) -> None:
    folder = exported("bigram_ring").folder
    options = server_parser("x", "").parse_args([str(folder), "--sequences", "3", "--cache-ram", "0"])
    assert CACHE_STEP <= session_to_serve(options).context_size < room
    options.cache_ram = 1 << 20
    with pytest.raises(ResourceError, match=r"kept prompts .* smaller quantisation"):
        session_to_serve(options)


def test_the_command_line(room: int, generate: Generate) -> None:
    flags = ("bigram_ring", "--prompt-ids", 40, "-n", 3)
    generate(*flags, "-c", 0).refused(6, f"--ctx-size {room} or less", "context of 4096 tokens")
    for context in ("auto", room):
        assert generate(*flags, "-c", context).code == 0
    generate(*flags, "-c", "all").refused(2, "'all': wanted a whole number or auto")


def test_where_nothing_fits_or_nothing_is_known(exported: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = exported("bigram_ring").folder
    monkeypatch.setattr(session, "available_bytes", lambda: 1 << 20)
    with pytest.raises(ResourceError, match=r"1\.0 MB are available; use a smaller quantisation, or close"):
        open_session(folder)
    monkeypatch.setattr(session, "available_bytes", lambda: None)
    assert open_session(folder).context_size == open_session(folder, context_size=0).context_size == MODEL_CONTEXT
    with pytest.raises(UsageError, match="4097"):
        open_session(folder, context_size=MODEL_CONTEXT + 1)


@needs_peak
def test_the_plan_is_what_is_taken(tmp_path: Path) -> None:
    """Of what grows with the context: caches and a prefill pass's scores; neither half of it nor twice as much."""
    context = 16384
    model = write(tmp_path / "model.gguf", Spec(context=context, heads=8, kv_heads=2, head_dim=64))
    export_model(model, tmp_path / "x")
    manifest = load_manifest(tmp_path / "x")
    trunk, draft = open_engines(tmp_path / "x", manifest, context_size=context, threads=1)
    assert draft is not None
    tokens = [1] * trunk.prefill_chunk
    trunk.prefill(tokens)
    before = reset_peak()
    trunk._cache.reserve(context)
    draft._cache.reserve(context)
    for buffer in (*trunk._cache.buffers.values(), *draft._cache.buffers.values()):
        buffer[:] = 0  # memory counts once it is written
    trunk._bindings.clear()
    trunk.prefill(tokens)
    taken = peak_bytes() - before
    plan = plan_onnx_memory(manifest, context, draft=True)
    few = plan_onnx_memory(manifest, CACHE_STEP, draft=True)
    assert (plan.kv_caches + plan.scores) / 2 < taken < plan.kv_caches + plan.scores + few.total


def test_what_the_host_has(tmp_path: Path) -> None:
    """The least of the system's and of every control group's around the process, pages of files not counted."""
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    assert available_bytes(proc, groups) is None
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:  8000 kB\n")
    assert available_bytes(proc, groups) == 8000 << 10
    inner = groups / "user" / "job"
    inner.mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/user/job\n")
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("100\n")
    assert available_bytes(proc, groups) == 8000 << 10
    (inner.parent / "memory.max").write_text("5000\n")
    (inner.parent / "memory.current").write_text("3000\n")
    assert available_bytes(proc, groups) == 2000
    (inner.parent / "memory.stat").write_text("anon 7\ninactive_file 500\n")
    assert available_bytes(proc, groups) == 2500
    (inner / "memory.max").write_text("90\n")
    assert available_bytes(proc, groups) == 0, "over its limit"
    (proc / "self" / "cgroup").write_text("5:cpu:/\n4:memory,x:/elsewhere\n")
    (groups / "memory").mkdir()
    (groups / "memory" / "memory.limit_in_bytes").write_text("700\n")
    (groups / "memory" / "memory.usage_in_bytes").write_text("300\n")
    assert available_bytes(proc, groups) == 400


def test_a_limit_on_the_address_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text("MemAvailable:  8000000 kB\n")
    pages = 100
    (tmp_path / "self" / "statm").write_text(f"{pages} 7 7 7 0 7 0\n")
    used = pages * os.sysconf("SC_PAGE_SIZE")
    for limit, left in ((resource.RLIM_INFINITY, 8000000 << 10), (used + 5000, 5000), (used - 1, 0)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=limit: (limit, limit))
        assert available_bytes(tmp_path, tmp_path / "groups") == left
