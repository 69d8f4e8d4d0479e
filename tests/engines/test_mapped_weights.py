"""Weights that an engine gets inside: the right bytes, files that lack some, and pages that are given back."""

from __future__ import annotations

import ctypes
import re
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from engines import network
from engines.errors import EngineError
from engines.mapped_weights import MappedWeights
from export.graph import Weight


def model_of(*weights: tuple[str, str, int, int]) -> onnx.ModelProto:
    """Initialisers (name, file, offset, bytes) and nothing else."""
    tensors = [
        Weight(name, TensorProto.INT8, (1, 1, nbytes), file, offset, nbytes).external_tensor()
        for name, file, offset, nbytes in weights
    ]
    return helper.make_model(helper.make_graph([], "weights", [], [], tensors))


def test_places_hold_the_files_bytes(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 10_000, np.uint8).tobytes()
    (tmp_path / "one").write_bytes(data)
    (tmp_path / "two").write_bytes(data[::-1])
    with MappedWeights(model_of(("a", "one", 5, 300), ("b", "two", 0, 10_000)), tmp_path) as weights:
        assert [(name, nbytes) for name, _, nbytes in weights.places] == [("a", 300), ("b", 10_000)]
        (_, a, _), (_, b, _) = weights.places
        assert ctypes.string_at(a, 300) == data[5:305] and ctypes.string_at(b, 10_000) == data[::-1]


def test_a_model_without_external_weights(tmp_path: Path) -> None:
    with MappedWeights(model_of(), tmp_path) as weights:
        assert not weights.places


def test_files_that_lack_weights(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(bytes(100))
    with pytest.raises(EngineError, match=r"short: 100 bytes, but w ends at 101; export again"):
        MappedWeights(model_of(("w", "short", 1, 100)), tmp_path)
    with pytest.raises(EngineError, match=r"gone: cannot be read .*export again"):
        MappedWeights(model_of(("w", "gone", 0, 1)), tmp_path)


def file_pages(path: Path) -> int:
    """Bytes of a mapped file that this process holds."""
    text = Path("/proc/self/smaps").read_text()
    return sum(int(kb) << 10 for kb in re.findall(rf" {re.escape(str(path))}\n(?:.*\n)*?Rss: +(\d+) kB", text))


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="resident pages are read from Linux's /proc")
def test_pages_that_were_read_are_given_back(tmp_path: Path) -> None:
    path, nbytes = tmp_path / "weights", 8 << 20
    path.write_bytes(bytes(range(256)) * (nbytes // 256))
    with MappedWeights(model_of(("w", "weights", 0, nbytes)), tmp_path) as weights:
        ((_, address, _),) = weights.places
        for _ in range(2):
            assert ctypes.string_at(address, nbytes) == path.read_bytes()
            deadline = time.monotonic() + 30
            while file_pages(path) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert file_pages(path) == 0


class Parser:
    """Stands in for a parser that takes weights, all but those in ``refused``."""

    def __init__(self, refused: str = "") -> None:
        self.refused, self.calls = refused, []  # type: ignore[var-annotated]

    def load_model_proto(self, model: bytes, path: str) -> bool:
        self.calls.append(("model", path))
        return True

    def load_initializer(self, name: str, address: int, nbytes: int) -> bool:
        self.calls.append((name, ctypes.string_at(address, nbytes)))
        return name != self.refused

    def parse_model_proto(self) -> bool:
        self.calls.append(("parse",))
        return True


class OldParser:
    """Stands in for the parser of full TensorRT before 10.13."""

    def parse(self, model: bytes, path: str) -> bool:
        self.path = path
        return True


def test_parsers_are_given_the_weights_where_they_take_them(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"abcdef")
    model, path = model_of(("a", "data", 1, 2), ("b", "data", 3, 3)), tmp_path / "m.onnx"
    with MappedWeights(model, tmp_path) as weights:
        parser, old = Parser(), OldParser()
        assert network._import(parser, model, path, weights.places)
        assert parser.calls == [("model", str(path)), ("a", b"bc"), ("b", b"def"), ("parse",)]
        assert not network._import(Parser(refused="b"), model, path, weights.places)
        assert network._import(old, model, path, weights.places) and old.path == str(path)
