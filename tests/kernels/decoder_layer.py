"""A decoder layer of random matrices on the device, and what it computes in float64."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tests.kernels import library as lib
from tests.kernels.test_attention import NINE_B
from tests.kernels.test_attention import Layer as AttentionLayer
from tests.kernels.test_gated_delta_net import Net
from tests.kernels.test_gated_delta_net import Shape as NetShape
from tests.oracle import kquant

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
EPS = 1e-6
PDL, SEPARATE = 1, 2
SYNC_BYTES = 256
CAPACITY, POSITION = 2048, 1000  # of attention layers


@dataclass(frozen=True)
class Shape:
    """``net``: of a Gated DeltaNet layer; None makes it an attention layer. Types: of the mixer's input matrices, then
    output, gate and up, down."""

    d: int
    ffn: int
    net: NetShape | None
    inputs: tuple[str, ...] = ("Q4_K",) * 4
    output: str = "Q4_K"
    gate_up: str = "Q4_K"
    down: str = "Q4_K"

    def with_types(self, *types: str) -> Shape:
        return replace(self, inputs=types[:-3], output=types[-3], gate_up=types[-2], down=types[-1])


class RandomLayer:
    """Weights, state pools and constants. ``repeat``: more than 1 draws 16 rows of a
    matrix and tiles them, which makes large ones quick."""

    def __init__(self, rng: np.random.Generator, shape: Shape, repeat: int = 1) -> None:
        self.shape, net = shape, shape.net
        if net is not None:
            self.net = Net(rng, net)
            width = net.v_heads * net.dim
            rows = (net.channels, width, net.v_heads, net.v_heads)
            shape_in = shape.inputs
        else:
            self.attention = AttentionLayer(rng, NINE_B, CAPACITY)
            self.attention.fill(rng, CAPACITY)
            width, rows, shape_in = 4096, (8192, 1024, 1024), shape.inputs[:3]
        self.width = width
        self.norms = [rng.uniform(0.01, 0.03, shape.d).astype(np.float32) for _ in range(2)]
        plan = [*((name, n, shape.d) for name, n in zip(shape_in, rows, strict=True)), (shape.output, shape.d, width)]
        plan += [(shape.gate_up, shape.ffn, shape.d)] * 2 + [(shape.down, shape.d, shape.ffn)]
        self.matrices = []
        for name, n, k in plan:
            some = kquant.random_rows(rng, name, max(1, min(n, 16) if repeat > 1 else n), k)
            self.matrices.append((name, np.tile(some, (-(-n // len(some)), 1))[:n], k))
        self.device = [lib.put(rows) for _, rows, _ in self.matrices]
        self.constants = [lib.put(norm) for norm in self.norms]
        self.sync = lib.put(np.zeros(SYNC_BYTES // 4 + 132 * 64, np.uint32))

    @property
    def nbytes(self) -> int:
        return sum(each.bytes for each in self.device)

    def arguments(
        self, x: lib.DeviceArray, y: lib.DeviceArray, start: int, flags: int, t: int | None = None
    ) -> lib.DecoderLayer:
        """``start``: the slot to start from, or the position of an attention layer's first token. ``t``: how many of
        the rows; None: all. `slot` or `call` holds what they point to, until the next arguments are made."""
        s, t = self.shape, x.shape[0] if t is None else t
        args = lib.DecoderLayer(x=x.ptr, y=y.ptr, t=t, d=s.d, eps=EPS, sync=self.sync.ptr, flags=flags)
        args.mixer_norm, args.ffn_norm = (each.ptr for each in self.constants)
        refs = [
            lib.LayerMatrix(weight.ptr, kquant.TYPES[name].id, len(rows))
            for (name, rows, _), weight in zip(self.matrices, self.device, strict=True)
        ]
        args.inputs = len(refs) - 4
        for i in range(args.inputs):
            args.input[i] = refs[i]
        args.output, args.gate, args.up, args.down = refs[-4:]
        if s.net is not None:
            n, g = s.net, args.delta_net
            self.slot = lib.put(np.array([start], np.int32))
            conv, a, dt_bias, norm = self.net.constants
            g.conv_weight, g.a, g.dt_bias, g.norm_weight = conv.ptr, a.ptr, dt_bias.ptr, norm.ptr
            g.conv_pool, g.state_pool, g.slot = self.net.conv_pool.ptr, self.net.state_pool.ptr, self.slot.ptr
            g.slots, g.k_heads, g.v_heads, g.head_dim, g.conv_kernel = n.slots, n.k_heads, n.v_heads, n.dim, n.kernel
        else:
            self.call = self.attention.arguments(self.attention.inputs(np.random.default_rng(0), t), start)
            args.attention = self.call.args
        return args

    def run(self, x: F32, start: int, flags: int = PDL, held: int = lib.POISON) -> F32:
        """``held``: every byte of the workspace before."""
        device, y = lib.put(x), lib.DeviceArray(x.shape, np.float32)
        args = self.arguments(device, y, start, flags)
        work = lib.DeviceArray(lib.kernels().nextn_layer_workspace(ctypes.byref(args)), np.uint8)
        work.fill(held)
        args.workspace, args.workspace_bytes = work.ptr, work.bytes
        assert lib.kernels().nextn_layer(ctypes.byref(args), None) == 0
        lib.synchronize()
        return y.host()

    def reference(self, x: F32) -> F64:
        """From an empty state; Gated DeltaNet layers."""
        values = [kquant.values_of(name, rows, k).astype(np.float64) for name, rows, k in self.matrices]
        norms = [norm.astype(np.float64) for norm in self.norms]

        def rms(v: F64, weight: F64) -> F64:
            return v / np.sqrt((v * v).mean(axis=1, keepdims=True) + EPS) * weight

        v = x.astype(np.float64)
        n = rms(v, norms[0])
        mixed = self.net.reference([(n @ w.T).astype(np.float32) for w in values[:4]]).y
        r = v + mixed @ values[4].T
        n = rms(r, norms[1])
        gate, up = n @ values[5].T, n @ values[6].T
        return r + (gate / (1 + np.exp(-gate)) * up) @ values[7].T
