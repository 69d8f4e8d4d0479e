"""Q4_K as we make it: valid blocks by the gguf package's dequantiser, errors within bounds, no worse than rounding."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from gguf.quants import dequantize

from export.quantize_q4k import quantize_q4_k
from tests.quantize import pack

# Relative RMS errors that a search over steps reaches with 4 bits in blocks of 32 (llama.cpp's, measured: 0.0713 for
# normal values, 0.0846, 0.0546), with a margin of 2 % that leaves plain rounding (0.078, 0.092, 0.061) outside.
MOST_ERROR = {"normal": 0.0727, "laplace": 0.0863, "uniform": 0.0557}


def samples(kind: str, scale: float = 0.02) -> np.ndarray:
    rng = np.random.default_rng(5)
    drawn = {"normal": rng.standard_normal, "laplace": lambda size: rng.laplace(size=size)}
    drawn["uniform"] = lambda size: rng.uniform(-1, 1, size)
    return (drawn[kind]((64, 2048)) * scale).astype(np.float32)


def relative_error(values: np.ndarray, blocks: np.ndarray) -> float:
    off = dequantize(blocks, T.Q4_K).astype(np.float64) - values
    return float(np.sqrt(np.square(off).mean() / np.square(values.astype(np.float64)).mean()))


@pytest.mark.parametrize("kind", MOST_ERROR)
@pytest.mark.parametrize("scale", [2e-3, 0.02, 300.0])
def test_error_is_that_of_a_good_search(kind: str, scale: float) -> None:
    values = samples(kind, scale)
    error = relative_error(values, quantize_q4_k(values))
    assert error < MOST_ERROR[kind]
    assert error < 0.95 * relative_error(values, pack(values, T.Q4_K))


def test_no_weight_is_far_off() -> None:
    """Within one step of its block, and within half a step, but for the rounding of step and offset to 6 bits, for
    what the block's span does not clip."""
    values = samples("normal")
    off = np.abs(dequantize(quantize_q4_k(values), T.Q4_K) - values).reshape(-1, 32)
    blocks = values.reshape(-1, 32)
    step = (np.maximum(blocks.max(1), 0) - np.minimum(blocks.min(1), 0)) / 15
    assert (off.max(1) < 1.6 * step).all()
    assert np.quantile(off / step[:, None], 0.97) < 0.6


@pytest.mark.parametrize("low", [0, 3])
def test_values_on_a_grid_stay(low: int) -> None:
    """What Q4_K can hold exactly comes out as it was: one step, all levels, an offset that is a multiple."""
    rng = np.random.default_rng(6)
    levels = rng.integers(0, 16, (8, 8, 32))
    levels[..., 0], levels[..., 1] = 0, 15
    values = ((levels - low) * 63 * 2.0**-10).astype(np.float32).reshape(8, 256)
    np.testing.assert_allclose(dequantize(quantize_q4_k(values), T.Q4_K), values, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 1e-4, -3e4])
def test_constant_blocks(value: float) -> None:
    values = np.full((1, 256), value, np.float32)
    np.testing.assert_allclose(dequantize(quantize_q4_k(values), T.Q4_K), values, rtol=4e-3, atol=1e-7)


def test_blocks_do_not_disturb_each_other() -> None:
    """A block of zeros beside large ones stays zero; rows come out the same alone and among others."""
    values = samples("normal")
    values[:, 32:64] = 0
    together = quantize_q4_k(values)
    assert not dequantize(together, T.Q4_K)[:, 32:64].any()
    assert np.array_equal(quantize_q4_k(values[17:18]), together[17:18])
    assert together.shape == (64, 2048 // 256 * 144)
