"""Does a verify pass leave the state that one-token passes leave, whatever part of it is kept? Bit by bit, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from runtime.engine import TrunkEngine
from runtime.sampling import SamplingParams
from runtime.session import make_sampler

_GREEDY = SamplingParams()
# By the last part of a state's name: what is kept there.
_MEANINGS = {
    "state": "the recurrent state",
    "conv": "the convolution's window",
    "key_cache": "the cache's keys",
    "value_cache": "the cache's values",
}


@runtime_checkable
class ShowsState(Protocol):
    """An engine whose state can be looked at."""

    def state(self) -> dict[str, np.ndarray]: ...


@dataclass(frozen=True)
class StateFault:
    """A state that is other than one-token passes leave it, after ``kept`` of ``rows`` tokens of a pass."""

    name: str
    kept: int
    rows: int

    def __str__(self) -> str:
        meaning = _MEANINGS.get(self.name.rsplit(".", 1)[-1], "a state")
        if self.kept < self.rows:
            cause = f"{meaning}, which is not taken back when drafts are rejected"
        else:
            cause = f"{meaning}, which is rounded between passes (half precision?) or summed otherwise in longer ones"
        return f"{self.name} after {self.kept} of {self.rows} tokens of a pass; suspect {cause}"


def state_faults(trunk: TrunkEngine, tokens: Sequence[int], rows: int) -> list[StateFault]:
    """The fault that the others follow from, or the first of every kind that a rejection leaves.

    tokens: more than ``rows``, the last of which are the pass's. Leaves the trunk without a sequence. Of an engine that
    shows no state nothing is found."""
    if not isinstance(trunk, ShowsState):
        return []
    prefix, block = tokens[:-rows], tokens[-rows:]
    single: list[dict[str, np.ndarray]] = []
    _start(trunk, prefix)
    for token in block:
        trunk.verify([token])
        trunk.commit(1)
        single.append(trunk.state())
    faults: dict[str, StateFault] = {}
    # What differs with all tokens kept has another cause than a rejection; the states after it follow from it.
    for name in _differing(trunk, prefix, block, rows, single[-1])[:1]:
        faults[name] = StateFault(name, rows, rows)
    for kept in range(1, rows if not faults else 0):
        for name in _differing(trunk, prefix, block, kept, single[kept - 1]):
            faults.setdefault(name.rsplit(".", 1)[-1], StateFault(name, kept, rows))
    trunk.start(make_sampler(_GREEDY))
    return list(faults.values())


def probed(prompt: Sequence[int], rows: int) -> list[int]:
    """Tokens for `state_faults`: a prompt, repeated where it is too short for a pass of ``rows`` with one before."""
    tokens = list(prompt)
    return (tokens * (-(-(rows + 1) // len(tokens))))[: max(rows + 1, len(tokens))]


def _start(trunk: TrunkEngine, prefix: Sequence[int]) -> None:
    trunk.start(make_sampler(_GREEDY))
    for first in range(0, len(prefix), trunk.prefill_chunk):
        trunk.prefill(prefix[first : first + trunk.prefill_chunk])


def _differing(
    trunk: TrunkEngine, prefix: Sequence[int], block: Sequence[int], kept: int, want: dict[str, np.ndarray]
) -> list[str]:
    """Names of the states that a pass over ``block`` leaves otherwise, in the order of the layers."""
    assert isinstance(trunk, ShowsState)
    _start(trunk, prefix)
    trunk.verify(block)
    trunk.commit(kept)
    got = trunk.state()
    return [
        name
        for name, values in want.items()
        if got[name].shape != values.shape or got[name].tobytes() != values.tobytes()
    ]
