"""Conv + Gated DeltaNet against float64, slots, and independence of how tokens are cut into calls.

Slots behind the first hold steps, not states; `Net.slot` has them applied."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernels import library as lib
from tests.oracle import gated_delta_net as oracle
from tests.oracle import state_slots

pytestmark = pytest.mark.gpu

F32 = NDArray[np.float32]
EPS = 1e-6
ERROR = 2e-5  # float32 state and sums over hundreds of tokens; chunks add 5e-6
MAX_DECODE_T = 8


@dataclass
class Shape:
    k_heads: int
    v_heads: int
    dim: int
    kernel: int = 4
    slots: int = 6

    @property
    def channels(self) -> int:
        return (2 * self.k_heads + self.v_heads) * self.dim


SHAPES = [Shape(2, 4, 32), Shape(2, 6, 64, slots=3), Shape(1, 1, 128, kernel=3), Shape(16, 32, 128), Shape(16, 48, 128)]
SMALL = SHAPES[:3]


class Net:
    """A layer with random constants, its pools on the device, and its oracle."""

    def __init__(self, rng: np.random.Generator, shape: Shape) -> None:
        s = self.shape = shape
        self.conv = rng.standard_normal((s.channels, s.kernel)).astype(np.float32) * 0.5
        self.a = -rng.uniform(0.01, 4.0, s.v_heads).astype(np.float32)
        self.dt_bias = rng.uniform(-3.0, 0.5, s.v_heads).astype(np.float32)
        self.norm = rng.uniform(0.5, 1.5, s.dim).astype(np.float32)
        self.constants = [lib.put(x) for x in (self.conv, self.a, self.dt_bias, self.norm)]
        self.conv_pool = lib.DeviceArray((s.slots, s.kernel - 1, s.channels), np.float32)
        self.state_pool = lib.DeviceArray(
            s.v_heads * (s.dim**2 + (s.slots - 1) * s.dim // 32 * (s.dim + 64)), np.float32
        )
        conv, a, dt_bias, norm = (x.astype(np.float64) for x in (self.conv, self.a, self.dt_bias, self.norm))
        self.layer = oracle.Layer(s.k_heads, s.v_heads, conv, a, dt_bias, norm, EPS)

    def inputs(self, rng: np.random.Generator, t: int) -> list[F32]:
        """qkv, z, alpha, beta"""
        s = self.shape
        sizes = (s.channels, s.v_heads * s.dim, s.v_heads, s.v_heads)
        return [rng.standard_normal((t, n)).astype(np.float32) for n in sizes]

    def arguments(self, inputs: list[F32], slot: int, flags: int = 0) -> lib.Call:
        s, t = self.shape, len(inputs[0])
        qkv, z, alpha, beta = device = [lib.put(x) for x in inputs]
        y, start = lib.DeviceArray((t, s.v_heads * s.dim), np.float32), lib.put(np.array([slot], np.int32))
        size = lib.kernels().nextn_gated_delta_net_workspace(t, s.k_heads, s.v_heads, s.dim)
        work = lib.DeviceArray(size, np.uint8)
        conv, a, dt_bias, norm = self.constants
        args = lib.GatedDeltaNet(qkv.ptr, z.ptr, alpha.ptr, beta.ptr, *(x.shape[1] for x in device[:3]))
        args.conv_weight, args.a, args.dt_bias, args.norm_weight, args.eps = conv.ptr, a.ptr, dt_bias.ptr, norm.ptr, EPS
        args.conv_pool, args.state_pool, args.slot = self.conv_pool.ptr, self.state_pool.ptr, start.ptr
        args.y, args.ld_y, args.t, args.slots = y.ptr, s.v_heads * s.dim, t, s.slots
        args.k_heads, args.v_heads, args.head_dim, args.conv_kernel = s.k_heads, s.v_heads, s.dim, s.kernel
        args.workspace, args.workspace_bytes, args.flags = work.ptr, work.bytes, flags
        return lib.Call(args, y, (*device, start, work))

    def run(self, inputs: list[F32], slot: int, flags: int = 0) -> F32:
        call = self.arguments(inputs, slot, flags)
        assert lib.kernels().nextn_gated_delta_net(ctypes.byref(call.args), None) == 0
        lib.synchronize()
        return call.y.host()

    def pools(self) -> tuple[F32, F32, F32]:
        """Windows, state and steps."""
        return self.conv_pool.host(), *state_slots.split(self.state_pool.host(), self.shape.v_heads, self.shape.dim)

    def settle(self, slot: int) -> None:
        s = self.shape
        window, pools = (s.kernel - 1) * s.channels, (self.state_pool.ptr, self.conv_pool.ptr)
        assert lib.kernels().nextn_gated_delta_net_settle(*pools, slot, s.v_heads, s.dim, window, None) == 0
        lib.synchronize()

    def slot(self, slot: int) -> tuple[F32, F32]:
        """Window [kernel - 1, C] and state [HV, D, D] that a call from that slot starts from."""
        pools = self.conv_pool, self.state_pool
        self.conv_pool, self.state_pool = (pool.copy() for pool in pools)
        try:
            self.settle(slot)
            windows, state, _ = self.pools()
            return windows[0].copy(), state.copy()
        finally:
            self.conv_pool, self.state_pool = pools

    def slots(self, count: int) -> tuple[F32, F32]:
        """The first ``count``."""
        windows, states = zip(*(self.slot(i) for i in range(count)), strict=True)
        return np.stack(windows), np.stack(states)

    def reference(self, inputs: list[F32]) -> oracle.Steps:
        s = self.shape
        window, state = np.zeros((s.kernel - 1, s.channels)), np.zeros((s.v_heads, s.dim, s.dim))
        qkv, z, alpha, beta = (x.astype(np.float64) for x in inputs)
        return oracle.run(self.layer, qkv, z, alpha, beta, window, state)


def relative(got: NDArray[np.floating], want: NDArray[np.float64]) -> float:
    assert np.isfinite(got).all()
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_pass_matches_float64_and_leaves_the_last_state_in_slot_0(rng: np.random.Generator, shape: Shape) -> None:
    net = Net(rng, shape)
    inputs = net.inputs(rng, 37)
    y, want = net.run(inputs, slot=-1), net.reference(inputs)
    windows, state, steps = net.pools()
    assert relative(y, want.y) < ERROR
    assert relative(state, want.states[-1]) < ERROR
    assert np.array_equal(windows[0], want.windows[-1].astype(np.float32))
    assert np.isnan(steps).all() and np.isnan(windows[1:]).all(), "only slot 0 may be written"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_slots_hold_the_state_after_each_token(rng: np.random.Generator, shape: Shape) -> None:
    net = Net(rng, shape)
    t = shape.slots
    inputs = net.inputs(rng, t)
    y, want = net.run(inputs, slot=-1, flags=1), net.reference(inputs)
    windows, states = net.slots(t)
    assert relative(y, want.y) < ERROR
    assert relative(states, want.states) < ERROR
    _, *pool = net.pools()
    assert relative(np.stack([state_slots.get(*pool, i) for i in range(t)]), want.states) < ERROR, "steps as described"
    assert np.array_equal(windows, want.windows.astype(np.float32))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_cut_into_short_calls_gives_the_same_bits(rng: np.random.Generator, shape: Shape) -> None:
    inputs = (net := Net(rng, shape)).inputs(rng, 33)
    whole = np.concatenate([net.run([x[t : t + 1] for x in inputs], slot=0 if t else -1) for t in range(33)])
    last_window, last_state = net.slot(0)
    at, slot, parts = 0, -1, []
    while at < 33:
        t = min(int(rng.integers(1, MAX_DECODE_T + 1)), 33 - at)
        parts.append(net.run([x[at : at + t] for x in inputs], slot))
        at, slot = at + t, t - 1 if t <= shape.slots else 0
    window, state = net.slot(slot)
    assert np.array_equal(np.concatenate(parts), whole)
    assert np.array_equal(window, last_window) and np.array_equal(state, last_state)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("lengths", [(9,), (31, 1), (32, 5, 33), (64, 65), (3, 127, 40)], ids=str)
def test_long_calls_after_each_other(rng: np.random.Generator, shape: Shape, lengths: tuple[int, ...]) -> None:
    """Lengths round the edges of chunks, and what one call leaves to the next."""
    net = Net(rng, shape)
    inputs = net.inputs(rng, sum(lengths))
    at, slot, parts = 0, -1, []
    for t in lengths:
        parts.append(net.run([x[at : at + t] for x in inputs], slot, flags=1))
        at, slot = at + t, t - 1 if t <= shape.slots else 0
    want = net.reference(inputs)
    window, state = net.slot(slot)
    assert relative(np.concatenate(parts), want.y) < ERROR
    assert relative(state, want.states[-1]) < ERROR
    assert np.array_equal(window, want.windows[-1].astype(np.float32))


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_many_slots_keep_the_state_after_each_token_of_a_long_call(rng: np.random.Generator, shape: Shape) -> None:
    net = Net(rng, replace(shape, slots=20))
    inputs = net.inputs(rng, 20)
    y, want = net.run(inputs, slot=-1), net.reference(inputs)
    windows, states = net.slots(20)
    assert relative(y, want.y) < ERROR
    assert relative(states, want.states) < ERROR
    assert np.array_equal(windows, want.windows.astype(np.float32))
    after = net.inputs(rng, 3)
    for slot in (8, 19):  # further than a short call goes
        kept = [np.concatenate([a[: slot + 1], b]) for a, b in zip(inputs, after, strict=True)]
        net.run(inputs, slot=-1)
        assert relative(net.run(after, slot), net.reference(kept).y[-3:]) < ERROR


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("t", [1, 2, 5, 8])
def test_a_call_from_any_slot_equals_one_that_never_saw_the_rejected_tokens(
    rng: np.random.Generator, shape: Shape, t: int
) -> None:
    """Bit by bit, with the windows and states that it leaves itself; round after round."""
    drafted, plain = Net(rng, shape), Net(rng, shape)
    plain.constants = drafted.constants
    plain.run(first := plain.inputs(rng, 3), slot=-1)
    drafted.run(first, slot=-1)
    slot = plain_slot = 2
    for kept in rng.permutation(shape.slots).tolist():
        inputs = plain.inputs(rng, shape.slots)
        drafted.run(inputs, slot, flags=1)
        for i in range(kept + 1):
            plain.run([x[i : i + 1] for x in inputs], plain_slot)
            plain_slot = 0
        slot = kept
        assert all(np.array_equal(a, b) for a, b in zip(drafted.slot(slot), plain.slot(0), strict=True)), kept
        inputs = plain.inputs(rng, t)
        assert np.array_equal(drafted.run(inputs, slot, flags=1), plain.run(inputs, 0)), kept
        slot = plain_slot = t - 1 if t <= shape.slots else 0
        assert all(np.array_equal(a, b) for a, b in zip(drafted.slot(slot), plain.slot(slot), strict=True)), kept


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("t", [21, 64])
def test_a_long_call_after_rejected_tokens(rng: np.random.Generator, shape: Shape, t: int) -> None:
    """The same bits as from the state that they had left untouched, as it is or settled."""
    net = Net(rng, shape)
    first, after = net.inputs(rng, shape.slots), net.inputs(rng, t)
    for kept in range(shape.slots):
        for i in range(kept + 1):
            net.run([x[i : i + 1] for x in first], slot=0 if i else -1)
        want, wanted = net.run(after, slot=0), net.slot(0)
        for settled in (False, True):
            net.run(first, slot=-1)
            if settled:
                windows, _, steps = net.pools()
                net.settle(kept)
                now, _, now_steps = net.pools()
                assert np.array_equal(now[1:], windows[1:]) and np.array_equal(now_steps, steps, equal_nan=True)
            assert np.array_equal(net.run(after, 0 if settled else kept, flags=1), want)
            assert all(np.array_equal(a, b) for a, b in zip(net.slot(0), wanted, strict=True))


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_a_bad_number_reaches_no_earlier_token(rng: np.random.Generator, shape: Shape) -> None:
    """Neither its result nor the slot after it: the same bits as without the tokens from the bad one on."""
    net = Net(rng, shape)
    inputs = net.inputs(rng, shape.slots)
    for bad in range(1, shape.slots):
        want = net.run([x[:bad] for x in inputs], slot=-1)
        wanted = net.slots(bad)
        damaged = [x.copy() for x in inputs]
        for x in damaged:
            x[bad:] = np.nan
        y = net.run(damaged, slot=-1)
        assert np.array_equal(y[:bad], want) and not np.isfinite(y[bad:]).any()
        assert all(np.array_equal(now, before) for now, before in zip(net.slots(bad), wanted, strict=True))


@pytest.mark.parametrize(
    "change", [{"states": None}, {"windows": None}, {"v_heads": 0}, {"head_dim": 48}, {"window": 0}], ids=str
)
def test_settling_refuses_what_it_cannot_do(change: dict[str, int | None]) -> None:
    arguments = {"states": 256, "windows": 256, "slot": 1, "v_heads": 4, "head_dim": 32, "window": 768} | change
    assert lib.kernels().nextn_gated_delta_net_settle(*arguments.values(), None) == lib.INVALID_VALUE


def test_extreme_decay(rng: np.random.Generator) -> None:
    net = Net(rng, SHAPES[0])
    inputs = net.inputs(rng, 200)
    # forgets at once; never forgets; forgets all now and then, and must lose nothing of what comes between
    inputs[2][:, 0], inputs[2][:, 1], inputs[2][::7, 2] = 1e4, -1e4, 1e4
    y, want = net.run(inputs, slot=-1), net.reference(inputs)
    assert relative(y, want.y) < ERROR
    assert relative(net.pools()[1], want.states[-1]) < ERROR


@pytest.mark.parametrize(
    "change", [{"head_dim": 48}, {"k_heads": 3}, {"conv_kernel": 9}, {"t": 0}, {"workspace_bytes": 1}]
)
def test_refuses_what_it_cannot_do(change: dict[str, int]) -> None:
    args = lib.GatedDeltaNet(t=1, slots=1, k_heads=2, v_heads=4, head_dim=32, conv_kernel=4)
    args.ld_qkv, args.ld_z, args.ld_y, args.ld_gate = 256, 128, 128, 4
    args.workspace, args.workspace_bytes = 256, 1 << 20
    for key, value in change.items():
        setattr(args, key, value)
    assert lib.kernels().nextn_gated_delta_net(ctypes.byref(args), None) == lib.INVALID_VALUE
