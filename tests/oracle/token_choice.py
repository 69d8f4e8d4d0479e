"""Token choice from its definition: all noise drawn, all tokens sorted, shares added as Python's whole numbers."""

from __future__ import annotations

import math

import numpy as np

from runtime import noise
from runtime.sampling import SamplingParams


def share_of(depth: float) -> int:
    """The definition of `runtime.shares`."""
    if depth > 64:
        return 0
    octaves, part = divmod(round(depth * (1.4426950408889634 * 2**32)), 2**32)
    h = 46333
    for c in (632021, 5702267, 41298234, 238385494, 1031764650, 2977044458):
        h = c - (h * part >> 32)
    return 2**40 - (h * part >> 24) >> octaves


def kept(row: np.ndarray, params: SamplingParams) -> list[int]:
    """Ids, ascending, that top-k, top-p and min-p leave of a row [V] f32 of finite or -inf logits."""
    order = sorted((i for i in range(len(row)) if row[i] > -np.inf), key=lambda i: (-row[i], i))
    peak = float(row.max())
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1:
        each = [share_of(peak - float(row[i])) for i in order]
        n, total, needed = 0, 0, params.top_p * sum(each)
        while n == 0 or total < needed:
            total, n = total + each[n], n + 1
        order = order[:n]
    if params.min_p:
        order = [i for i in order if float(row[i]) - peak >= math.log(params.min_p)]
    return sorted(order)


def keys(row: np.ndarray, position: int, params: SamplingParams) -> np.ndarray:
    """logit + t * g of every token [V] f64: nothing left out."""
    blocks = np.arange(-(-len(row) // 4))
    drawn = noise.words(params.seed, np.full(len(blocks), position), blocks).ravel()[: len(row)]
    return np.asarray(row.astype(np.float64) + params.temperature * noise.gumbel(drawn))


def chosen(row: np.ndarray, position: int, params: SamplingParams) -> int:
    """The token for ``position``; the lowest id among equals."""
    if params.temperature == 0:
        return int(row.argmax())
    ids = kept(row, params)
    return ids[int(keys(row, position, params)[ids].argmax())]
