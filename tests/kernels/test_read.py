"""The reading kernel reads every word, once."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels import library as lib

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("count", [4, 1000, 4 * 512 * 132 * 4 * 8, 4 * 512 * 132 * 4 * 8 * 3 + 4])
def test_every_word_once(rng: np.random.Generator, count: int) -> None:
    words = rng.integers(0, 1 << 32, count, dtype=np.uint32)
    data, sink = lib.put(words), lib.put(np.array([12345], np.uint32))
    assert lib.kernels().nextn_read(data.ptr, words.nbytes, sink.ptr, None) == 0
    assert sink.host()[0] == 12345 ^ np.bitwise_xor.reduce(words)


def test_refused_sizes() -> None:
    data = lib.put(np.zeros(8, np.uint32))
    assert lib.kernels().nextn_read(data.ptr, 8, data.ptr, None) == lib.INVALID_VALUE
    assert lib.kernels().nextn_read(None, 16, data.ptr, None) == lib.INVALID_VALUE
