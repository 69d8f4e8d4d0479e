"""Slots of a Gated DeltaNet's recurrent state [S, HV, D, D]: a state in the first, in each of the others the step that
leads to the next token's state (see `plugins.ops.GATED_DELTA_NET`)."""

from __future__ import annotations

import numpy as np

_COLUMNS = 32


def state_of(states: np.ndarray, slot: int) -> np.ndarray:
    """The state [HV, D, D] that a pass from ``slot`` starts from, in float64."""
    state = states[0].astype(np.float64)
    for step in states[1 : slot + 1]:
        key, delta, decay = _step(step)
        state = decay * state + key * delta
    return state


def state_before(state: np.ndarray, step: np.ndarray) -> np.ndarray:
    """The state from which a slot's step leads to ``state``, in float64."""
    key, delta, decay = _step(step)
    return np.asarray((state - key * delta) / decay)


def put_step(slot: np.ndarray, key: np.ndarray, delta: np.ndarray, decay: np.ndarray) -> None:
    """Write the step decay * state + key delta^T into a slot [HV, D, D].   key, delta: [HV, D], decay: [HV]"""
    tiles = _tiles(slot)
    heads, dim, parts, _ = tiles.shape
    tiles[:, : dim // _COLUMNS] = key.reshape(heads, dim // _COLUMNS, 1, _COLUMNS)
    tiles[:, dim // _COLUMNS] = delta.reshape(heads, parts, _COLUMNS)
    tiles[:, dim // _COLUMNS + 1, :, 0] = decay[:, None]


def _step(slot: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """key [HV, D, 1], delta [HV, 1, D], decay [HV, 1, 1] in float64."""
    tiles = _tiles(slot).astype(np.float64)
    heads, dim, _, _ = tiles.shape
    key, delta = tiles[:, : dim // _COLUMNS, 0], tiles[:, dim // _COLUMNS]
    return key.reshape(heads, dim, 1), delta.reshape(heads, 1, dim), tiles[:, dim // _COLUMNS + 1, 0, 0, None, None]


def _tiles(slot: np.ndarray) -> np.ndarray:
    """A view, by head, row and 32 columns: each such column of tiles holds the step for itself."""
    heads, dim, _ = slot.shape
    return slot.reshape(heads, dim, dim // _COLUMNS, _COLUMNS)
