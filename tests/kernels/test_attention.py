"""Gated attention over an in-place cache against float64, and its independence of the number of tokens."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernels import library as lib
from tests.oracle import attention as oracle
from tests.oracle import int8_rows

pytestmark = pytest.mark.gpu

F32 = NDArray[np.float32]
EPS = 1e-6
ERROR = 1e-3  # f16 queries, weights, and values as they are multiplied
HALF_STEP = 2.0**-10
F16, INT8 = 0, 1  # cache types
# Of int8 rows against exact ones: steps of a 127th of the largest of 64 values.
INT8_ERROR = 1.5e-2
both_caches = pytest.mark.parametrize("cache_type", [F16, INT8], ids=["f16", "int8"])


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

    def __init__(
        self,
        rng: np.random.Generator,
        shape: Shape,
        capacity: int,
        factor: float = 1.0,
        cache_type: int = F16,
    ) -> None:
        self.shape, self.capacity, self.cache_type = shape, capacity, cache_type
        self.norms = [rng.uniform(0.5, 1.5, shape.dim).astype(np.float32) for _ in range(2)]
        self.inv_freq = 1e4 ** (-2 * np.arange(shape.rope // 2) / shape.rope)
        self.factor = factor
        q_norm, k_norm = (x.astype(np.float64) for x in self.norms)
        self.oracle = oracle.Layer(shape.heads, shape.kv_heads, q_norm, k_norm, EPS, self.inv_freq, factor)
        self.constants = [*(lib.put(x) for x in self.norms), lib.put(self.inv_freq)]
        row, dtype = (shape.dim, np.float16) if cache_type == F16 else (shape.dim + 16, np.int8)
        self.caches = [lib.DeviceArray((capacity, shape.kv_heads, row), dtype) for _ in range(2)]

    def fill(self, rng: np.random.Generator, rows: int) -> None:
        """`rows` random rows in both caches, NaN behind them."""
        values = np.full((2, self.capacity, self.shape.kv_heads, self.shape.dim), np.nan, np.float16)
        values[:, :rows] = rng.standard_normal((2, rows, *values.shape[2:])) * 1.5
        self.caches = [lib.put(x if self.cache_type == F16 else int8_rows.encode(x)) for x in values]

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
        args.cache_type = self.cache_type
        args.workspace, args.workspace_bytes = work.ptr, work.bytes
        return lib.Call(args, y, (query, key, value, start, cos, sin, work))

    def run(self, inputs: list[F32], position: int, flags: int = 0) -> F32:
        call = self.arguments(inputs, position, flags)
        assert lib.kernels().nextn_attention(ctypes.byref(call.args), None) == 0
        lib.synchronize()
        return call.y.host()

    def cached(self) -> list[NDArray[np.generic]]:
        """Keys and values as they are kept."""
        return [x.host() for x in self.caches]

    def rows(self, n: int) -> list[NDArray[np.float64]]:
        """The first n keys and values [n, KV, D]."""
        kept = [x[:n] for x in self.cached()]
        return [x.astype(np.float64) if self.cache_type == F16 else int8_rows.decode(x.view(np.int8)) for x in kept]

    def reference(self, inputs: list[F32], position: int) -> tuple[NDArray[np.float64], ...]:
        """y, keys and values in float64, the new rows rounded to int8 in an int8 cache."""
        s, t = self.shape, len(inputs[0])
        keys, values = self.rows(position)
        query = inputs[0].astype(np.float64).reshape(t, s.heads, 2, s.dim)
        key, value = (x.astype(np.float64).reshape(t, s.kv_heads, s.dim) for x in inputs[1:])
        stored = int8_rows.kept if self.cache_type == INT8 else np.asarray
        return oracle.run(self.oracle, query, key, value, position, keys, values, stored)


def relative(got: NDArray[np.floating], want: NDArray[np.float64]) -> float:
    assert np.isfinite(got).all()
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("shape", [TINY, SMALL, WIDE, NINE_B, BIG], ids=str)
@pytest.mark.parametrize("t", [1, 4, 8, 9, 70])
@pytest.mark.parametrize("position", [0, 61, 300])
@both_caches
def test_matches_float64_and_appends(
    rng: np.random.Generator, shape: Shape, t: int, position: int, cache_type: int
) -> None:
    layer = Layer(rng, shape, 400, factor=1.1386, cache_type=cache_type)
    layer.fill(rng, position)
    inputs, before = layer.inputs(rng, t), layer.cached()
    want, keys, values = layer.reference(inputs, position)
    y = layer.run(inputs, position, flags=1)
    assert relative(y, want) < ERROR
    new = slice(position, position + t)
    for cached, rows in zip(layer.rows(position + t), (keys, values), strict=True):
        if cache_type == F16:
            np.testing.assert_allclose(cached[new], rows[new], rtol=HALF_STEP, atol=1e-4)
        else:
            check_int8_rows(cached[new], rows[new])
    for cache, old in zip(layer.cached(), before, strict=True):
        kept = [np.delete(x, np.r_[new], 0).view(np.uint8) for x in (cache, old)]
        assert np.array_equal(*kept), "a row of other tokens changed"


def check_int8_rows(got: NDArray[np.float64], want: NDArray[np.float64]) -> None:
    """The oracle's rows, but for values that lie between two steps within the kernel's float32 error."""
    size = min(int8_rows.GROUP, got.shape[-1])
    step = np.abs(want.reshape(-1, size)).max(axis=-1, keepdims=True) / 127
    off = np.abs(got - want).reshape(-1, size) / step
    assert off.max() < 1.001
    assert (off > 1e-3).sum() <= max(2, off.size // 1000)


@pytest.mark.parametrize("t", [1, 8, 40])
def test_cost_of_int8_rows(rng: np.random.Generator, t: int) -> None:
    """Against a cache that rounds nothing."""
    layer = Layer(rng, NINE_B, 400, cache_type=INT8)
    exact = [rng.standard_normal((300, 4, 256)) * 1.5 for _ in range(2)]
    layer.caches = [lib.put(np.concatenate([int8_rows.encode(x), np.zeros((100, 4, 272), np.int8)])) for x in exact]
    inputs = layer.inputs(rng, t)
    query, key, value = (x.astype(np.float64) for x in inputs)
    shape = (query.reshape(t, 16, 2, 256), key.reshape(t, 4, 256), value.reshape(t, 4, 256))
    want, _, _ = oracle.run(layer.oracle, *shape, 300, *exact)
    error = relative(layer.run(inputs, 300), want)
    print(f"int8 rows: {error:.2e}")
    assert error < INT8_ERROR


# 2048: where blocks begin to take 32 rows; 4096 and 8192: where the split length changes
@pytest.mark.parametrize("shape", [TINY, NINE_B, BIG], ids=str)
@pytest.mark.parametrize("position", [0, 60, 127, 1000, 2044, 4090, 8188, 16384])
@both_caches
def test_does_not_depend_on_t(rng: np.random.Generator, shape: Shape, position: int, cache_type: int) -> None:
    layer = Layer(rng, shape, position + 8, cache_type=cache_type)
    layer.fill(rng, position)
    inputs = layer.inputs(rng, 8)
    singles = np.concatenate([layer.run([x[i : i + 1] for x in inputs], position + i) for i in range(8)])
    after = layer.cached()
    for t in range(2, 9):
        y = layer.run([x[:t] for x in inputs], position)
        assert np.array_equal(y, singles[:t]), f"T={t} rounds differently from T=1"
    assert all(np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in zip(after, layer.cached(), strict=True))


@pytest.mark.parametrize("position", [5000, 16380])
@pytest.mark.parametrize("t", [3, 20])
@both_caches
def test_long_contexts(rng: np.random.Generator, position: int, t: int, cache_type: int) -> None:
    layer = Layer(rng, NINE_B, position + t, cache_type=cache_type)
    layer.fill(rng, position)
    inputs = layer.inputs(rng, t)
    want, _, _ = layer.reference(inputs, position)
    assert relative(layer.run(inputs, position), want) < ERROR


@pytest.mark.parametrize("shape", [TINY, WIDE, NINE_B], ids=str)
@pytest.mark.parametrize("t", [3, 12, 50])
@both_caches
def test_rows_beyond_the_capacity_are_nan_and_write_nothing(
    rng: np.random.Generator, shape: Shape, t: int, cache_type: int
) -> None:
    layer = Layer(rng, shape, 64, cache_type=cache_type)
    layer.fill(rng, 62)
    inputs = layer.inputs(rng, t)
    want, _, _ = layer.reference([x[:2] for x in inputs], 62)
    y = layer.run(inputs, 62)
    layer.cached()  # checks the guard behind the caches
    assert relative(y[:2], want) < ERROR
    assert np.isnan(y[2:]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [1, 2], ids=["key", "value"])
@pytest.mark.parametrize("t", [1, 2, 8, 12])
@both_caches
def test_a_bad_number_stays_one(rng: np.random.Generator, t: int, where: int, bad: float, cache_type: int) -> None:
    """A key or value that is not finite makes its token's result, and later ones', not finite; no earlier one's."""
    layer = Layer(rng, SMALL, 100, cache_type=cache_type)
    layer.fill(rng, 70)
    inputs = layer.inputs(rng, t)
    inputs[where][-1, 5] = bad
    head = slice(0, SMALL.dim)  # of query head 0, which reads kv head 0
    y = layer.run(inputs, 70)
    assert not np.isfinite(y[-1, head]).all()
    after = layer.run(layer.inputs(rng, 1), 70 + t)
    assert not np.isfinite(after[0, head]).all()
    assert np.isfinite(after[0, SMALL.dim :]).all(), "other heads have nothing to do with it"
    if t > 1:
        assert np.array_equal(y[:-1], layer.run([x[:-1] for x in inputs], 70))


