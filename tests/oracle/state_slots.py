"""Slots of recurrent state as `plugins/README.md` has them, one head and 32 columns at a time: a state [HV, D, D], then
for every slot behind the first the step [HV, D / 32, D + 64] from the state of the slot before."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tests.oracle.gated_delta_net import F64, Steps

Array = NDArray[np.floating]


def split(pool: Array, heads: int, dim: int) -> tuple[Array, Array]:
    """Views of a pool's states alone, one row: the state, the steps."""
    first = heads * dim * dim
    return pool[:first].reshape(heads, dim, dim), pool[first:].reshape(-1, heads, dim // 32, dim + 64)


def put(state: Array, steps: Array, given: Steps) -> None:
    """What a pass leaves."""
    count = len(given.states)
    state[:] = given.states[0 if count <= len(steps) + 1 else -1]
    for i in range(1, count if count <= len(steps) + 1 else 1):
        for h in range(len(state)):
            for part, d in enumerate(range(0, state.shape[1], 32)):
                numbers = [*given.keys[i, h], *given.deltas[i, h, d : d + 32], given.decays[i, h]]
                steps[i - 1, h, part, : len(numbers)] = numbers


def get(state: Array, steps: Array, slot: int) -> F64:
    """The state of a slot, [HV, D, D]."""
    state, dim = state.astype(np.float64), state.shape[1]
    for step in steps[:slot].astype(np.float64):
        for h in range(len(state)):
            for part, d in enumerate(range(0, dim, 32)):
                k, u, decay = np.split(step[h, part], [dim, dim + 32])
                state[h, :, d : d + 32] = decay[0] * state[h, :, d : d + 32] + np.outer(k, u)
    return state
