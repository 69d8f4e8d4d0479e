"""What the TensorRT backend says when driver, GPU, engines, plugins, memory or sizes do not fit; without a GPU."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from engines.engine_manifest import ENGINES_NAME, load_engine_manifest
from engines.errors import EngineError, NextnError, ResourceError, UsageError
from engines.memory_plan import plan_memory
from plugins.load import TensorRT
from runtime import cuda
from runtime.controller import AdaptiveDraft
from runtime.engine_tensorrt import open_engines
from runtime.session import Session, SpecOptions, open_session
from tests.runtime.fake_cuda import FakeCuda
from tests.runtime.fake_passes import CONTEXT, GEOMETRY, MAX_ROWS
from tests.runtime.fake_tensorrt import FakeGpu, toy_manifest, write_engines


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_engines(tmp_path, toy_manifest())
    return tmp_path


def refused(folder: Path, kind: type[NextnError], *words: str, **sizes: int) -> str:
    """The one-line message of opening ``folder``."""
    given = {"context_size": CONTEXT, "max_rows": MAX_ROWS, **sizes}
    with pytest.raises(kind) as caught:
        open_engines(folder, toy_manifest(), **given)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    return message


class DynamicLibNotFoundError(RuntimeError):
    """Named as the one that the CUDA bindings raise."""


def test_no_driver(gpu: FakeGpu, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.cuda.errors["cudaGetDeviceCount"] = 35
    refused(folder, EngineError, "no NVIDIA driver", "run the .gguf itself, on ONNX Runtime")

    def missing(self: FakeCuda) -> int:
        raise DynamicLibNotFoundError("libcuda.so.1")

    gpu.cuda.errors.clear()
    monkeypatch.setattr(FakeCuda, "_cudaGetDeviceCount", missing)
    refused(folder, EngineError, "no NVIDIA driver", "run the .gguf itself, on ONNX Runtime")


def test_no_cuda_package(gpu: FakeGpu, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    cuda._api.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(EngineError, match=r"pip install 'nextn-trt\[tensorrt\]'"):
        cuda.open_device()


@pytest.mark.parametrize("how", ["count", "status"])
def test_no_gpu(gpu: FakeGpu, folder: Path, how: str) -> None:
    gpu.cuda.devices = 0
    if how == "status":
        gpu.cuda.errors["cudaGetDeviceCount"] = 100
    refused(folder, EngineError, "no NVIDIA GPU", "CUDA_VISIBLE_DEVICES")


def test_gpu_that_tensorrt_does_not_support(gpu: FakeGpu, folder: Path) -> None:
    gpu.module.reason = "Current device has compute capability 9.0 which is not supported"
    refused(folder, EngineError, "Fake GPU, compute capability 9.0", "tensorrt_rtx 1.6.1.120 does not support this GPU")


def test_gpu_that_the_plugins_were_not_compiled_for(gpu: FakeGpu, folder: Path) -> None:
    gpu.cuda.capability, gpu.kernels.status = (12, 1), 209
    refused(folder, EngineError, "libnextn_kernels.so", "12.1", "-DNEXTN_ARCHITECTURES=121-real")


@pytest.mark.parametrize("function", ["nextn_select", "nextn_gated_delta_net_settle"])
def test_kernel_library_that_lacks_something(gpu: FakeGpu, folder: Path, function: str) -> None:
    delattr(gpu.kernels, function)
    refused(folder, EngineError, "libnextn_kernels.so", function, "build it again")


def test_engine_that_does_not_load(gpu: FakeGpu, folder: Path) -> None:
    gpu.module.reason = "Serialization assertion failed"
    refused(folder, EngineError, "trunk.engine", "Serialization assertion failed", "engines.build")


@pytest.mark.parametrize("damage", ["content", "size", "missing"])
def test_damaged_engine(gpu: FakeGpu, folder: Path, damage: str) -> None:
    path = folder / "draft.engine"
    path.unlink() if damage == "missing" else path.write_bytes(b"dra" if damage == "size" else b"drafT")
    refused(folder, EngineError, "draft.engine", "engines.build")


def test_no_engines(gpu: FakeGpu, folder: Path) -> None:
    (folder / ENGINES_NAME).unlink()
    refused(folder, EngineError, ENGINES_NAME, "engines.build")


def test_engines_of_another_model(gpu: FakeGpu, folder: Path) -> None:
    write_engines(folder, replace(toy_manifest(), content_key="another"))
    refused(folder, EngineError, "another model", "engines.build")


def test_engines_of_another_version(gpu: FakeGpu, folder: Path) -> None:
    gpu.version = "1.7.1.116"
    refused(folder, EngineError, "tensorrt_rtx 1.6.1.120", "tensorrt_rtx 1.7.1.116", "engines.build")


def test_engines_of_another_plugin_library(gpu: FakeGpu, folder: Path) -> None:
    gpu.digest = "new"
    refused(folder, EngineError, "libnextn_plugins.so", "engines.build")


def test_plugin_library_missing(gpu: FakeGpu, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("plugins.load.LIBRARY_PLACES", (folder / "libnextn_plugins.so",))
    monkeypatch.setattr("runtime.engine_tensorrt.tensorrt", lambda: TensorRT(None, "tensorrt_rtx", "1.6.1.120"))
    refused(folder, EngineError, "libnextn_plugins.so", "make plugins")


def test_too_little_memory_is_said_before_any_is_taken(gpu: FakeGpu, folder: Path) -> None:
    gpu.cuda.free, gpu.module.reason = 1 << 20, "nor is any engine loaded before that"
    message = refused(folder, ResourceError, "weights", "KV caches", "recurrent states", "activations")
    assert "1.0 MB of 17.18 GB are free" in message and "smaller quantisation" in message
    assert "--context" not in message  # none would fit
    assert sum(gpu.cuda.allocated.values()) < 4096


def test_loaded_engines_are_planned_once(gpu: FakeGpu, folder: Path) -> None:
    """What they take is part of the plan, which is held against the memory there was before."""
    engines = load_engine_manifest(folder)
    activations = 1001  # of the profile that needs most
    gpu.cuda.free = plan_memory(engines, GEOMETRY, ["trunk", "draft"], activations).total
    open_engines(folder, toy_manifest(), context_size=CONTEXT, max_rows=MAX_ROWS)
    refused(folder, ResourceError, "not enough GPU memory")  # less by the engines that were loaded


def test_the_plan_is_the_sum_of_its_parts(gpu: FakeGpu, folder: Path) -> None:
    plan = plan_memory(load_engine_manifest(folder), GEOMETRY, ["trunk", "draft"], 1001)
    parts = {name: value for name, value in asdict(plan).items() if name not in ("kv_cache", "context", "sequences")}
    assert all(parts.values()) and plan.total == sum(parts.values())


def test_the_largest_context_that_fits_is_named(gpu: FakeGpu, folder: Path) -> None:
    """And it does fit, and one more does not."""
    plan = plan_memory(load_engine_manifest(folder), GEOMETRY, ["trunk", "draft"], 0)
    assert plan.context == CONTEXT
    for context in (1, CONTEXT // 2, CONTEXT - 1):
        smaller = replace(plan, kv_caches=plan.kv_caches * context // CONTEXT, context=context)
        free = smaller.total
        smaller.check(free, 1 << 34)
        assert plan.largest_context(free) == context
        assert plan.largest_context(free - 1) == context - 1
        with pytest.raises(ResourceError, match=f"--context {context} or less or with --kv-cache int8"):
            plan.check(free, 1 << 34)


def test_int8_caches_are_planned_with_their_size(gpu: FakeGpu, folder: Path) -> None:
    """And nobody is told to build what is built already."""
    manifest = load_engine_manifest(folder)
    trunk = manifest.engines["trunk"]
    inputs = [replace(each, dtype="int8") if each.name.endswith(".cache") else each for each in trunk.inputs]
    int8 = replace(
        manifest,
        options=replace(manifest.options, kv_cache="int8"),
        engines={**manifest.engines, "trunk": replace(trunk, inputs=tuple(inputs))},
    )
    plans = [plan_memory(each, GEOMETRY, ["trunk"], 0) for each in (manifest, int8)]
    assert plans[0].kv_caches == 2 * plans[1].kv_caches > 0
    assert plans[0].total - plans[1].total == plans[1].kv_caches
    with pytest.raises(ResourceError, match="int8 KV caches") as caught:
        plans[1].check(free=plans[1].total - 1, total=1 << 30)
    assert "--context" in str(caught.value) and "--kv-cache" not in str(caught.value)


def test_memory_runs_out_all_the_same(gpu: FakeGpu, folder: Path) -> None:
    gpu.cuda.errors["cudaHostAlloc"] = 2
    refused(folder, ResourceError, "out of GPU memory")


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"context_size": CONTEXT + 1}, (f"--ctx-size {CONTEXT + 1}", f"{CONTEXT} tokens", "--context")),
        ({"max_rows": MAX_ROWS + 1}, (f"--spec-draft-n-max {MAX_ROWS}", f"{MAX_ROWS - 1} drafts", "--max-draft")),
    ],
)
def test_more_than_the_engines_take(gpu: FakeGpu, folder: Path, sizes: dict[str, int], words: tuple[str, ...]) -> None:
    refused(folder, UsageError, *words, **sizes)


def test_weights_file_too_short(gpu: FakeGpu, folder: Path) -> None:
    (folder / "model.gguf").write_bytes(b"short")
    refused(folder, EngineError, "model.gguf", "5 bytes", "204")
    (folder / "model.gguf").unlink()
    refused(folder, EngineError, "model.gguf", "No such file")


def test_shapes_outside_the_profile(gpu: FakeGpu, folder: Path) -> None:
    trunk, _ = open_engines(folder, toy_manifest(), context_size=CONTEXT, max_rows=MAX_ROWS)
    with pytest.raises(
        EngineError, match="7 tokens with 1 rows of logits is outside profile decode, which takes 1 to 6 tokens"
    ):
        trunk._session.enqueue("decode", MAX_ROWS + 1, 1, {})


def session_of(folder: Path, monkeypatch: pytest.MonkeyPatch, **given: object) -> Session:
    toy_manifest().save(folder)
    monkeypatch.setattr("runtime.session.Tokenizer", lambda folder, info: None)
    return open_session(folder, **given)  # type: ignore[arg-type]


def test_a_session_keeps_within_the_engines(gpu: FakeGpu, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not asked for by number follows the engines; what was, is refused when they cannot."""
    session = session_of(folder, monkeypatch, spec=SpecOptions("auto", 60))
    assert (session.backend, session.context_size, session.trunk.max_rows) == ("tensorrt", CONTEXT, MAX_ROWS)
    assert isinstance(session.controller, AdaptiveDraft) and session.spec_type == "draft-mtp"
    with pytest.raises(UsageError, match="take 5 drafts a round"):
        session_of(folder, monkeypatch, spec=SpecOptions("draft-mtp", 6))
    with pytest.raises(UsageError, match=f"--ctx-size {CONTEXT + 1}"):
        session_of(folder, monkeypatch, context_size=CONTEXT + 1)


def test_an_export_without_tensorrt_engines(gpu: FakeGpu, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / ENGINES_NAME).unlink()
    with pytest.raises(EngineError, match=r"no engines\.json; build engines with `python -m engines\.build`"):
        session_of(folder, monkeypatch)
