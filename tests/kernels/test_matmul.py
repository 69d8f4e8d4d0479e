"""Matmul over GGUF blocks against float64, and its independence of the number of tokens."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernels import library as lib
from tests.oracle import kquant

pytestmark = pytest.mark.gpu

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
EPS = 1e-6
# int8 hi/lo activations with one scale per 256 values, and f16 activations of prefill, both about 2e-4 on such inputs
KQUANT_ERROR = 3e-4
# an outlier sets the step of its whole superblock; a short row does not average that out
SHORT_ROW_ERROR = 6e-4
FLOAT_ERROR = 2e-6  # plain float32 sums
K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")
FLOATS = ("F32", "F16", "BF16", "Q8_0")


@dataclass
class Weights:
    """n rows of k values on the host and the device."""

    name: str
    rows: NDArray[np.uint8]
    k: int

    def __post_init__(self) -> None:
        self.device = lib.put(self.rows)

    @property
    def n(self) -> int:
        return len(self.rows)

    def times(self, x: F64) -> F64:
        return x @ kquant.values_of(self.name, self.rows, self.k).astype(np.float64).T


def random_weights(rng: np.random.Generator, name: str, n: int, k: int) -> Weights:
    return Weights(name, kquant.random_rows(rng, name, n, k), k)


def activations(rng: np.random.Generator, t: int, k: int) -> F32:
    """Gaussian rows with log-normal channel scales and a few outlier channels, as trained models have."""
    scale = rng.lognormal(0.0, 0.6, k)
    scale[rng.integers(0, k, max(1, k // 200))] *= 15
    return (rng.standard_normal((t, k)) * scale).astype(np.float32)


def rms_norm(x: F64, weight: F64) -> F64:
    return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + EPS) * weight


def silu(x: F64) -> F64:
    return x / (1 + np.exp(-x))


def relative(got: NDArray[np.floating], want: F64) -> float:
    assert np.isfinite(got).all(), "not finite (NaN may be an output never written)"
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def matmul(
    x: F32,
    weights: list[Weights],
    norm: F32 | None = None,
    residual: F32 | None = None,
    swiglu: bool = False,
    pad: int = 0,
    flags: int = 0,
) -> list[F32]:
    """Run the kernel on poisoned outputs with `pad` columns that must stay untouched."""
    t, k = x.shape
    device_x, device_norm = lib.put(x), None if norm is None else lib.put(norm)
    outputs = [lib.DeviceArray((t, w.n + pad), np.float32) for w in (weights[:1] if swiglu else weights)]
    work = lib.DeviceArray(lib.kernels().nextn_matmul_workspace(t, k), np.uint8)
    args = lib.Matmul(x=device_x.ptr, ldx=k, t=t, k=k, n_matrices=len(weights), swiglu=swiglu, flags=flags)
    args.workspace, args.workspace_bytes, args.norm_eps = work.ptr, work.bytes, EPS
    if device_norm:
        args.norm_weight = device_norm.ptr
    if residual is not None:
        device_residual = lib.put(residual)
        args.residual, args.ldr = device_residual.ptr, residual.shape[1]
    for i, w in enumerate(weights):
        y = outputs[min(i, len(outputs) - 1)]
        args.matrix[i] = lib.Matrix(w.device.ptr, kquant.TYPES[w.name].id, w.n, y.ptr, w.n + pad)
    assert lib.kernels().nextn_matmul(ctypes.byref(args), None) == 0
    lib.synchronize()
    whole = [y.host() for y in outputs]
    assert all(np.isnan(y[:, y.shape[1] - pad :]).all() for y in whole if pad)
    return [y[:, : y.shape[1] - pad] for y in whole]


def error_bound(name: str, k: int = 4096) -> float:
    if name not in K_QUANTS:
        return FLOAT_ERROR
    return KQUANT_ERROR if k >= 2048 else SHORT_ROW_ERROR


# rows not a multiple of 16; 1, 2, 4, 10, 14, 16, 20, 36, 48, 68 superblocks: one chunk, several, and a ragged last one
SHAPES = [(16, 256), (33, 512), (100, 1024), (7, 2560), (130, 3584), (300, 4096), (50, 5120), (40, 9216), (64, 12288)]


@pytest.mark.parametrize("name", K_QUANTS + FLOATS)
@pytest.mark.parametrize(("n", "k"), [*SHAPES, (48, 17408)])
def test_matches_float64_and_does_not_depend_on_t(rng: np.random.Generator, name: str, n: int, k: int) -> None:
    weights, x = random_weights(rng, name, n, k), activations(rng, 8, k)
    singles = [matmul(x[i : i + 1], [weights], pad=3)[0][0] for i in range(8)]
    assert relative(np.stack(singles), weights.times(x.astype(np.float64))) < error_bound(name, k)
    for t in range(2, 9):
        (y,) = matmul(x[:t], [weights], pad=3)
        assert np.array_equal(y, np.stack(singles[:t])), f"T={t} rounds differently from T=1"


@pytest.mark.parametrize(
    ("name", "n", "k"),
    [
        ("Q4_K", 24576, 4096),
        ("Q4_K", 4096, 12288),
        ("Q6_K", 4096, 12288),
        ("Q6_K", 8192, 4096),
        ("Q5_K", 8192, 4096),
        ("Q8_0", 4096, 8192),
        ("BF16", 4096, 8192),
    ],
)
@pytest.mark.parametrize("t", [1, 4, 7, 200])
def test_real_shapes(rng: np.random.Generator, name: str, n: int, k: int, t: int) -> None:
    weights, x = random_weights(rng, name, n, k), activations(rng, t, k)
    (y,) = matmul(x, [weights], flags=1)
    assert relative(y, weights.times(x.astype(np.float64))) < error_bound(name)


@pytest.mark.parametrize(
    ("name", "k"), [("Q4_K", 2048), ("Q5_K", 4096), ("Q6_K", 4096), ("Q4_K", 8192), ("Q6_K", 6144)]
)
@pytest.mark.parametrize("swiglu", [False, True], ids=["", "swiglu"])
def test_large_matrices(rng: np.random.Generator, name: str, k: int, swiglu: bool) -> None:
    """An LM head, say: every block has many tiles. Rows of the last tile are short."""
    n = 17001
    x, norm = activations(rng, 8, k), rng.uniform(0.5, 1.5, k).astype(np.float32)
    rows = kquant.random_rows(rng, name, 64, k)
    weights = [Weights(name, np.tile(rows, (n // 64 + 1, 1))[:n], k) for _ in range(1 + swiglu)]
    singles = [matmul(x[i : i + 1], weights, norm=norm, swiglu=swiglu, pad=3, flags=1)[0][0] for i in range(8)]
    want = weights[0].times(rms_norm(x.astype(np.float64), norm.astype(np.float64)))
    assert relative(np.stack(singles), silu(want) * want if swiglu else want) < 3 * error_bound(name, k)
    for t in range(2, 9):
        (y,) = matmul(x[:t], weights, norm=norm, swiglu=swiglu, pad=3, flags=1)
        assert np.array_equal(y, np.stack(singles[:t])), f"T={t} rounds differently from T=1"


@pytest.mark.parametrize("t", [1, 3, 8, 9, 40])
def test_norm_and_several_matrices_of_mixed_types(rng: np.random.Generator, t: int) -> None:
    k = 1024
    x, norm = activations(rng, t, k), rng.uniform(0.5, 1.5, k).astype(np.float32)
    weights = [random_weights(rng, name, n, k) for name, n in (("Q6_K", 50), ("Q4_K", 33), ("Q4_K", 160), ("F32", 6))]
    want = rms_norm(x.astype(np.float64), norm.astype(np.float64))
    for y, w in zip(matmul(x, weights, norm=norm, pad=1), weights, strict=True):
        assert relative(y, w.times(want)) < error_bound(w.name, k)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "BF16"])
@pytest.mark.parametrize("t", [1, 5, 30])
def test_swiglu(rng: np.random.Generator, name: str, t: int) -> None:
    n, k = 200, 2048
    x, norm = activations(rng, t, k), rng.uniform(0.5, 1.5, k).astype(np.float32)
    gate, up = random_weights(rng, name, n, k), random_weights(rng, name, n, k)
    normed = rms_norm(x.astype(np.float64), norm.astype(np.float64))
    (y,) = matmul(x, [gate, up], norm=norm, swiglu=True, pad=2)
    assert relative(y, silu(gate.times(normed)) * up.times(normed)) < 3 * error_bound(name)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "F16"])
@pytest.mark.parametrize("t", [1, 6, 150])
def test_residual(rng: np.random.Generator, name: str, t: int) -> None:
    n, k = 77, 1536
    weights, x = random_weights(rng, name, n, k), activations(rng, t, k)
    residual = rng.standard_normal((t, n)).astype(np.float32)
    (y,) = matmul(x, [weights], residual=residual)
    product = weights.times(x.astype(np.float64))
    assert relative(y, residual + product) < error_bound(name, k)


@pytest.mark.parametrize("name", K_QUANTS)
@pytest.mark.parametrize("t", [9, 127, 300])
@pytest.mark.parametrize(("n", "k"), [(17, 256), (129, 768), (300, 2560)])
def test_prefill(rng: np.random.Generator, name: str, t: int, n: int, k: int) -> None:
    weights, x = random_weights(rng, name, n, k), activations(rng, t, k)
    x *= rng.lognormal(0, 3, (t, 1)).astype(np.float32)  # rows of very different size, beyond the range of f16
    (y,) = matmul(x, [weights], pad=1)
    want = weights.times(x.astype(np.float64))
    size = np.linalg.norm(want, axis=1, keepdims=True)
    assert relative(y / size, want / size) < error_bound(name, k)


@pytest.mark.parametrize("name", K_QUANTS)
@pytest.mark.parametrize(("t", "n"), [(520, 8448), (300, 4000)])  # tiles of 256 and of 128 tokens on an H200
def test_prefill_of_many_tokens(rng: np.random.Generator, name: str, t: int, n: int) -> None:
    k = 2048
    weights, x = random_weights(rng, name, n, k), activations(rng, t, k)
    (y,) = matmul(x, [weights], flags=1)
    assert relative(y, weights.times(x.astype(np.float64))) < error_bound(name, k)


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K"])
@pytest.mark.parametrize(("d", "dmin"), [(0.0, 1e-3), (1e-6, 1e-2), (1e-3, 0.0), (0.0, 0.0), (-1e-3, -1e-3)])
def test_prefill_of_superblocks_with_odd_scales(rng: np.random.Generator, name: str, d: float, dmin: float) -> None:
    """Every other superblock has these; a row's sums go through all of them."""
    k = 1024
    rows = kquant.random_rows(rng, name, 40, k)
    blocks = rows.reshape(40, k // 256, -1)
    blocks[:, 1::2, :4] = np.array([d, dmin], np.float16).view(np.uint8)
    weights, x = Weights(name, rows, k), activations(rng, 30, k)
    (y,) = matmul(x, [weights])
    assert relative(y, weights.times(x.astype(np.float64))) < error_bound(name, k)


@pytest.mark.parametrize("name", K_QUANTS)
@pytest.mark.parametrize("t", [1, 5, 12])
def test_one_hot_rows_return_single_weights(rng: np.random.Generator, name: str, t: int) -> None:
    """Layout errors show as wrong single weights, apart from errors of accumulation."""
    k = 768
    weights = random_weights(rng, name, 21, k)
    x = np.zeros((t, k), np.float32)
    picks = rng.choice(k, t, replace=False)
    x[np.arange(t), picks] = 1.0
    (y,) = matmul(x, [weights])
    # prefill holds sc * q of Q6_K in f16, which rounds it beyond 2048
    rounding = 2.0**-11 if name == "Q6_K" and t > 8 else 0.0
    np.testing.assert_allclose(y, kquant.values_of(name, weights.rows, k)[:, picks].T, rtol=rounding, atol=2e-6)


@pytest.mark.parametrize("t", [1, 8, 20])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_value_reaches_its_row_and_no_other(rng: np.random.Generator, t: int, bad: float) -> None:
    weights, x = random_weights(rng, "Q4_K", 40, 512), activations(rng, t, 512)
    x[t // 2, 100] = bad
    device = [lib.put(x)]
    y = lib.DeviceArray((t, 40), np.float32)
    work = lib.DeviceArray(lib.kernels().nextn_matmul_workspace(t, 512), np.uint8)
    args = lib.Matmul(x=device[0].ptr, ldx=512, t=t, k=512, n_matrices=1)
    args.workspace, args.workspace_bytes = work.ptr, work.bytes
    args.matrix[0] = lib.Matrix(weights.device.ptr, kquant.TYPES["Q4_K"].id, 40, y.ptr, 40)
    assert lib.kernels().nextn_matmul(ctypes.byref(args), None) == 0
    lib.synchronize()
    finite = np.isfinite(y.host())
    assert not finite[t // 2].any()
    assert np.delete(finite, t // 2, axis=0).all()


def test_refuses_what_it_cannot_do(rng: np.random.Generator) -> None:
    weights = random_weights(rng, "Q4_K", 16, 256)
    x, y = lib.put(activations(rng, 1, 256)), lib.DeviceArray((1, 16), np.float32)
    work = lib.DeviceArray(lib.kernels().nextn_matmul_workspace(1, 256), np.uint8)

    def status(**changes: int) -> int:
        args = lib.Matmul(x=x.ptr, ldx=256, t=1, k=256, n_matrices=1)
        args.workspace, args.workspace_bytes = work.ptr, work.bytes
        args.matrix[0] = lib.Matrix(weights.device.ptr, 12, 16, y.ptr, 16)
        for key, value in changes.items():
            setattr(args.matrix[0] if key in ("type", "n", "ldy", "weight") else args, key, value)
        return lib.kernels().nextn_matmul(ctypes.byref(args), None)

    assert status() == 0
    bad = [{"t": 0}, {"k": 128}, {"type": 2}, {"n": 0}, {"ldy": 15}, {"workspace_bytes": 8}, {"n_matrices": 5}]
    bad += [{"swiglu": 1}, {"weight": weights.device.ptr + 2}, {"x": 0}, {"ldx": 255}]
    for changes in bad:
        assert status(**changes) == lib.INVALID_VALUE, changes
    lib.synchronize()


@pytest.mark.parametrize("name", tuple(kquant.TYPES))
def test_embedding_is_bit_equal_to_the_format(rng: np.random.Generator, name: str) -> None:
    n, k = 37, 768
    rows = kquant.random_rows(rng, name, n, k)
    tokens = np.array([0, n - 1, 5, 5, n, -1], np.int32)
    table, ids, y = lib.put(rows), lib.put(tokens), lib.DeviceArray((len(tokens), k), np.float32)
    args = (table.ptr, kquant.TYPES[name].id, n, k, ids.ptr, len(tokens), y.ptr, k, 0, None)
    assert lib.kernels().nextn_embedding(*args) == 0
    got, want = y.host(), kquant.values_of(name, rows, k)
    assert np.array_equal(got[:4], want[tokens[:4]])
    assert np.isnan(got[4:]).all(), "an id outside the table must not look like a token"
