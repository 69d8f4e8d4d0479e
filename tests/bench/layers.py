"""Times of whole decoder layers: `python -m tests.bench.layers`.   Microseconds a layer, 9B geometry.

A CUDA graph of layers one after the other, weights rotating over at least 1 GB. ``--trace``, of a library compiled with
-DNEXTN_LAYER_TRACE: clocks that the persistent kernel spends between its points, mean (least, most) of the blocks."""

from __future__ import annotations

import ctypes
import sys

import numpy as np

from tests.bench.kernels import graph_time
from tests.kernels import library as lib
from tests.kernels.decoder_layer import PDL, POSITION, SEPARATE, SYNC_BYTES, RandomLayer
from tests.kernels.test_gated_delta_net import Shape as NetShape
from tests.kernels.test_layer import ATTENTION, TYPES, Shape

NINE_B = Shape(4096, 12288, NetShape(16, 32, 128, slots=8))
LAYERS, REPEATS = 8, 3
BLOCKS = 132
PHASES = ("input", "output", "gate/up", "down")
# Points of the trace in the order they are reached, each with what came before it. 5 k + 2: phase k has its rows (up to
# four tokens); 3: quantised (of more than four only the first); 4: operands ready (not of two to four); 5: product
# done. 6: what the rest writes is clear, barrier passed (more than four tokens).
POINTS = [(0, ""), (1, "predecessor")]
for _k, _phase in enumerate(PHASES):
    POINTS += [
        (5 * _k + 2 + i, f"{_phase} {part}") for i, part in enumerate(["rows", "quantising", "operands", "product"])
    ]
POINTS = [*POINTS[:6], (6, "clearing"), (22, "delta net"), *POINTS[6:]]
TRACED = 24  # clocks a block


def layer_time(layers: list[RandomLayer], t: int, flags: int) -> float:
    shape = layers[0].shape
    rng = np.random.default_rng(0)
    rows = [lib.put(rng.standard_normal((t, shape.d)).astype(np.float32)) for _ in range(2)]
    start = 0 if shape.net is not None else POSITION
    calls = [layer.arguments(*(rows if i % 2 == 0 else rows[::-1]), start, flags) for i, layer in enumerate(layers)]
    work = lib.DeviceArray(lib.kernels().nextn_layer_workspace(ctypes.byref(calls[0])), np.uint8)
    for call in calls:
        call.workspace, call.workspace_bytes = work.ptr, work.bytes

    def launch(i: int, stream: int) -> None:
        assert lib.kernels().nextn_layer(ctypes.byref(calls[i % LAYERS]), ctypes.c_void_p(stream)) == 0

    return graph_time(launch, REPEATS * LAYERS)


def print_trace(layer: RandomLayer, t: int) -> None:
    clocks = layer.sync.host()[SYNC_BYTES // 4 :][: BLOCKS * 2 * TRACED].view(np.int64).reshape(BLOCKS, TRACED)
    absent = "none" if t == 1 else "operands" if t <= 4 else "rows"
    points = [
        (at, name)
        for at, name in POINTS
        if not name.endswith(absent) and not (t > 4 and name.endswith("quantising") and not name.startswith(PHASES[0]))
    ]
    spent = np.diff(clocks[:, [at for at, _ in points]], axis=1)
    parts = (f"{n} {d.mean():.0f} ({d.min()}, {d.max()})" for (_, n), d in zip(points[1:], spent.T, strict=True))
    print("   " + "; ".join(parts))


def main() -> None:
    rng = np.random.default_rng(0)
    for name, shape in (
        ("GDN, all Q4_K", NINE_B),
        ("GDN, qkv and down Q6_K", NINE_B.with_types("Q6_K", *TYPES["q4"][1:6], "Q6_K")),
        ("attention, v and down Q6_K", ATTENTION.with_types("Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q4_K", "Q6_K")),
    ):
        layers = [RandomLayer(rng, shape, repeat=2) for _ in range(LAYERS)]
        if shape.net is not None:
            for layer in layers:  # state that is there
                layer.run(rng.standard_normal((1, shape.d)).astype(np.float32), -1)
        floor = layers[0].nbytes / 4.5e6
        for t in (1, 2, 3, 4, 5, 8):
            fused, single = (layer_time(layers, t, flags) for flags in (PDL, PDL | SEPARATE))
            print(f"{name}: T={t} {fused:6.2f} us, single kernels {single:6.2f}, weights at 4.5 TB/s {floor:.2f}")
            if "--trace" in sys.argv and shape.net is not None:
                layer_time(layers, t, PDL)
                print_trace(layers[0], t)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
