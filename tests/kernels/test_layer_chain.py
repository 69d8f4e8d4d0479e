"""Launches of a layer that overlap, one behind the other on a stream, give the bits of the same calls made alone."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernels import library as lib
from tests.kernels.decoder_layer import PDL, POSITION, RandomLayer, Shape
from tests.kernels.test_layer import ATTENTION, FEW_TILES, ODD, SMALL, TYPES, shape_of

pytestmark = pytest.mark.gpu

F32 = NDArray[np.float32]
SLOTS = 8
# Kernels for one token, up to four and up to eight follow each other both ways; 12 take other kernels altogether.
TOKENS = (8, 1, 5, 4, 8, 8, 2, 6, 7, 3, 12, 5, 1, 1, 12, 8, 3, 2, 4, 4, 1, 6, 6, 12, 12, 1, 8, 5)
AHEAD = 40  # kernels that keep the device busy until the host has queued all calls
SHAPES = {
    "tiny": shape_of("tiny"),
    "q4": SMALL,
    "mixed": SMALL.with_types(*TYPES["mixed"]),
    "single mixer and input": SMALL.with_types(*TYPES["float gates"]),
    "few tiles": FEW_TILES,
    "odd": ODD,
    "attention": ATTENTION,
    "attention, mixed": ATTENTION.with_types("Q4_K", "Q4_K", "Q6_K", "Q5_K", "Q4_K", "Q4_K", "Q6_K"),
}


@dataclass
class Chain:
    """Calls of TOKENS, each from rows, slot or cache that the one before wrote. ``given``: what memory for the rows
    holds at first, [calls + 1, 12, d]: the first rows, and those that a call of fewer tokens leaves to the next."""

    layer: RandomLayer
    given: F32
    starts: list[int]

    def prepare(self, flags: int) -> None:
        """State as before the first call, and arguments without workspace."""
        layer = self.layer
        if layer.shape.net is not None:
            for pool in (layer.net.conv_pool, layer.net.state_pool):
                pool.poison()
        else:
            layer.attention.fill(np.random.default_rng(5), POSITION)
        self.rows = [lib.put(each) for each in self.given]
        self.calls: list[lib.DecoderLayer] = []
        self.kept: list[Any] = []
        for i, (t, start) in enumerate(zip(TOKENS, self.starts, strict=True)):
            self.calls.append(layer.arguments(self.rows[i], self.rows[i + 1], start, flags, t))
            self.kept.append(layer.slot if layer.shape.net is not None else layer.call)

    def workspace(self, call: lib.DecoderLayer) -> lib.DeviceArray:
        return lib.DeviceArray(lib.kernels().nextn_layer_workspace(ctypes.byref(call)), np.uint8)

    def alone(self) -> list[NDArray[Any]]:
        self.prepare(flags=0)
        for call in self.calls:
            work, sync = self.workspace(call), lib.put(np.zeros(self.layer.sync.shape, np.uint32))
            call.workspace, call.workspace_bytes, call.sync = work.ptr, work.bytes, sync.ptr
            assert lib.kernels().nextn_layer(ctypes.byref(call), None) == 0
            lib.synchronize()
        return self.results()

    def overlapping(self, others: int) -> list[NDArray[Any]]:
        """In one workspace, with one set of barriers. ``others``: other kernels on the device meanwhile, behind which
        some blocks of a launch begin late."""
        self.prepare(PDL)
        work = max((self.workspace(call) for call in self.calls), key=lambda each: each.bytes)
        for call in self.calls:
            call.workspace, call.workspace_bytes = work.ptr, work.bytes
        with lib.streams(2) as (stream, other):
            lib.occupy(other, others)
            lib.occupy(stream, AHEAD)
            launched = [lib.kernels().nextn_layer(ctypes.byref(call), stream) for call in self.calls]
        assert not any(launched)
        return self.results()

    def results(self) -> list[NDArray[Any]]:
        """Rows of each call in turn, then the state that the last one left."""
        rows = [each.host() for each in self.rows[1:]]
        if self.layer.shape.net is None:
            return rows + self.layer.attention.cached()
        return rows + list(self.layer.net.slots(TOKENS[-1]))


def starts(rng: np.random.Generator, shape: Shape) -> list[int]:
    """Each call goes on behind some of the tokens of the one before."""
    taken = [int(rng.integers(1, t + 1)) for t in TOKENS[:-1]]
    if shape.net is None:
        return [POSITION, *(POSITION + int(n) for n in np.cumsum(taken))]
    return [-1, *(n - 1 if t <= SLOTS else 0 for n, t in zip(taken, TOKENS[:-1], strict=True))]


@pytest.mark.parametrize("kind", SHAPES)
def test_overlapping_launches_give_the_bits_of_lone_ones(rng: np.random.Generator, kind: str) -> None:
    shape = SHAPES[kind]
    if shape.net is not None:
        shape = replace(shape, net=replace(shape.net, slots=SLOTS))
    layer = RandomLayer(rng, shape, repeat=2)
    given = rng.standard_normal((len(TOKENS) + 1, max(TOKENS), shape.d)).astype(np.float32)
    chain = Chain(layer, given, starts(rng, shape))
    want = chain.alone()
    assert all(np.isfinite(each).all() for each in want[: len(TOKENS)])
    for others in (0, 0, 0, 120, 120, 120):
        for i, (got, each) in enumerate(zip(chain.overlapping(others), want, strict=True)):
            assert np.array_equal(got, each, equal_nan=True), (others, i, TOKENS[i] if i < len(TOKENS) else "state")
