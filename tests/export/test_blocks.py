"""Block forms against the gguf package's dequantiser and against the format's integers."""

from __future__ import annotations

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as GGMLType
from gguf.quants import dequantize

from export.blocks import BLOCK_FORMS, block_form_values, to_block_form

# Byte ranges of the float16 fields of a block.
_SCALES = {GGMLType.Q4_K: (0, 4), GGMLType.Q5_K: (0, 4), GGMLType.Q6_K: (208, 210), GGMLType.Q8_0: (0, 2)}
# Affine values are rounded once to float32 in the offset and once in gguf-py's own float32 arithmetic.
_ROUNDING = 2.0**-23


def _random_rows(rng: np.random.Generator, ggml_type: GGMLType, rows: int, blocks: int) -> np.ndarray:
    """Any bytes are a valid block once its float16 fields are finite."""
    raw = rng.integers(0, 256, (rows, blocks, GGML_QUANT_SIZES[ggml_type][1]), dtype=np.uint8)
    start, stop = _SCALES[ggml_type]
    scales = rng.uniform(-2, 2, (rows, blocks, (stop - start) // 2)).astype(np.float16)
    raw[..., start:stop] = scales.view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("ggml_type", BLOCK_FORMS, ids=lambda each: each.name)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (3, 2), (5, 8)])
def test_values_are_those_of_the_dequantiser(ggml_type: GGMLType, rows: int, blocks: int) -> None:
    raw = _random_rows(np.random.default_rng(rows * 100 + blocks), ggml_type, rows, blocks)
    want = dequantize(raw, ggml_type)
    got = block_form_values(BLOCK_FORMS[ggml_type], to_block_form(raw, ggml_type))
    if BLOCK_FORMS[ggml_type].has_offset:
        # Relative to the two terms scale * q and min, whose difference the value is.
        terms = (
            np.abs(want).reshape(rows, -1, 32).max(-1, keepdims=True).repeat(32, -1).reshape(want.shape) + 64 * 63 * 2
        )
        assert np.all(np.abs(got - want) <= _ROUNDING * terms)
    else:
        assert np.array_equal(got.astype(np.float32), want)


@pytest.mark.parametrize("ggml_type", BLOCK_FORMS, ids=lambda each: each.name)
def test_each_byte_of_a_block_counts(ggml_type: GGMLType) -> None:
    """Flipping any bit of a block changes its values just as it does for the dequantiser."""
    rng = np.random.default_rng(7)
    raw = _random_rows(rng, ggml_type, 1, 1)
    form = BLOCK_FORMS[ggml_type]
    before = block_form_values(form, to_block_form(raw, ggml_type))
    start, stop = _SCALES[ggml_type]
    for index in range(raw.shape[1]):
        if start <= index < stop:
            continue
        flipped = raw.copy()
        flipped[0, index] ^= 1 << int(rng.integers(8))
        after = block_form_values(form, to_block_form(flipped, ggml_type))
        want = dequantize(flipped, ggml_type) != dequantize(raw, ggml_type)
        assert np.array_equal(after != before, want) and want.any(), index


@pytest.mark.parametrize("ggml_type", BLOCK_FORMS, ids=lambda each: each.name)
def test_rows_do_not_depend_on_their_neighbours(ggml_type: GGMLType) -> None:
    raw = _random_rows(np.random.default_rng(3), ggml_type, 6, 3)
    whole = to_block_form(raw, ggml_type)
    for row in range(6):
        for one, all_rows in zip(to_block_form(raw[row : row + 1], ggml_type), whole, strict=True):
            if all_rows is None:
                assert one is None
            else:
                assert np.array_equal(one[0], all_rows[row])


@pytest.mark.parametrize("extreme", [0, 255])
def test_extreme_scales_and_mins(extreme: int) -> None:
    """All 6-bit scales and mins 0 or 63, d = dmin = 1: values are exact integers."""
    block = np.zeros((1, 144), np.uint8)
    block[0, 0:4] = np.array([1, 1], np.float16).view(np.uint8)
    block[0, 4:16] = extreme
    block[0, 16:144] = 0x5A
    six_bit = 63 if extreme else 0
    values = block_form_values(BLOCK_FORMS[GGMLType.Q4_K], to_block_form(block, GGMLType.Q4_K))
    low, high = six_bit * 10 - six_bit, six_bit * 5 - six_bit
    assert np.array_equal(values[0], np.tile(np.repeat([low, high], 32), 4))
