"""Norms of rows on the device: by their definition, and the same bits in whatever call."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernels import library as lib

pytestmark = pytest.mark.gpu

F32 = NDArray[np.float32]


@pytest.mark.parametrize("k", [1, 64, 4096, 5003])
def test_rms_norm_matches_float64_row_by_row(rng: np.random.Generator, k: int) -> None:
    x, weight = rng.standard_normal((7, k)).astype(np.float32), rng.uniform(0.5, 1.5, k).astype(np.float32)
    device_x, device_weight = lib.put(x), lib.put(weight)

    def norm(t: int) -> F32:
        y = lib.DeviceArray((t, k), np.float32)
        args = (device_x.ptr, k, t, k, device_weight.ptr, 1e-6, y.ptr, k, 0, None)
        assert lib.kernels().nextn_rms_norm(*args) == 0
        return y.host()

    y, wide = norm(7), x.astype(np.float64)
    want = wide / np.sqrt((wide * wide).mean(axis=1, keepdims=True) + 1e-6) * weight
    np.testing.assert_allclose(y, want, rtol=2e-6, atol=1e-7)
    assert all(np.array_equal(norm(t), y[:t]) for t in range(1, 7))


@pytest.mark.parametrize("k", [1, 64, 4096, 5003])
def test_norms_of_chosen_rows_and_of_two_inputs_are_those_of_one(rng: np.random.Generator, k: int) -> None:
    x, other = (rng.standard_normal((5, width)).astype(np.float32) for width in (k, 96))
    weight, other_weight = (rng.uniform(0.5, 1.5, width).astype(np.float32) for width in (k, 96))
    on_device = [lib.put(each) for each in (x, weight, other, other_weight)]

    def norm(i: int, width: int) -> F32:
        y = lib.DeviceArray((5, width), np.float32)
        args = (on_device[i].ptr, width, 5, width, on_device[i + 1].ptr, 1e-6, y.ptr, width, 0, None)
        assert lib.kernels().nextn_rms_norm(*args) == 0
        return y.host()

    rows = np.array([4, 0, 4, -1, 5, 2], np.int32)
    device_rows, y, picked = lib.put(rows), lib.DeviceArray((5, k), np.float32), lib.DeviceArray((6, k), np.float32)
    args = (on_device[0].ptr, k, 5, k, on_device[1].ptr, 1e-6, y.ptr, device_rows.ptr, 6, picked.ptr, 0, None)
    assert lib.kernels().nextn_rms_norm_rows(*args) == 0
    want, got = norm(0, k), picked.host()
    np.testing.assert_array_equal(y.host(), want)
    np.testing.assert_array_equal(got[[0, 1, 2, 5]], want[[4, 0, 4, 2]])
    assert np.isnan(got[3:5]).all()

    pair = lib.DeviceArray((5, k + 96), np.float32)
    args = (
        *(on_device[0].ptr, k, on_device[1].ptr, on_device[2].ptr, 96, on_device[3].ptr),
        5,
        1e-6,
        pair.ptr,
        0,
        None,
    )
    assert lib.kernels().nextn_rms_norm_pair(*args) == 0
    np.testing.assert_array_equal(pair.host(), np.concatenate([want, norm(2, 96)], axis=1))
