"""Times of single kernels: `python -m tests.bench.kernels`.   Prints microseconds and GB/s of weights.

Each number is the median over replays of a CUDA graph that holds a run of launches over rotating copies of the
weights (at least 600 MB, so that none comes from the cache), divided by the launches.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from runtime.sampling import SamplingParams
from tests.kernels import library as lib
from tests.kernels.test_attention import F16, INT8, NINE_B, Layer
from tests.kernels.test_gated_delta_net import Net, Shape
from tests.kernels.test_select import VOCAB, Selection
from tests.oracle import int8_rows, kquant

SHAPES = (
    ("Q4_K", 8192, 4096),
    ("Q4_K", 4096, 4096),
    ("Q4_K", 24576, 4096),
    ("Q4_K", 4096, 12288),
    ("Q4_K", 1024, 4096),
    ("Q6_K", 8192, 4096),
    ("Q6_K", 4096, 12288),
    ("Q6_K", 1024, 4096),
    ("Q6_K", 248320, 4096),
)
COPY_BYTES, REPLAYS, MAX_COPIES, WARM_UP_S = 600 << 20, 9, 60, 0.15


def graph_time(launch: Callable[[int, int], None], launches: int) -> float:
    """Microseconds per launch; `launch(i, stream)` queues launch i."""
    rt = lib.runtime()
    stream = lib.check(rt.cudaStreamCreate())
    lib.check(rt.cudaStreamBeginCapture(stream, rt.cudaStreamCaptureMode.cudaStreamCaptureModeGlobal))
    for i in range(launches):
        launch(i, int(stream))
    graph = lib.check(rt.cudaGraphInstantiate(lib.check(rt.cudaStreamEndCapture(stream)), 0))
    begin, end = lib.check(rt.cudaEventCreate()), lib.check(rt.cudaEventCreate())
    lib.check(rt.cudaGraphLaunch(graph, stream))
    lib.check(rt.cudaStreamSynchronize(stream))
    started = time.perf_counter()
    while time.perf_counter() - started < WARM_UP_S:  # clocks fall while the host prepares data
        for _ in range(8):
            lib.check(rt.cudaGraphLaunch(graph, stream))
        lib.check(rt.cudaStreamSynchronize(stream))
    times = []
    for _ in range(REPLAYS):
        lib.check(rt.cudaEventRecord(begin, stream))
        lib.check(rt.cudaGraphLaunch(graph, stream))
        lib.check(rt.cudaEventRecord(end, stream))
        lib.check(rt.cudaStreamSynchronize(stream))
        times.append(lib.check(rt.cudaEventElapsedTime(begin, end)))
    return 1000 * statistics.median(times) / launches


def matmul_time(name: str, n: int, k: int, t: int, flags: int) -> tuple[float, float]:
    """(microseconds, GB/s) of one matrix, activations quantised in the call."""
    rng = np.random.default_rng(0)
    rows = kquant.random_rows(rng, name, min(n, 256), k)
    one = np.tile(rows, (-(-n // len(rows)), 1))[:n]
    copies = max(1, min(MAX_COPIES, COPY_BYTES // one.nbytes + 1))
    weights = [lib.put(one) for _ in range(copies)]
    x = lib.put(rng.standard_normal((t, k)).astype(np.float32))
    y = lib.DeviceArray((t, n), np.float32)
    work = lib.DeviceArray(lib.kernels().nextn_matmul_workspace(t, k), np.uint8)
    args = lib.Matmul(x=x.ptr, ldx=k, t=t, k=k, n_matrices=1, flags=flags)
    args.workspace, args.workspace_bytes = work.ptr, work.bytes

    def launch(i: int, stream: int) -> None:
        args.matrix[0] = lib.Matrix(weights[i % copies].ptr, kquant.TYPES[name].id, n, y.ptr, n)
        assert lib.kernels().nextn_matmul(ctypes.byref(args), ctypes.c_void_p(stream)) == 0

    us = graph_time(launch, max(copies, 12))
    return us, one.nbytes / us / 1000


def delta_net_time(t: int) -> float:
    """Microseconds of conv + Gated DeltaNet of the 9B geometry, over rotating layers."""
    rng = np.random.default_rng(0)
    nets = [Net(rng, Shape(16, 32, 128, slots=8)) for _ in range(24 if t <= 8 else 4)]
    calls = [net.arguments(net.inputs(rng, t), slot=-1, flags=1) for net in nets]
    for call in calls:  # fill the slots, then start from slot 0
        assert lib.kernels().nextn_gated_delta_net(ctypes.byref(call.args), None) == 0
    zero = lib.put(np.zeros(1, np.int32))
    for call in calls:
        call.args.slot = zero.ptr

    def launch(i: int, stream: int) -> None:
        args = calls[i % len(calls)].args
        assert lib.kernels().nextn_gated_delta_net(ctypes.byref(args), ctypes.c_void_p(stream)) == 0

    return graph_time(launch, 48 if t <= 8 else 8)


def attention_times(position: int, tokens: tuple[int, ...], cache_type: int) -> list[float]:
    """Microseconds of gated attention of the 9B geometry at each T, over rotating layers."""
    rng = np.random.default_rng(0)
    capacity = position + max(tokens)
    some = (rng.standard_normal((512, 4, 256)) * 1.5).astype(np.float16)
    some = some if cache_type == F16 else int8_rows.encode(some)
    rows = np.tile(some, (-(-capacity // 512), 1, 1))[:capacity]
    layers = [Layer(rng, NINE_B, 8, cache_type=cache_type) for _ in range(8)]
    for layer in layers:
        layer.capacity, layer.caches = capacity, [lib.put(rows) for _ in range(2)]

    def time_of(t: int) -> float:
        calls = [layer.arguments(layer.inputs(rng, t), position, flags=1) for layer in layers]

        def launch(i: int, stream: int) -> None:
            args = calls[i % len(calls)].args
            assert lib.kernels().nextn_attention(ctypes.byref(args), ctypes.c_void_p(stream)) == 0

        return graph_time(launch, 48 if t <= 8 else 8)

    return [time_of(t) for t in tokens]


SETTINGS = {
    "greedy": SamplingParams(),
    "temperature 0.8": SamplingParams(0.8, seed=1),
    "min-p 0.05": SamplingParams(0.8, min_p=0.05, seed=1),
    "top-k 20": SamplingParams(0.8, 20, seed=1),
    "top-k 500": SamplingParams(0.8, 500, seed=1),
    "top-p 0.95": SamplingParams(0.8, top_p=0.95, seed=1),
    "top-k 20, top-p 0.95": SamplingParams(0.8, 20, 0.95, seed=1),
    "top-k 40, top-p 0.95, min-p 0.05": SamplingParams(0.8, 40, 0.95, 0.05, seed=1),
}


def text_like_logits(rng: np.random.Generator, rows: int) -> np.ndarray:
    """[rows, VOCAB] f32: a bell of width 2.5, above which a few dozen tokens stand out, the best 8 above the bell's
    end."""
    logits = rng.standard_normal((rows, VOCAB)) * 2.5
    for row in logits:
        row[rng.integers(0, VOCAB, 60)] = 19.0 - np.sort(rng.exponential(3.0, 60))
    return np.asarray(logits, np.float32)


def select_time(params: SamplingParams, rows: int, copies: int = 4) -> float:
    """Microseconds of one token choice, over rotating logits that lie in the cache, as after the product."""
    rng = np.random.default_rng(0)
    calls = [Selection(text_like_logits(rng, rows)) for _ in range(copies)]
    for i, call in enumerate(calls):
        call.write(1000 * i, params)

    def launch(i: int, stream: int) -> None:
        assert calls[i % copies].launch(stream) == 0

    return graph_time(launch, 40)


def main() -> None:
    rt: Any = lib.runtime()
    props = lib.check(rt.cudaGetDeviceProperties(0))
    print(f"device {props.name.decode()}, driver {lib.check(rt.cudaDriverGetVersion())}")
    print("matmul, us (GB/s of weights), activations quantised in the same call; PDL on except the last column")
    print(
        f"{'matrix':24s}" + "".join(f"{'T=' + str(t):>16s}" for t in (1, 4, 8)) + f"{'T=1, no PDL':>16s}{'T=512':>16s}"
    )
    for name, n, k in SHAPES:
        cells = [matmul_time(name, n, k, t, 1) for t in (1, 4, 8)] + [matmul_time(name, n, k, 1, 0)]
        row = f"{name + f' {n}x{k}':24s}" + "".join(f"{us:8.2f} ({gbs:5.0f})" for us, gbs in cells)
        us, _ = matmul_time(name, n, k, 512, 0) if n < 100000 else (float("nan"), 0.0)
        print(f"{row}{us:9.1f} {2e-6 * 512 * n * k / us:4.0f}TF", flush=True)
    for t in (1, 4, 8, 512):
        print(f"GDN 32 heads x 128, T={t}: {delta_net_time(t):.2f} us")
    tokens = (1, 4, 8, 512)
    for position in (1000, 16384, 32768):
        for name, cache_type in (("f16", F16), ("int8", INT8)):
            times = zip(tokens, attention_times(position, tokens, cache_type), strict=True)
            cells = ", ".join(f"T={t} {us:.2f}" for t, us in times)
            print(f"attention 16/4 x 256, context {position}, {name} cache: {cells} us")
    for name, params in SETTINGS.items():
        cells = ", ".join(f"{rows} rows {select_time(params, rows):.2f}" for rows in (1, 4, 8))
        print(f"token choice of {VOCAB}, {name}: {cells} us")


if __name__ == "__main__":
    main()