@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-30, 1e-6, 1e-4, 3e4])
def test_int8_values_of_any_size(rng: np.random.Generator, scale: float) -> None:
    """Rows of zeros, and values from ones too small for f16 (they become 0) to the largest that fit."""
    layer = Layer(rng, SMALL, 300, cache_type=INT8)
    rows = rng.uniform(-1, 1, (2, 256, 3, 64)).astype(np.float32)
    rows[1] *= np.float32(scale)
    layer.caches = [lib.put(np.concatenate([int8_rows.encode(x), np.zeros((44, 3, 80), np.int8)])) for x in rows]
    inputs = layer.inputs(rng, 2)
    inputs[2] = (rng.uniform(-1, 1, inputs[2].shape) * scale).astype(np.float32)
    want, _, _ = layer.reference(inputs, 256)
    y = layer.run(inputs, 256)
    assert np.isfinite(y).all()
    largest_step_of_f16 = 2.0**-25 if scale < 0.1 else 0.0
    assert np.abs(y - want).max() < ERROR * scale + largest_step_of_f16


def test_rope_rows_keep_their_accuracy_at_a_million(rng: np.random.Generator) -> None:
    inv_freq = 1e7 ** (-2 * np.arange(32) / 64)
    position, table = lib.put(np.array([1_000_003], np.int32)), lib.put(inv_freq)
    cos, sin = (lib.DeviceArray((3, 32), np.float32) for _ in range(2))
    assert lib.kernels().nextn_rope_rows(position.ptr, 3, table.ptr, 32, 1.25, cos.ptr, sin.ptr, 0, None) == 0
    angles = (1_000_003 + np.arange(3))[:, None] * inv_freq
    np.testing.assert_allclose(cos.host(), 1.25 * np.cos(angles), rtol=0, atol=2e-7)
    np.testing.assert_allclose(sin.host(), 1.25 * np.sin(angles), rtol=0, atol=2e-7)


@pytest.mark.parametrize(
    "change", [{"head_dim": 48}, {"heads": 3}, {"heads": 18}, {"rope_dim": 34}, {"t": 0}, {"cache_type": 2}]
)
def test_refuses_what_it_cannot_do(change: dict[str, int]) -> None:
    args = lib.Attention(t=1, capacity=64, heads=4, kv_heads=2, head_dim=32, rope_dim=16)
    args.ld_query, args.ld_kv, args.ld_y, args.workspace, args.workspace_bytes = 4096, 4096, 4096, 256, 1 << 30
    for key, value in change.items():
        setattr(args, key, value)
    assert lib.kernels().nextn_attention(ctypes.byref(args), None) == lib.INVALID_VALUE


def test_bytes_of_a_cache_row() -> None:
    row_bytes = lib.kernels().nextn_cache_row_bytes
    assert [row_bytes(F16, 256), row_bytes(INT8, 256), row_bytes(INT8, 32), row_bytes(2, 256)] == [512, 272, 48, 0]
