"""Slots of a Gated DeltaNet's recurrent state, as `plugins/README.md` has them: a state [HV, D, D] in the first, in
each of the others the step [HV, D / 32, D + 64] that leads to the next token's state."""

from __future__ import annotations

import numpy as np

from engines.engine_manifest import STEP_COLUMNS, step_size


def split(pool: np.ndarray, heads: int, dim: int, window: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Views of a pool: state, steps [S - 1, HV, D / 32, D + 64], windows [S, window]."""
    state, step = heads * dim * dim, step_size(heads, dim)
    slots = (pool.size - state + step) // (step + window)
    parts = np.split(pool, np.cumsum([state, (slots - 1) * step]))
    shapes = (heads, dim, dim), (slots - 1, heads, dim // STEP_COLUMNS, dim + 2 * STEP_COLUMNS), (slots, window)
    first, steps, windows = (part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))
    return first, steps, windows


def state_of(state: np.ndarray, steps: np.ndarray, slot: int) -> np.ndarray:
    """The state that a pass from ``slot`` starts from, in float64."""
    state = state.astype(np.float64)
    for each in steps[: max(slot, 0)]:
        key, delta, decay = _parts(each)
        state = decay * state + key * delta
    return state


def state_before(state: np.ndarray, step: np.ndarray) -> np.ndarray:
    """The state from which a step leads to ``state``, in float64."""
    key, delta, decay = _parts(step)
    return np.asarray((state - key * delta) / decay)


def put_step(step: np.ndarray, key: np.ndarray, delta: np.ndarray, decay: np.ndarray) -> None:
    """Write the step decay * state + key delta^T.   key, delta: [HV, D], decay: [HV]"""
    dim = key.shape[1]
    step[:, :, :dim] = key[:, None]
    step[:, :, dim : dim + STEP_COLUMNS] = delta.reshape(len(delta), -1, STEP_COLUMNS)
    step[:, :, dim + STEP_COLUMNS] = decay[:, None]


def _parts(step: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """key [HV, D, 1], delta [HV, 1, D], decay [HV, 1, 1] in float64."""
    heads, _, dim = step.shape[0], step.shape[1], step.shape[2] - 2 * STEP_COLUMNS
    values = step.astype(np.float64)
    delta = values[:, :, dim : dim + STEP_COLUMNS].reshape(heads, 1, dim)
    return values[:, 0, :dim, None], delta, values[:, 0, dim + STEP_COLUMNS, None, None]
