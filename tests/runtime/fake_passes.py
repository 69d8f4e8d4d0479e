"""The toy trunk and head of `fake_engines`, computed from the memory that a stand-in engine is bound to.

Every pass checks its state: the trunk's slot must hold what the tokens in its cache give, and the head must get, for
each row, the hidden state of the position before. A wrong slot, position, row, copy or order fails at once.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from engines.manifest import Geometry
from tests.runtime.fake_engines import START_STATE, VOCAB, logits_of, next_state

HIDDEN = 64
MAX_ROWS = 6
CONTEXT = 64
CHUNK = 9
GEOMETRY = Geometry(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    gdn_layers=(0,),
    attention_layers=(1,),
    draft_layer=2,
    num_kv_heads=1,
    head_dim=4,
    gdn_v_heads=1,
    gdn_head_dim=32,
    conv_channels=4,
    conv_kernel=2,
    context_length=128,
)
# float32 values of state, step and window. The first two hold 64 bits: of the state the toy's, of a step the token that
# leads to the next state.
_STATE_VALUES, _STEP_VALUES, _WINDOW_VALUES = 32 * 32, 32 + 64, 4
_BEFORE_WINDOWS = _STATE_VALUES + (MAX_ROWS - 1) * _STEP_VALUES
POOL = _BEFORE_WINDOWS + MAX_ROWS * _WINDOW_VALUES
WEIGHT = bytes(range(200))


def array(address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Memory as an array that can be written."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)).view(dtype).reshape(shape)


def trunk_pass(at: dict[str, int], count: int, num_rows: int) -> None:
    tokens, slot, position = (
        array(at[name], (n,), np.int32) for name, n in (("tokens", count), ("slot", 1), ("position", 1))
    )
    pool = array(at["blk.0.pool"], (POOL,), np.float32)
    slots = _slots(pool)
    cache = array(at["blk.1.cache"], (2, CONTEXT, 1, 4), np.float16)
    state = _state_of(slots, slot[0]) if slot[0] >= 0 else START_STATE
    assert state == _fold(cache, position[0]), "slot and cache do not belong together"
    assert array(at["shared.weight"], (200,), np.uint8).tobytes() == WEIGHT
    hidden = array(at["hidden.out"], (count, HIDDEN), np.float32)
    states = []
    for i, token in enumerate(tokens.tolist()):
        state = next_state(state, token)
        cache[:, position[0] + i] = token
        states.append(state)
        hidden[i] = 0
        hidden[i, :2].view(np.int64)[0] = state
    slots[0][0] = states[0 if count <= MAX_ROWS else -1]
    for i in range(1, count if count <= MAX_ROWS else 1):
        slots[i][0] = tokens[i]
    logits = array(at["logits"], (num_rows, VOCAB), np.float32)
    for i, row in enumerate(array(at["rows"], (num_rows,), np.int32).tolist()):
        logits[i] = logits_of(states[row])[0]


def settle(states: int, windows: int, slot: int) -> None:
    """Slot 0 gets state and window of another; device addresses of both parts of a pool."""
    assert windows == states + 4 * _BEFORE_WINDOWS
    slots = _slots(array(states, (_BEFORE_WINDOWS,), np.float32))
    slots[0][0] = _state_of(slots, slot)
    of_all = array(windows, (MAX_ROWS, _WINDOW_VALUES), np.float32)
    of_all[0] = of_all[slot]


def _slots(pool: np.ndarray) -> list[np.ndarray]:
    steps = (_STATE_VALUES + i * _STEP_VALUES for i in range(MAX_ROWS - 1))
    return [pool[at : at + 2].view(np.int64) for at in (0, *steps)]


def _state_of(slots: list[np.ndarray], slot: int) -> int:
    state = int(slots[0][0])
    for i in range(1, slot + 1):
        state = next_state(state, int(slots[i][0]))
    return state


def draft_pass(at: dict[str, int], count: int, num_rows: int, ids: np.ndarray) -> None:
    """ids: the tokens of the logits."""
    tokens, position, rows = (
        array(at[name], (n,), np.int32) for name, n in (("tokens", count), ("position", 1), ("rows", num_rows))
    )
    cache = array(at["blk.2.cache"], (2, CONTEXT, 1, 4), np.float16)
    hidden = array(at["hidden"], (count, HIDDEN), np.float32)
    out = array(at["hidden.out"], (count, HIDDEN), np.float32)
    states = []
    for i, token in enumerate(tokens.tolist()):
        given = int(hidden[i, :2].copy().view(np.int64)[0])
        before = given or START_STATE
        if given:
            assert before == _fold(cache, position[0] + i), "a row has not the hidden of the position before"
        cache[:, position[0] + i] = token
        states.append(next_state(before, token))
        out[i] = 0
        out[i, :2].view(np.int64)[0] = states[-1]
    logits = array(at["logits"], (num_rows, len(ids)), np.float32)
    for i, row in enumerate(rows.tolist()):
        logits[i] = twisted(states[row]).ravel()[ids]


def twisted(state: int) -> np.ndarray:
    """The head's logits: right two times in three."""
    logits = logits_of(state)[0]
    return np.roll(logits, 1) if state % 3 == 0 else logits


def _fold(cache: np.ndarray, count: int) -> int:
    state = START_STATE
    for token in cache[0, :count, 0, 0].tolist():
        state = next_state(state, int(token))
    return state
