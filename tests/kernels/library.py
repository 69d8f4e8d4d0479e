"""The kernel library through ctypes, and device arrays that start poisoned."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[2]
PLACES = (ROOT / "plugins" / "libnextn_kernels.so", ROOT / "build" / "plugins" / "libnextn_kernels.so")
INVALID_VALUE = 1
MAX_MATRICES = 4
POISON = 0xFF  # as float32 a NaN, as int32 -1
# Bytes behind each array that must stay as they are. None for a run under memcheck, which sees accesses outside arrays.
_GUARD = int(os.environ.get("NEXTN_TEST_GUARD", "256"))


def check(result: tuple[Any, ...]) -> Any:
    """Unpack a cuda.bindings result; any error fails the test."""
    status, *values = result
    assert int(status) == 0, f"CUDA error {status!r}"
    return values[0] if len(values) == 1 else tuple(values)


def runtime() -> Any:
    from cuda.bindings import runtime as cudart

    return cudart


class Matrix(Structure):
    _fields_ = (("weight", c_void_p), ("type", c_int32), ("n", c_int32), ("y", c_void_p), ("ldy", c_int64))


class Matmul(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("ldx", c_int64),
        ("t", c_int32),
        ("k", c_int32),
        ("norm_weight", c_void_p),
        ("norm_eps", c_float),
        ("residual", c_void_p),
        ("ldr", c_int64),
        ("swiglu", c_int32),
        ("n_matrices", c_int32),
        ("matrix", Matrix * MAX_MATRICES),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
        ("flags", c_int32),
    )


class GatedDeltaNet(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("qkv", "z", "alpha", "beta")),
        *((name, c_int64) for name in ("ld_qkv", "ld_z", "ld_gate")),
        *((name, c_void_p) for name in ("conv_weight", "a", "dt_bias", "norm_weight")),
        ("eps", c_float),
        *((name, c_void_p) for name in ("conv_pool", "state_pool", "slot", "y")),
        ("ld_y", c_int64),
        *((name, c_int32) for name in ("t", "slots", "k_heads", "v_heads", "head_dim", "conv_kernel")),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
        ("flags", c_int32),
    )


class Attention(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("query_gate", "key", "value")),
        *((name, c_int64) for name in ("ld_query", "ld_kv")),
        *((name, c_void_p) for name in ("q_norm", "k_norm")),
        ("eps", c_float),
        *((name, c_void_p) for name in ("cos", "sin", "position", "key_cache", "value_cache", "y")),
        ("ld_y", c_int64),
        *((name, c_int32) for name in ("t", "capacity", "heads", "kv_heads", "head_dim", "rope_dim", "cache_type")),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
        ("flags", c_int32),
    )


class LayerMatrix(Structure):
    _fields_ = (("weight", c_void_p), ("type", c_int32), ("n", c_int32))


class DecoderLayer(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("y", c_void_p),
        ("t", c_int32),
        ("d", c_int32),
        ("eps", c_float),
        ("mixer_norm", c_void_p),
        ("ffn_norm", c_void_p),
        ("input", LayerMatrix * 4),
        ("inputs", c_int32),
        *((name, LayerMatrix) for name in ("output", "gate", "up", "down")),
        ("delta_net", GatedDeltaNet),
        ("attention", Attention),
        ("sync", c_void_p),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
        ("flags", c_int32),
    )


class Sampling(Structure):
    _fields_ = (
        *((name, c_double) for name in ("temperature", "least_below", "top_p")),
        ("seed", c_uint64),
        ("top_k", c_int32),
    )


@cache
def kernels() -> ctypes.CDLL:
    """The library; a missing one fails the test, it never skips."""
    path = next((p for p in PLACES if p.exists()), None)
    assert path, f"kernel library not built: none of {[str(p) for p in PLACES]}; run cmake -S plugins -B build/plugins"
    lib = ctypes.CDLL(str(path))
    lib.nextn_matmul_workspace.restype = c_size_t
    lib.nextn_matmul.argtypes = (POINTER(Matmul), c_void_p)
    lib.nextn_embedding.argtypes = (
        *(c_void_p, c_int32, c_int32, c_int32),
        *(c_void_p, c_int32, c_void_p, c_int64, c_int32, c_void_p),
    )
    lib.nextn_gated_delta_net_workspace.restype = lib.nextn_attention_workspace.restype = c_size_t
    lib.nextn_cache_row_bytes.restype = c_size_t
    lib.nextn_gated_delta_net.argtypes = (POINTER(GatedDeltaNet), c_void_p)
    lib.nextn_gated_delta_net_settle.argtypes = (c_void_p, c_void_p, c_int32, c_int32, c_int32, c_int64, c_void_p)
    lib.nextn_attention.argtypes = (POINTER(Attention), c_void_p)
    lib.nextn_rope_rows.argtypes = (
        *(c_void_p, c_int32, c_void_p, c_int32, c_float),
        *(c_void_p, c_void_p, c_int32, c_void_p),
    )
    lib.nextn_rms_norm.argtypes = (
        *(c_void_p, c_int64, c_int32, c_int32, c_void_p, c_float),
        *(c_void_p, c_int64, c_int32, c_void_p),
    )
    lib.nextn_rms_norm_rows.argtypes = (
        *(c_void_p, c_int64, c_int32, c_int32, c_void_p, c_float),
        *(c_void_p, c_void_p, c_int32, c_void_p, c_int32, c_void_p),
    )
    lib.nextn_rms_norm_pair.argtypes = (
        *(c_void_p, c_int32, c_void_p, c_void_p, c_int32, c_void_p),
        *(c_int32, c_float, c_void_p, c_int32, c_void_p),
    )
    lib.nextn_layer_workspace.restype = c_size_t
    lib.nextn_layer_workspace.argtypes = (POINTER(DecoderLayer),)
    lib.nextn_layer.argtypes = (POINTER(DecoderLayer), c_void_p)
    lib.nextn_select_workspace.restype = c_size_t
    lib.nextn_select.argtypes = (
        *(c_void_p, c_int64, c_int32, c_int32, c_void_p, c_void_p, c_void_p, c_int32),
        *(c_void_p, c_void_p, c_size_t, c_int32, c_void_p),
    )
    lib.nextn_read.argtypes = (c_void_p, c_size_t, c_void_p, c_void_p)
    return lib


class DeviceArray:
    """A device allocation with a shape, poisoned at first, with a guard behind it that `host` checks."""

    def __init__(self, shape: tuple[int, ...] | int, dtype: Any, offset: int = 0) -> None:
        self.shape, self.dtype = np.empty(shape, np.void).shape, np.dtype(dtype)
        self.bytes = int(np.prod(self.shape)) * self.dtype.itemsize
        # Weights may be read up to the next multiple of 16.
        whole = -(-(self.bytes + offset) // 16) * 16 + _GUARD
        self._base = check(runtime().cudaMalloc(whole))
        self.ptr = self._base + offset
        self._free = runtime().cudaFree
        check(runtime().cudaMemset(self._base, POISON, whole))

    def __del__(self) -> None:
        self._free(self._base)

    def poison(self) -> None:
        self.fill(POISON)

    def fill(self, value: int) -> None:
        """Every byte."""
        check(runtime().cudaMemset(self.ptr, value, self.bytes))

    def copy(self) -> DeviceArray:
        """On the device."""
        out = DeviceArray(self.shape, self.dtype)
        kind = runtime().cudaMemcpyKind.cudaMemcpyDeviceToDevice
        check(runtime().cudaMemcpy(out.ptr, self.ptr, self.bytes, kind))
        return out

    def host(self) -> NDArray[Any]:
        out = np.empty(self.bytes + _GUARD, np.uint8)
        kind = runtime().cudaMemcpyKind.cudaMemcpyDeviceToHost
        check(runtime().cudaMemcpy(out.ctypes.data, self.ptr, out.nbytes, kind))
        assert (out[self.bytes :] == POISON).all(), "a kernel wrote behind its output"
        return out[: self.bytes].view(self.dtype).reshape(self.shape)


@dataclass
class Call:
    """Arguments ready to launch, their output, and the device arrays they point to."""

    args: Any
    y: DeviceArray
    inputs: tuple[DeviceArray, ...]


def put(array: NDArray[Any]) -> DeviceArray:
    """Copy to the device."""
    source = np.ascontiguousarray(array)
    out = DeviceArray(source.shape, source.dtype)
    kind = runtime().cudaMemcpyKind.cudaMemcpyHostToDevice
    check(runtime().cudaMemcpy(out.ptr, source.ctypes.data, source.nbytes, kind))
    return out


def synchronize() -> None:
    check(runtime().cudaDeviceSynchronize())


@contextmanager
def streams(count: int) -> Iterator[list[int]]:
    """Streams beside each other, begun when all else is done; what is on them is done when the block ends."""
    cudart = runtime()
    synchronize()
    made = [check(cudart.cudaStreamCreateWithFlags(cudart.cudaStreamNonBlocking)) for _ in range(count)]
    try:
        yield [int(each) for each in made]
    finally:
        for each in made:
            check(cudart.cudaStreamSynchronize(each))
            check(cudart.cudaStreamDestroy(each))


def poison_shared_memory() -> None:
    """Leave NaN in all shared memory, so that a kernel that reads what it did not write fails."""
    occupy(None, 1)
    synchronize()


def occupy(stream: int | None, times: int) -> None:
    """Queue work for all multiprocessors, tens of microseconds each time: a prefill matmul on rows of NaN, which fills
    its tiles in shared memory with them."""
    args, _ = _nan_matmul()
    for _ in range(times):
        assert kernels().nextn_matmul(ctypes.byref(args), stream) == 0


@cache
def _nan_matmul() -> tuple[Matmul, list[DeviceArray]]:
    t, k, n, q4_k = 256, 1024, 16896, 12
    x, y = put(np.full((t, k), np.nan, np.float32)), DeviceArray((t, n), np.float32)
    weight = put(np.zeros((n, k // 256 * 144), np.uint8))
    work = DeviceArray(kernels().nextn_matmul_workspace(t, k), np.uint8)
    args = Matmul(x=x.ptr, ldx=k, t=t, k=k, n_matrices=1)
    args.matrix[0] = Matrix(weight.ptr, q4_k, n, y.ptr, n)
    args.workspace, args.workspace_bytes = work.ptr, work.bytes
    return args, [x, y, weight, work]
