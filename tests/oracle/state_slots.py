"""Slots of recurrent state [S, HV, D, D] as `plugins/README.md` has them, one head and 32 columns at a time: a state in
slot 0, in slot i the step from the state of slot i - 1."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tests.oracle.gated_delta_net import F64, Steps


def put(states: NDArray[np.floating], steps: Steps) -> None:
    """What a pass leaves."""
    if len(steps.states) > len(states):
        states[0] = steps.states[-1]
        return
    states[0] = steps.states[0]
    for i in range(1, len(steps.states)):
        for h, column, tile in _tiles(states[i]):
            k, d = steps.keys[i, h], len(steps.keys[i, h])
            for row in range(d):
                tile[row // 32, row % 32] = k[row]
            tile[d // 32] = steps.deltas[i, h, column : column + 32]
            tile[d // 32 + 1, 0] = steps.decays[i, h]


def get(states: NDArray[np.floating], slot: int) -> F64:
    """The state of a slot, [HV, D, D]."""
    state = states[0].astype(np.float64)
    for i in range(1, slot + 1):
        for h, column, tile in _tiles(states[i].astype(np.float64)):
            d = len(tile)
            k, u, decay = tile[: d // 32].ravel(), tile[d // 32], tile[d // 32 + 1, 0]
            state[h, :, column : column + 32] *= decay
            state[h, :, column : column + 32] += np.outer(k, u)
    return state


def _tiles(slot: NDArray[np.floating]) -> list[tuple[int, int, NDArray[np.floating]]]:
    heads, _, d = slot.shape
    return [(h, column, slot[h, :, column : column + 32]) for h in range(heads) for column in range(0, d, 32)]
