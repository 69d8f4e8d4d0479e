"""Token choice on the device: the same tokens as `runtime.sampling.choose`, without copying logits to the host."""

from __future__ import annotations

import ctypes
import math
from ctypes import Structure, c_double, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path

import numpy as np

from engines.errors import EngineError
from plugins.load import KERNELS_NAME
from runtime import noise
from runtime.cuda import Device, DeviceBuffer, Stream, check_launch, has_no_kernel
from runtime.engine import Sampler
from runtime.sampling import ParamsSampler, SamplingParams

_PDL = 1


class _Sampling(Structure):
    """As plugins/kernels/select.h has it."""

    _fields_ = (
        ("temperature", c_double),
        ("least_below", c_double),
        ("top_p", c_double),
        ("seed", c_uint64),
        ("top_k", c_int32),
    )


SAMPLING_NBYTES = ctypes.sizeof(_Sampling)
_TOP_K_MAX = 2**31 - 1  # more than any vocabulary


def device_params(sampler: Sampler) -> SamplingParams | None:
    """The parameters of a sampler that the device can stand in for, else None: one that has to see the logits."""
    return sampler.params if isinstance(sampler, ParamsSampler) else None


def sampling_bytes(params: SamplingParams) -> bytes:
    """What the kernel reads of ``params``."""
    least = float(noise.log(np.array([params.min_p]))[0]) if params.min_p > 0 else -math.inf
    return bytes(_Sampling(params.temperature, least, params.top_p, params.seed, min(params.top_k, _TOP_K_MAX)))


class TokenChoice:
    """The kernel that chooses tokens. Raises EngineError when the library lacks it, or has no code for the GPU."""

    def __init__(self, library: Path, device: Device, stream: Stream, max_rows: int) -> None:
        """``library``: the plugin library, beside which the kernels lie."""
        path = library.with_name(KERNELS_NAME)
        try:
            kernels = ctypes.CDLL(str(path))
            self._workspace_size, self._select = kernels.nextn_select_workspace, kernels.nextn_select
        except (OSError, AttributeError) as error:
            raise EngineError(f"{path}: the kernel library does not load ({error}); build it again") from error
        self._workspace_size.restype = c_size_t
        self._select.argtypes = (
            *(c_void_p, c_int64, c_int32, c_int32, c_void_p, c_void_p, c_void_p, c_int32),
            *(c_void_p, c_void_p, c_size_t, c_int32, c_void_p),
        )
        self._stream = stream
        self._workspace = DeviceBuffer(self._workspace_size(max_rows))
        self._check_gpu(path, device)

    def enqueue(
        self, logits: int, rows: int, count: int, sampling: int, position: int, offset: int, tokens: int, ids: int = 0
    ) -> None:
        """Choose for each of ``rows`` rows; row i's token will stand at place *position + offset + i.

        All but the numbers are device addresses: logits [rows, count] f32, sampling (`sampling_bytes`), position i32,
        tokens [rows] i32, ids [count] i32: the tokens that the logits stand for, ascending (0: token i has logit i)."""
        status = self._launch(logits, rows, count, ids, sampling, position, offset, tokens)
        check_launch(status, "token choice could not be started")

    def _launch(self, logits: int, rows: int, count: int, ids: int, *places: int) -> int:
        """places: as `enqueue` has them, from ``sampling`` to ``tokens``."""
        work = self._workspace
        status: int = self._select(
            *(logits, count, rows, count, ids or None, *places),
            *(work.address, work.nbytes, _PDL, self._stream.handle),
        )
        return status

    def _check_gpu(self, path: Path, device: Device) -> None:
        """A first launch shows whether the library was compiled for this GPU."""
        trial = DeviceBuffer(256)
        self._stream.clear(trial.address, trial.nbytes)
        at = trial.address
        status = self._launch(at, 1, 1, 0, at + 64, at + 128, 0, at + 192)
        if has_no_kernel(status):
            major, minor = device.compute_capability
            raise EngineError(
                f"{path}: holds no kernels for {device}; build it again with -DNEXTN_ARCHITECTURES={major}{minor}-real"
            )
        check_launch(status, f"{path}: a first launch failed")
        self._stream.synchronize()
