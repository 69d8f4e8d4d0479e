"""Stand-ins for TensorRT, its engines of the toy model (`fake_passes`), the plugin libraries and their log."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engines.engine_manifest import (
    Binding,
    Engine,
    EngineManifest,
    EngineOptions,
    WeightPiece,
    WeightPlace,
    engine_profiles,
)
from engines.errors import NumericError
from engines.manifest import Manifest, TokenizerInfo
from plugins.load import TensorRT
from runtime import cuda, engine_tensorrt, tensorrt_session, token_choice
from runtime.engine import NO_CHOICE
from runtime.sampling import SamplingParams, check_logits, choose
from tests.runtime.fake_cuda import FakeCuda
from tests.runtime.fake_engines import VOCAB
from tests.runtime.fake_passes import (
    CHUNK,
    CONTEXT,
    GEOMETRY,
    HIDDEN,
    MAX_ROWS,
    POOL,
    WEIGHT,
    array,
    draft_pass,
    settle,
    trunk_pass,
)

ALL_TOKENS = np.arange(VOCAB, dtype=np.int32)
# As plugins/kernels/select.h has it.
_SAMPLING = np.dtype(
    [("temperature", "f8"), ("least_below", "f8"), ("top_p", "f8"), ("seed", "u8"), ("top_k", "i4"), ("", "V4")]
)


def _engine(role: str, draft_ids: np.ndarray) -> Engine:
    draft = role == "draft"
    cache = (2, CONTEXT, 1, 4)
    state = [Binding("blk.2.cache", "float16", cache)] if draft else []
    state += [] if draft else [Binding("blk.0.pool", "float32", (POOL,)), Binding("blk.1.cache", "float16", cache)]
    inputs = [Binding("tokens", "int32", ("T",)), Binding("position", "int32", (1,))]
    inputs += [Binding("hidden", "float32", ("T", HIDDEN))] if draft else [Binding("slot", "int32", (1,))]
    inputs += [Binding("rows", "int32", ("R",)), *state]
    count = len(draft_ids) if draft else VOCAB
    outputs = [Binding("logits", "float32", ("R", count)), Binding("hidden.out", "float32", ("T", HIDDEN))]
    outputs += [Binding(f"{each.name}.out", each.dtype, each.shape, each.name) for each in state]
    profiles = engine_profiles(role, EngineOptions(MAX_ROWS, CONTEXT, CHUNK, False))
    data = role.encode()
    digest = blake2b(data, digest_size=20).hexdigest()
    return Engine(f"{role}.engine", len(data), digest, tuple(inputs), tuple(outputs), profiles, ("shared.weight",))


def write_engines(folder: Path, manifest: Manifest, draft_ids: np.ndarray = ALL_TOKENS) -> EngineManifest:
    """Engine files and engines.json of the toy. draft_ids: the tokens that its draft head knows."""
    engines = {role: _engine(role, draft_ids) for role in ("trunk", "draft")}
    for role, engine in engines.items():
        (folder / engine.file).write_bytes(role.encode())
    # Two tensors of the file, in the other order than in the weight.
    (folder / "model.gguf").write_bytes(b"head" + WEIGHT[80:] + WEIGHT[:80])
    pieces = (WeightPiece("b", "model.gguf", 124, 80, 0), WeightPiece("a", "model.gguf", 4, 120, 80))
    result = EngineManifest(
        build_key="key",
        content_key=manifest.content_key,
        tensorrt="tensorrt_rtx",
        tensorrt_version="1.6.1.120",
        plugins="digest",
        options=EngineOptions(MAX_ROWS, CONTEXT, CHUNK, False),
        engines=engines,
        weights={"shared.weight": WeightPlace((1, 1, len(WEIGHT)), pieces)},
    )
    result.save(folder)
    return result


def toy_manifest() -> Manifest:
    return Manifest(
        "toy",
        "content",
        "tensorrt",
        GEOMETRY,
        TokenizerInfo((12,), None, False),
        {},
        {},
        read_nbytes={"trunk": 200, "draft": 200},
    )


@dataclass
class FakeModule:
    """Stands in for the TensorRT module. reason: why engines do not load, if they do not. draft_ids: those of
    `write_engines`. A loaded engine takes as much device memory as its file has bytes."""

    fake: FakeCuda
    reason: str = ""
    draft_ids: np.ndarray = field(default_factory=lambda: ALL_TOKENS)

    ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="ours")
    DynamicShapesKernelSpecializationStrategy = SimpleNamespace(NONE="none")

    def Runtime(self, logger: Any) -> FakeModule:
        return self

    def deserialize_cuda_engine(self, data: bytes) -> FakeEngine | None:
        if self.reason:
            tensorrt_session.logger().log(self.reason)
            return None
        self.fake.free -= len(data)
        return FakeEngine(self.fake, _engine(data.decode(), self.draft_ids), self.draft_ids)


class FakeEngine:
    num_optimization_profiles = 2

    def __init__(self, fake: FakeCuda, spec: Engine, draft_ids: np.ndarray) -> None:
        self.fake, self.spec, self.draft_ids = fake, spec, draft_ids

    def get_device_memory_size_for_profile_v2(self, index: int) -> int:
        return 1000 + index

    def create_runtime_config(self) -> SimpleNamespace:
        return SimpleNamespace(set_execution_context_allocation_strategy=lambda strategy: None)

    def create_execution_context(self, how: SimpleNamespace | str) -> FakeContext:
        """how: a runtime configuration, or, for the TensorRT without those, where the memory comes from."""
        assert how == "ours" or how.dynamic_shapes_kernel_specialization_strategy == "none"
        return FakeContext(self.fake, self.spec, self.draft_ids)


class FakeContext:
    def __init__(self, fake: FakeCuda, spec: Engine, draft_ids: np.ndarray) -> None:
        self.fake, self.spec, self.draft_ids = fake, spec, draft_ids
        self.addresses: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.names = {each.name for each in (*spec.inputs, *spec.outputs)} | set(spec.weights)

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self.profile = self.spec.profiles[index]
        return True

    def set_device_memory(self, address: int, nbytes: int) -> None:
        assert nbytes >= 1000 + self.spec.profiles.index(self.profile)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        return 1 <= shape[0] <= (self.profile.max_rows if name == "rows" else self.profile.max_tokens)

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert address % 4 == 0
        self.addresses[name] = address
        return name in self.names

    def execute_async_v3(self, stream: int) -> bool:
        assert set(self.addresses) == self.names, self.names - set(self.addresses)
        for output in self.spec.outputs:
            assert not output.alias or self.addresses[output.name] == self.addresses[output.alias]
        addresses, tokens, rows = dict(self.addresses), self.shapes["tokens"][0], self.shapes["rows"][0]
        if "hidden" in self.names:
            self.fake.stream(stream).add(lambda: draft_pass(addresses, tokens, rows, self.draft_ids))
        else:
            self.fake.stream(stream).add(lambda: trunk_pass(addresses, tokens, rows))
        return True


class FakeKernels:
    """The kernel library: token choice by `runtime.sampling`, slots of the toy. status: of every launch."""

    def __init__(self, fake: FakeCuda, status: int = 0) -> None:
        self.fake, self.status = fake, status
        self.nextn_select_workspace = _Function(lambda rows: 64 * rows)
        self.nextn_select = _Function(self._select)
        self.nextn_read = _Function(self._read)
        self.nextn_gated_delta_net_settle = _Function(self._settle)

    def _read(self, data: int, nbytes: int, sink: int, stream: int) -> int:
        assert nbytes % 16 == 0
        self.fake.stream(stream).add(lambda: None)
        return self.status

    def _settle(self, states: int, windows: int, slot: int, heads: int, dim: int, window: int, stream: int) -> int:
        g = GEOMETRY
        assert (heads, dim, window) == (g.gdn_v_heads, g.gdn_head_dim, (g.conv_kernel - 1) * g.conv_channels)
        self.fake.stream(stream).add(lambda: settle(states, windows, slot))
        return self.status

    def _select(self, logits: int, ld: int, rows: int, n: int, *rest: Any) -> int:
        ids, sampling, position, offset, tokens, work, work_nbytes, _, stream = rest
        assert work and work_nbytes >= 64 * rows and ld == n

        def work_on() -> None:
            given = array(sampling, (_SAMPLING.itemsize,), np.uint8).copy().view(_SAMPLING)[0]
            min_p = 0.0 if given["least_below"] == -math.inf else math.exp(given["least_below"])
            numbers = float(given["temperature"]), int(given["top_k"]), float(given["top_p"])
            params = SamplingParams(*numbers, min_p, int(given["seed"]))
            tokens_of = np.arange(n) if ids is None else array(ids, (n,), np.int32)
            values = np.full((rows, tokens_of[-1] + 1), -np.inf, np.float32)
            given_logits = array(logits, (rows, n), np.float32)
            values[:, tokens_of] = given_logits
            places = int(array(position, (1,), np.int32)[0]) + offset + np.arange(rows)
            for row in range(rows):
                try:
                    check_logits(given_logits[row : row + 1], places[row : row + 1])
                    chosen = choose(values[row : row + 1], places[row : row + 1], params)[0]
                except NumericError:
                    chosen = NO_CHOICE
                array(tokens, (rows,), np.int32)[row] = chosen

        self.fake.stream(stream).add(work_on)
        return self.status


class _Function:
    def __init__(self, function: Callable[..., int]) -> None:
        self.function = function

    def __call__(self, *arguments: Any) -> int:
        return self.function(*arguments)


class FakeLog:
    """Stands in for `plugins.log`: what is logged reaches the open blocks."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def log(self, message: str) -> None:
        self.errors.append(message)

    def __enter__(self) -> FakeLog:
        self.errors = []
        return self

    def __exit__(self, *_: object) -> None: ...

    @property
    def first_error(self) -> str:
        return self.errors[0] if self.errors else "no reason given"


