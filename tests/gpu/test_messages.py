"""What is said when something does not fit, by a real TensorRT on a real GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import pytest

from engines.engine_manifest import load_engine_manifest
from engines.errors import EngineError, ResourceError
from runtime import cuda
from runtime.engine_tensorrt import open_engines
from runtime.tensorrt_trunk import GREEDY
from tests.gpu.conftest import Opened
from tests.gpu.prepare import MAX_ROWS

pytestmark = [pytest.mark.gpu, pytest.mark.trt]

Open = Callable[[str], Opened]


def test_sizes_outside_the_profile_are_refused(opened: Open) -> None:
    trunk = opened("trained").trunk
    with pytest.raises(
        EngineError, match="9 tokens with 1 rows of logits is outside profile decode, which takes 1 to 8 tokens"
    ):
        trunk._session.enqueue("decode", MAX_ROWS + 1, 1, {})
    trunk.start(GREEDY)
    trunk.verify([1])  # and it still works
    trunk.commit(1)


def test_too_little_memory_is_said_first(prepared: Path, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    model = opened("trained")
    monkeypatch.setattr(cuda, "free_and_total_bytes", lambda: (1 << 24, 1 << 34))
    with pytest.raises(ResourceError, match=r"weights .* KV caches .* 16\.8 MB of 17\.18 GB are free"):
        open_engines(model.folder, model.manifest, context_size=64)


def test_damaged_engine(opened: Open, tmp_path: Path) -> None:
    """Of the right digest, so that TensorRT itself must refuse it."""
    model = opened("bigram_ring")
    for file in model.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    manifest = load_engine_manifest(tmp_path)
    engine = manifest.engines["trunk"]
    data = bytearray((tmp_path / engine.file).read_bytes())
    data[:64] = bytes(64)
    (tmp_path / engine.file).write_bytes(data)
    damaged = replace(engine, digest=blake2b(data, digest_size=20).hexdigest())
    replace(manifest, engines={**manifest.engines, "trunk": damaged}).save(tmp_path)
    with pytest.raises(EngineError, match=r"trunk\.engine: cannot be loaded on .*compute capability"):
        open_engines(tmp_path, model.manifest, context_size=64)


def test_a_launch_that_cuda_refuses(opened: Open) -> None:
    """Into a recording that is void: op and layer of the first plugin are named, and the next pass is as ever."""
    trunk = opened("trained").trunk
    stream = trunk._shared.stream

    def after_a_prompt() -> None:
        trunk.start(GREEDY)
        trunk.prefill([1, 2, 3])

    after_a_prompt()
    want = trunk.verify([5]).choices
    after_a_prompt()
    trunk.prepare_verify([5])

    def work() -> None:
        cuda._api().cudaStreamSynchronize(stream.handle)  # may not be recorded, which makes the recording void
        trunk.enqueue_verify(trunk._rows_of(1))

    says = r"a decode pass of 1 tokens failed: nextn plugin KQuantEmbedding: token_embd: launch failed: CUDA error 901 "
    with pytest.raises(EngineError, match=rf"{says}\(.*\); start it again"):
        stream.capture(work)
    after_a_prompt()
    assert trunk.verify([5]).choices == want
    trunk.commit(1)
