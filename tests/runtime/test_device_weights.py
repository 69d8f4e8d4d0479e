"""The upload of weights, on a stand-in whose copies are only made when somebody waits for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engines.engine_manifest import WeightPiece, WeightPlace
from runtime import device_weights
from runtime.cuda import Stream
from runtime.device_weights import DeviceWeights
from tests.runtime.fake_passes import array
from tests.runtime.fake_tensorrt import install


@pytest.mark.parametrize("chunk_bytes", [1, 7, 256, 1000, 1 << 20])
def test_every_byte_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int) -> None:
    """Staging memory is not filled again before what was in it has been copied."""
    install(monkeypatch)
    monkeypatch.setattr(device_weights, "_CHUNK_BYTES", chunk_bytes)
    content = {name: np.random.default_rng(len(name)).integers(0, 256, 3000, np.uint8) for name in ("one", "another")}
    for name, values in content.items():
        (tmp_path / name).write_bytes(values.tobytes())
    places = {
        "a": WeightPlace((1300,), (WeightPiece("x", "one", 1000, 700, 0), WeightPiece("y", "another", 0, 500, 768))),
        "b": WeightPlace((2000,), (WeightPiece("z", "one", 5, 2000, 0),)),
    }
    told: list[int] = []
    weights = DeviceWeights(tmp_path, places, Stream(), told.append)
    for name, place in places.items():
        on_device = array(weights.addresses[name], place.shape, np.uint8)
        for piece in place.pieces:
            want = content[piece.file][piece.offset : piece.offset + piece.nbytes]
            assert np.array_equal(on_device[piece.at : piece.at + piece.nbytes], want), piece
    assert sum(told) == 3200
