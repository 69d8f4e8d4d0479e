"""Gated attention over an in-place cache against float64, and its independence of the number of tokens."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernels import library as lib
from tests.oracle import attention as oracle

pytestmark = pytest.mark.gpu

F32 = NDArray[np.float32]
EPS = 1e-6
ERROR = 1e-3  # f16 queries, cache and weights
HALF_STEP = 2.0**-10


@dataclass
class Shape:
    heads: int
    kv_heads: int
    dim: int
    rope: int


TINY, SMALL, NINE_B, BIG = Shape(4, 2, 32, 16), Shape(3, 3, 64, 64), Shape(16, 4, 256, 64), Shape(24, 4, 256, 64)
WIDE = Shape(8, 1, 128, 32)


class Layer:
    """Random constants and a cache on the device whose unused rows are NaN."""

    def __init__(self, rng: np.random.Generator, shape: Shape, capacity: int, factor: float = 1.0) -> None:
        self.shape, self.capacity = shape, capacity
        self.norms = [rng.uniform(0.5, 1.5, shape.dim).astype(np.float32) for _ in range(2)]
        self.inv_freq = 1e4 ** (-2 * np.arange(shape.rope // 2) / shape.rope)
        self.factor = factor
        q_norm, k_norm = (x.astype(np.float64) for x in self.norms)
        self.oracle = oracle.Layer(shape.heads, shape.kv_heads, q_norm, k_norm, EPS, self.inv_freq, factor)
        self.constants = [*(lib.put(x) for x in self.norms), lib.put(self.inv_freq)]
        self.caches = [lib.DeviceArray((capacity, shape.kv_heads, shape.dim), np.float16) for _ in range(2)]

    def fill(self, rng: np.random.Generator, rows: int) -> None:
        """`rows` random rows in both caches, NaN behind them."""
        values = np.full((2, *self.caches[0].shape), np.nan, np.float16)
        values[:, :rows] = rng.standard_normal((2, rows, *self.caches[0].shape[1:])) * 1.5
        self.caches = [lib.put(x) for x in values]

    def inputs(self, rng: np.random.Generator, t: int) -> list[F32]:
        """query and gate, key, value"""
        s = self.shape
        sizes = (s.heads * 2 * s.dim, s.kv_heads * s.dim, s.kv_heads * s.dim)
        return [rng.standard_normal((t, n)).astype(np.float32) for n in sizes]

    def arguments(self, inputs: list[F32], position: int, flags: int = 0) -> lib.Call:
        """A call, its rope rows already computed."""
        s, t, pairs = self.shape, len(inputs[0]), self.shape.rope // 2
        query, key, value = (lib.put(x) for x in inputs)
        start, y = lib.put(np.array([position], np.int32)), lib.DeviceArray((t, s.heads * s.dim), np.float32)
        cos, sin = (lib.DeviceArray((t, pairs), np.float32) for _ in range(2))
        q_norm, k_norm, inv_freq = self.constants
        rope = (start.ptr, t, inv_freq.ptr, pairs, self.factor, cos.ptr, sin.ptr, flags, None)
        assert lib.kernels().nextn_rope_rows(*rope) == 0
        work = lib.DeviceArray(lib.kernels().nextn_attention_workspace(t, s.heads, s.dim), np.uint8)
        args = lib.Attention(query.ptr, key.ptr, value.ptr, query.shape[1], key.shape[1], q_norm.ptr, k_norm.ptr, EPS)
        args.cos, args.sin, args.position, args.y, args.ld_y = cos.ptr, sin.ptr, start.ptr, y.ptr, y.shape[1]
        args.key_cache, args.value_cache = self.caches[0].ptr, self.caches[1].ptr
        args.t, args.capacity, args.flags = t, self.capacity, flags
        args.heads, args.kv_heads, args.head_dim, args.rope_dim = s.heads, s.kv_heads, s.dim, s.rope
        args.workspace, args.workspace_bytes = work.ptr, work.bytes
        return lib.Call(args, y, (query, key, value, start, cos, sin, work))

    def run(self, inputs: list[F32], position: int, flags: int = 0) -> F32:
        call = self.arguments(inputs, position, flags)
        assert lib.kernels().nextn_attention(ctypes.byref(call.args), None) == 0
        lib.synchronize()
        return call.y.host()

    def cached(self) -> list[NDArray[np.float16]]:
        return [x.host() for x in self.caches]

    def reference(self, inputs: list[F32], position: int) -> tuple[NDArray[np.float64], ...]:
        s, t = self.shape, len(inputs[0])
        keys, values = (x[:position].astype(np.float64) for x in self.cached())
        query = inputs[0].astype(np.float64).reshape(t, s.heads, 2, s.dim)
        key, value = (x.astype(np.float64).reshape(t, s.kv_heads, s.dim) for x in inputs[1:])
        return oracle.run(self.oracle, query, key, value, position, keys, values)


def relative(got: NDArray[np.floating], want: NDArray[np.float64]) -> float:
    assert np.isfinite(got).all()
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("shape", [TINY, SMALL, WIDE, NINE_B, BIG], ids=str)
@pytest.mark.parametrize("t", [1, 4, 8, 9, 70])
@pytest.mark.parametrize("position", [0, 61, 300])
def test_matches_float64_and_appends(rng: np.random.Generator, shape: Shape, t: int, position: int) -> None:
    layer = Layer(rng, shape, capacity=400, factor=1.1386)
    layer.fill(rng, position)
    inputs, before = layer.inputs(rng, t), layer.cached()
    want, keys, values = layer.reference(inputs, position)
    y = layer.run(inputs, position, flags=1)
    assert relative(y, want) < ERROR
    new = slice(position, position + t)
    for cache, old, rows in zip(layer.cached(), before, (keys, values), strict=True):
        np.testing.assert_allclose(cache[new], rows[new], rtol=HALF_STEP, atol=1e-4)
        assert np.array_equal(np.delete(cache, np.r_[new], 0), np.delete(old, np.r_[new], 0), equal_nan=True)


# 4096 and 8192: where the split length changes
@pytest.mark.parametrize("shape", [TINY, NINE_B, BIG], ids=str)
@pytest.mark.parametrize("position", [0, 60, 127, 1000, 4090, 8188, 16384])
def test_does_not_depend_on_t(rng: np.random.Generator, shape: Shape, position: int) -> None:
    layer = Layer(rng, shape, capacity=position + 8)
    layer.fill(rng, position)
    inputs = layer.inputs(rng, 8)
    singles = np.concatenate([layer.run([x[i : i + 1] for x in inputs], position + i) for i in range(8)])
    after = layer.cached()
    for t in range(2, 9):
        y = layer.run([x[:t] for x in inputs], position)
        assert np.array_equal(y, singles[:t]), f"T={t} rounds differently from T=1"
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(after, layer.cached(), strict=True))


@pytest.mark.parametrize("position", [5000, 16380])
@pytest.mark.parametrize("t", [3, 20])
def test_long_contexts(rng: np.random.Generator, position: int, t: int) -> None:
    layer = Layer(rng, NINE_B, capacity=position + t)
    layer.fill(rng, position)
    inputs = layer.inputs(rng, t)
    want, _, _ = layer.reference(inputs, position)
    assert relative(layer.run(inputs, position), want) < ERROR


@pytest.mark.parametrize("t", [3, 12])
def test_rows_beyond_the_capacity_are_nan_and_write_nothing(rng: np.random.Generator, t: int) -> None:
    layer = Layer(rng, TINY, capacity=64)
    layer.fill(rng, 62)
    inputs = layer.inputs(rng, t)
    want, _, _ = layer.reference([x[:2] for x in inputs], 62)
    y = layer.run(inputs, 62)
    layer.cached()  # checks the guard behind the caches
    assert relative(y[:2], want) < ERROR
    assert np.isnan(y[2:]).all()


def test_rope_rows_keep_their_accuracy_at_a_million(rng: np.random.Generator) -> None:
    inv_freq = 1e7 ** (-2 * np.arange(32) / 64)
    position, table = lib.put(np.array([1_000_003], np.int32)), lib.put(inv_freq)
    cos, sin = (lib.DeviceArray((3, 32), np.float32) for _ in range(2))
    assert lib.kernels().nextn_rope_rows(position.ptr, 3, table.ptr, 32, 1.25, cos.ptr, sin.ptr, 0, None) == 0
    angles = (1_000_003 + np.arange(3))[:, None] * inv_freq
    np.testing.assert_allclose(cos.host(), 1.25 * np.cos(angles), rtol=0, atol=2e-7)
    np.testing.assert_allclose(sin.host(), 1.25 * np.sin(angles), rtol=0, atol=2e-7)


@pytest.mark.parametrize("change", [{"head_dim": 48}, {"heads": 3}, {"heads": 18}, {"rope_dim": 34}, {"t": 0}])
def test_refuses_what_it_cannot_do(change: dict[str, int]) -> None:
    args = lib.Attention(t=1, capacity=64, heads=4, kv_heads=2, head_dim=32, rope_dim=16)
    args.ld_query, args.ld_kv, args.ld_y, args.workspace, args.workspace_bytes = 4096, 4096, 4096, 256, 1 << 30
    for key, value in change.items():
        setattr(args, key, value)
    assert lib.kernels().nextn_attention(ctypes.byref(args), None) == lib.INVALID_VALUE
