"""Token choice on the device equals the host's, to the token; RMSNorm against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime import noise
from runtime.sampling import SamplingParams, choose
from tests.kernels import library as lib

pytestmark = pytest.mark.gpu

F32 = NDArray[np.float32]
VOCAB = 248320
NO_TOKEN = -1


def select(logits: F32, position: int, params: SamplingParams, offset: int = 0, pad: int = 0) -> NDArray[np.int32]:
    rows, n = logits.shape
    padded = np.full((rows, n + pad), np.nan, np.float32)
    padded[:, :n] = logits
    least = float(noise.log(np.array([params.min_p]))[0]) if params.min_p else -math.inf
    sampling = np.frombuffer(bytes(lib.Sampling(params.temperature, least, params.seed)), np.uint8)
    device_logits, device_sampling = lib.put(padded), lib.put(sampling)
    start, tokens = lib.put(np.array([position], np.int32)), lib.DeviceArray(rows, np.int32)
    work = lib.DeviceArray(lib.kernels().nextn_select_workspace(rows), np.uint8)
    status = lib.kernels().nextn_select(
        *(device_logits.ptr, n + pad, rows, n, device_sampling.ptr, start.ptr, offset),
        *(tokens.ptr, work.ptr, work.bytes, 1, None),
    )
    assert status == 0
    lib.synchronize()
    return tokens.host()


@pytest.mark.parametrize("n", [1, 3, 257, 5000, VOCAB])
@pytest.mark.parametrize("temperature", [0.0, 0.05, 0.8, 1.0, 30.0])
@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_equals_the_host(rng: np.random.Generator, n: int, temperature: float, spread: float) -> None:
    rows, position = 6, int(rng.integers(0, 2**31 - 10))
    logits = (rng.standard_normal((rows, n)) * spread).astype(np.float32)
    logits[0, rng.integers(0, n, max(1, n // 3))] = -np.inf
    logits[0, n // 2] = 1.0
    params = SamplingParams(temperature, seed=int(rng.integers(0, 2**64, dtype=np.uint64)))
    want = choose(logits, position + 2 + np.arange(rows), params)
    assert select(logits, position, params, offset=2, pad=5).tolist() == want.tolist()


@pytest.mark.parametrize("min_p", [0.01, 0.3, 1.0])
def test_min_p_equals_the_host(rng: np.random.Generator, min_p: float) -> None:
    logits = (rng.standard_normal((8, 5000)) * 2).astype(np.float32)
    params = SamplingParams(1.5, min_p=min_p, seed=int(rng.integers(0, 2**63)))
    assert select(logits, 40, params).tolist() == choose(logits, 40 + np.arange(8), params).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_from_numbers_that_are_none(rng: np.random.Generator, temperature: float) -> None:
    logits = rng.standard_normal((5, 1000)).astype(np.float32)
    logits[1, 999], logits[2, 0], logits[3] = np.nan, np.inf, -np.inf
    tokens = select(logits, 0, SamplingParams(temperature, seed=1))
    assert (tokens[1:4] == NO_TOKEN).all()
    assert (tokens[[0, 4]] >= 0).all()


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
