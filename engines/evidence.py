"""What a model's equations give for a few tokens: what `engines.witness` says, and the runtime compares with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LOGITS, HEAD_LOGITS = "logits", "head logits"


@dataclass(frozen=True)
class Evidence:
    """Of a fresh sequence of ``tokens``, one after the other; all float64.

    places: in the order in which they come about, what an engine shows: blk.N.conv [kernel - 1, C], blk.N.state
    [HV, DK, DV], blk.N.value_cache and blk.N.key_cache [KV, T, D] after the last token; LOGITS [T, V] of the trunk;
    HEAD_LOGITS [T, V] of the draft head, whose row p is given token p and the trunk's hidden row p - 1 (zeros first).
    explanations: by place, what it would be instead, by the fault that would make it so."""

    tokens: tuple[int, ...]
    places: dict[str, np.ndarray]
    explanations: dict[str, dict[str, np.ndarray]]
