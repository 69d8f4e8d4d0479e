"""One decoder layer as one call: against float64, independence of T, and the persistent kernel against single ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernels import library as lib
from tests.kernels.decoder_layer import PDL, POSITION, SEPARATE, RandomLayer, Shape
from tests.kernels.test_gated_delta_net import Shape as NetShape

pytestmark = pytest.mark.gpu

F32 = NDArray[np.float32]
ERROR = 1e-3  # of single matrices: 3e-4
SMALL = Shape(2048, 6144, NetShape(8, 16, 128))  # the persistent kernel's smallest
FEW_TILES = Shape(2048, 1024, NetShape(4, 8, 128))  # most blocks have no tile of some products
ODD = Shape(2304, 9472, NetShape(5, 10, 128))  # superblocks that two blocks cannot share evenly, an odd number of tiles
NINE_B = Shape(4096, 12288, NetShape(16, 32, 128))
ATTENTION = Shape(4096, 12288, None)
TYPES = {
    "q4": ("Q4_K",) * 7,
    "mixed": ("Q6_K", "Q4_K", "Q4_K", "Q5_K", "Q4_K", "Q5_K", "Q6_K"),
    "six": ("Q6_K",) * 7,
    "float gates": ("Q4_K", "Q4_K", "F32", "F32", "Q4_K", "Q4_K", "Q6_K"),
    "float rows": ("BF16", "BF16", "F32", "F32", "F16", "Q8_0", "Q8_0"),
    "tiny": ("Q4_K",) * 7,
}


def shape_of(kind: str) -> Shape:
    return (Shape(512, 1024, NetShape(2, 4, 64)) if kind == "tiny" else SMALL).with_types(*TYPES[kind])


def inputs(rng: np.random.Generator, t: int, d: int) -> F32:
    return rng.standard_normal((t, d)).astype(np.float32)


def relative(got: F32, want: NDArray[np.floating]) -> float:
    assert np.isfinite(got).all()
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("t", [1, 3, 6, 40])
def test_matches_float64(rng: np.random.Generator, kind: str, t: int) -> None:
    layer = RandomLayer(rng, shape_of(kind))
    x = inputs(rng, 4 + t, layer.shape.d)
    want = layer.reference(x)[4:]
    errors = []
    for flags in (PDL | SEPARATE, PDL):
        layer.run(x[:4], -1, flags)  # from an empty state outputs hang on one product k.q, which may be next to nothing
        errors.append(relative(layer.run(x[4:], 3, flags), want))
    single, whole = errors
    # A draw may be ill-conditioned (a head's outputs nearly cancel before its norm); then it is so for both.
    assert whole < max(ERROR, 2 * single) and single < 10 * ERROR


@pytest.mark.parametrize("shape", [SMALL, SMALL.with_types(*TYPES["mixed"]), ODD, NINE_B, ATTENTION], ids=str)
def test_does_not_depend_on_t(rng: np.random.Generator, shape: Shape) -> None:
    """Output and all state of T tokens at once equal those of one at a time."""
    layer = RandomLayer(rng, shape, repeat=2)
    for t in range(2, 9):
        x = inputs(rng, t, shape.d)
        start = -1 if shape.net is not None else POSITION
        whole = layer.run(x, start)
        state = _state(layer, t)
        for i in range(t):
            begin = start if i == 0 else (0 if shape.net is not None else POSITION + i)
            one = layer.run(x[i : i + 1], begin)
            assert np.array_equal(one[0], whole[i]), (t, i)
            if shape.net is not None and t <= shape.net.slots:
                for now, after in zip(layer.net.slot(0), state, strict=True):
                    assert np.array_equal(now, after[i]), (t, i)
        if shape.net is None:
            for now, after in zip(_state(layer, t), state, strict=True):
                assert np.array_equal(now, after, equal_nan=True)


def _state(layer: RandomLayer, t: int) -> list[NDArray[np.generic]]:
    """After a call of t tokens: caches, or windows and states after each token, where they are kept."""
    if layer.shape.net is None:
        return list(layer.attention.cached())
    return list(layer.net.slots(t if t <= layer.shape.net.slots else 1))


@pytest.mark.parametrize("shape", [FEW_TILES, SMALL, NINE_B], ids=str)
@pytest.mark.parametrize("t", [1, 2, 4, 5, 8])
def test_a_call_from_any_slot_equals_one_that_never_saw_the_rejected_tokens(
    rng: np.random.Generator, shape: Shape, t: int
) -> None:
    """Bit by bit, with the windows and states that it leaves itself; launches overlap."""
    assert shape.net is not None
    layer = RandomLayer(rng, replace(shape, net=replace(shape.net, slots=8)), repeat=2)
    x, after = inputs(rng, 8, shape.d), inputs(rng, t, shape.d)
    for kept in range(8):
        for i in range(kept + 1):
            layer.run(x[i : i + 1], 0 if i else -1)
        start = layer.net.slot(0)
        want = layer.run(after, 0)
        wanted = layer.net.slots(t)
        layer.run(x, -1)
        assert all(np.array_equal(a, b) for a, b in zip(layer.net.slot(kept), start, strict=True)), kept
        assert np.array_equal(layer.run(after, kept), want), kept
        assert all(np.array_equal(a, b) for a, b in zip(layer.net.slots(t), wanted, strict=True)), kept


@pytest.mark.parametrize("t", [1, 3, 8])
def test_a_short_call_from_a_slot_of_a_long_one(rng: np.random.Generator, t: int) -> None:
    """More steps lead there than the persistent kernel fetches at once."""
    layer = RandomLayer(rng, replace(SMALL, net=NetShape(8, 16, 128, slots=20)), repeat=2)
    x, after = inputs(rng, 20, SMALL.d), inputs(rng, t, SMALL.d)
    for kept in (7, 8, 14, 19):
        layer.run(x, -1)
        layer.net.settle(kept)
        want = layer.run(after, 0)
        wanted = layer.net.slots(t)
        layer.run(x, -1)
        assert np.array_equal(layer.run(after, kept), want), kept
        assert all(np.array_equal(a, b) for a, b in zip(layer.net.slots(t), wanted, strict=True)), kept


@pytest.mark.parametrize("flags", [PDL, PDL | SEPARATE])
def test_kernels_go_on_from_what_each_other_left(rng: np.random.Generator, flags: int) -> None:
    """The persistent kernel and the single ones agree about what a slot means."""
    layer, others = RandomLayer(rng, SMALL, repeat=2), PDL if flags & SEPARATE else PDL | SEPARATE
    x, after = inputs(rng, 5, SMALL.d), inputs(rng, 2, SMALL.d)
    for kept in (1, 4):
        layer.run(x, -1, others)
        went_on = layer.run(after, kept, flags)
        layer.run(x, -1, others)
        layer.net.settle(kept)
        assert np.array_equal(layer.run(after, 0, flags), went_on), kept


@pytest.mark.parametrize("shape", [NINE_B.with_types(*TYPES["mixed"]), ODD, ATTENTION], ids=str)
@pytest.mark.parametrize("t", [1, 4, 7])
def test_persistent_and_single_kernels_agree(rng: np.random.Generator, shape: Shape, t: int) -> None:
    layer = RandomLayer(rng, shape, repeat=2)
    x, start = inputs(rng, t, shape.d), -1 if shape.net is not None else POSITION
    fused, again = layer.run(x, start), layer.run(x, start)
    assert np.array_equal(fused, again)
    # Sums in another order tip some values over to the next step of their quantisation, as if there were one more. What
    # that does depends on the draw, whose 16 rows a matrix repeats: inputs that differ by their last bits show it.
    # Eight of them find the most to within a small factor.
    single = layer.run(x, start, PDL | SEPARATE)
    nearly = [(x * (1 + 1e-6 * rng.standard_normal(x.shape))).astype(np.float32) for _ in range(8)]
    tipped = max(relative(layer.run(each, start, PDL | SEPARATE), single) for each in nearly)
    assert relative(fused, single) < max(3e-4, 4 * tipped)


def test_many_launches_in_a_row_give_the_same_bits(rng: np.random.Generator) -> None:
    """Barriers leave nothing behind, and launches that overlap do not disturb each other."""
    layer = RandomLayer(rng, SMALL)
    for t in (1, 4, 8):
        x = inputs(rng, t, SMALL.d)
        want = layer.run(x, -1, flags=0)
        for _ in range(25):
            assert np.array_equal(layer.run(x, -1), want)


@pytest.mark.parametrize("shape", [FEW_TILES, SMALL, Shape(2048, 1024, None), Shape(2048, 6144, None)], ids=str)
def test_what_memory_held_before_does_not_matter(rng: np.random.Generator, shape: Shape) -> None:
    """Blocks tell by its value whether a result is there yet: what the layer before left, mostly, is none of theirs."""
    layer = RandomLayer(rng, shape, repeat=2)
    start = -1 if shape.net is not None else POSITION
    for t in (1, 2, 3, 4, 5, 7, 8):
        x = inputs(rng, t, shape.d)
        want = layer.run(x, start)
        for i in range(100):
            got = layer.run(x, start, held=0x3F if i % 2 else 0xC0)  # 0.75, -6
            assert np.array_equal(got, want), (t, i)


def test_operands_that_look_as_if_they_were_not_there_yet(rng: np.random.Generator) -> None:
    """More than four tokens: low bytes are what blocks take for absent, but for the largest value of a superblock."""
    layer = RandomLayer(rng, SMALL, repeat=2)
    layer.constants[0] = lib.put(np.ones(SMALL.d, np.float32))
    x = np.full((8, SMALL.d), -128, np.float32)
    x[:, ::256] = 28160  # a step of the quantisation is 1
    whole = layer.run(x, -1)
    assert np.array_equal(layer.run(x[:4], -1), whole[:4])
    assert np.array_equal(layer.run(x[4:], 3), whole[4:])


@pytest.mark.parametrize("t", [3, 8])
def test_nan_reaches_the_output(rng: np.random.Generator, t: int) -> None:
    layer = RandomLayer(rng, SMALL)
    x = inputs(rng, t, SMALL.d)
    x[1, 5] = np.nan
    y = layer.run(x, -1)
    assert np.isfinite(y[0]).all() and np.isnan(y[1]).all()