@dataclass
class FakeGpu:
    """Everything that stands in for a GPU machine; change a part before engines are opened to see a fault."""

    cuda: FakeCuda
    module: FakeModule
    kernels: FakeKernels
    version: str = "1.6.1.120"
    digest: str = "digest"


def install(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Put the fakes in the place of driver, TensorRT and plugins."""
    fake = FakeCuda()
    gpu = FakeGpu(fake, FakeModule(fake), FakeKernels(fake))
    log = FakeLog()
    monkeypatch.setattr(cuda, "_api", lambda: fake)
    monkeypatch.setattr(cuda, "_failed", [])
    monkeypatch.setattr(tensorrt_session, "logger", lambda: log)
    monkeypatch.setattr(tensorrt_session, "messages", lambda: log)
    monkeypatch.setattr(token_choice.ctypes, "CDLL", lambda path: gpu.kernels)
    for module in (engine_tensorrt, tensorrt_session):
        monkeypatch.setattr(module, "tensorrt", lambda: TensorRT(gpu.module, "tensorrt_rtx", gpu.version))
    monkeypatch.setattr(tensorrt_session, "trt", gpu.module)
    monkeypatch.setattr(engine_tensorrt, "find_library", lambda: Path("/library/libnextn_plugins.so"))
    monkeypatch.setattr(engine_tensorrt, "library_digest", lambda library: gpu.digest)
    monkeypatch.setattr(engine_tensorrt, "load_plugins", lambda library: library)
    return gpu
