"""Token choice: greedy, or Gumbel-max sampling whose noise depends on (seed, position, token) alone.

The draft head and the trunk call the same function with the same seed and positions, so a run with drafting gives
the very tokens of a run without, at every temperature. Nothing here has state.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import secrets
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.errors import NumericError, UsageError
from runtime import noise
from runtime.shares import shares

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

SEED_MAX = 2**64 - 1
TEMPERATURE_MAX = 1e6
# Candidates this many temperatures below the best get their noise first; it nearly always holds the winner.
_NEAR = 4.0
# Edges, below the peak, of the rings of logits that top-p looks at in turn.
_DEPTHS = (-1.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 16.0, math.inf)
# Covers every rounding of a key, relative to the largest number that goes into it (each is below 2^-52).
_SLACK = 1e-12


@dataclass(frozen=True)
class SamplingParams:
    """How a token is chosen.

    temperature  0 = the most probable token (lowest id among equals); else 0 < t <= 1e6.
    top_k        keep the k most probable tokens (lower id first among equals); 0 = off.
    top_p        keep the fewest most probable tokens whose share reaches top_p; 1 = off, 0 = only the best.
    min_p        keep tokens at least min_p times as probable as the best; 0 = off.
    seed         0 .. 2^64-1; -1 = draw one (``resolved``).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def validate(self) -> None:
        """Raise UsageError at the first value that has no meaning."""
        _check_number("temperature", self.temperature, 0.0, TEMPERATURE_MAX, "0 is greedy")
        _check_number("top-p", self.top_p, 0.0, 1.0, "1 is off, 0 keeps only the best token")
        _check_number("min-p", self.min_p, 0.0, 1.0, "0 is off")
        if not _is_int(self.top_k) or self.top_k < 0:
            raise UsageError(f"top-k must be a whole number of 0 or more, got {self.top_k!r}; 0 is off")
        if not _is_int(self.seed) or not -1 <= self.seed <= SEED_MAX:
            raise UsageError(f"seed must be a whole number from -1 to {SEED_MAX}, got {self.seed!r}; -1 draws one")

    def resolved(self) -> SamplingParams:
        """These parameters, validated, with seed -1 replaced by a drawn 32-bit seed: report that one."""
        self.validate()
        return self if self.seed >= 0 else dataclasses.replace(self, seed=secrets.randbits(32))


@dataclass(frozen=True)
class ParamsSampler:
    """Token choice with resolved ``params``, as the engines take it: a pure function of (logits, positions)."""

    params: SamplingParams

    def __call__(self, logits: F32, positions: I64) -> I64:
        return choose(logits, positions, self.params)


def choose(logits: F32, positions: I64, params: SamplingParams) -> I64:
    """The token chosen for each row.   logits: [R, V] f32, positions: [R] -> [R] i64.

    ``positions[r]`` is the index in the sequence (prompt included) that the chosen token will have. -inf masks a token:
    a model's own logits are to be seen by `check_logits` before anything is masked.
    Temperature 0 takes the argmax. Otherwise, as in llama.cpp's sampler chain, top-k, top-p and min-p filter in this
    order on the raw logits, then the temperature t applies: the winner has the greatest key
    ``logit + t * g(seed, position, token)``, binary64 with product and sum rounded apart. It is the argmax of
    logit/t + g, so a draw from softmax(logit/t). The lowest id wins ties.

    Noise is computed only where it can decide. g lies in [GUMBEL_MIN, GUMBEL_MAX], so a token whose
    logit + t*GUMBEL_MAX stays below another's key can't win: rounding is monotonic, hence its key stays below, too.
    First bound: the best logit's key is at least peak + t*GUMBEL_MIN. Second, sharper: the best key B of the tokens
    near the peak; a farther token then needs g >= (B - its logit)/t, which its random word shows before any logarithm.

    ``params`` must be resolved. Raises NumericError naming the position at NaN, +inf, or a row without finite logit.
    """
    if logits.ndim != 2 or logits.dtype != np.float32 or len(positions) != len(logits):
        raise AssertionError(f"logits {logits.dtype}{logits.shape}, {len(positions)} positions")
    best = logits.argmax(axis=1)
    peak = np.take_along_axis(logits, best[:, None], axis=1)[:, 0].astype(np.float64)
    _check_peaks(peak, logits, positions)
    t = float(params.temperature)
    if t == 0.0:
        return best
    if params.top_k or params.top_p < 1 or params.min_p:
        kept = np.full_like(logits, -np.inf)
        for row, out in zip(logits, kept, strict=True):
            ids = filtered(row, params)
            out[ids] = row[ids]
        logits = kept
    place = np.asarray(positions, np.int64)

    near = logits >= _float32_below(peak - _NEAR * t)
    rows, tokens, drawn = _draw(near, np.zeros(len(logits), np.uint64), place, params.seed)
    keys = logits[rows, tokens] + t * noise.gumbel(drawn)
    bound = np.full(len(logits), -np.inf)
    np.maximum.at(bound, rows, keys)

    reach = bound - t * noise.GUMBEL_MAX - _SLACK * (np.abs(peak) + t * (noise.GUMBEL_MAX - noise.GUMBEL_MIN))
    far = (logits >= _float32_below(reach)) & ~near
    far_rows, far_tokens, drawn = _draw(far, _least_word(bound, peak, t), place, params.seed)
    rows, tokens = np.concatenate([rows, far_rows]), np.concatenate([tokens, far_tokens])
    keys = np.concatenate([keys, logits[far_rows, far_tokens] + t * noise.gumbel(drawn)])
    return _first_best(rows, tokens, keys, len(logits))


def _draw(wanted: NDArray[np.bool_], least: noise.U64, positions: I64, seed: int) -> tuple[I64, I64, noise.U64]:
    """(rows, tokens, words) of the wanted tokens [R, V] whose word is at least ``least`` [R]."""
    if wanted.shape[1] % 4:
        wanted = np.pad(wanted, ((0, 0), (0, -wanted.shape[1] % 4)))
    # a counter makes the words of four tokens: look at four flags as one number
    rows, blocks = np.nonzero(np.ascontiguousarray(wanted).view(np.uint32))
    drawn = noise.words(seed, positions[rows], blocks)
    live = drawn >= least[rows][:, None]
    live &= wanted.reshape(len(wanted), -1, 4)[rows, blocks]
    at, lane = np.nonzero(live)
    return rows[at], blocks[at] * 4 + lane, drawn[at, lane]


def _first_best(rows: I64, tokens: I64, keys: noise.F64, n_rows: int) -> I64:
    """The token of each row's greatest key; the lowest id among equals."""
    top = np.full(n_rows, -np.inf)
    np.maximum.at(top, rows, keys)
    hit = keys == top[rows]
    out = np.full(n_rows, np.iinfo(np.int64).max)
    np.minimum.at(out, rows[hit], tokens[hit])
    return out


def _float32_below(x: noise.F64) -> F32:
    """Bounds of rows as a float32 column [R, 1] that is not above them, so comparing float32 logits drops none."""
    with np.errstate(over="ignore"):
        return np.nextafter(x.astype(np.float32), np.float32(-np.inf))[:, None]


def _least_word(bound: noise.F64, peak: noise.F64, t: float) -> noise.U64:
    """The smallest Philox word, less a margin, that lets a token more than _NEAR * t below the peak reach ``bound``.

    u >= exp(-exp(-g)), and g <= needed + error. Logits are float32, so a token within 27 t of the peak but not near it
    exists only if |peak| < 2^30 t; the error of ``needed`` is then below 2^-20, that of the word below 2^12.
    """
    with np.errstate(over="ignore", under="ignore"):
        needed = (bound - peak) / t + _NEAR
        least = np.exp(-np.exp(-needed)) * 2.0**32 - 2.0**12
    return np.clip(least, 0.0, 2.0**32 - 1.0).astype(np.uint64)


def filtered(row: F32, params: SamplingParams) -> I64:
    """Ids, ascending, that top-k, top-p and min-p leave of one row of finite or -inf logits [V]; never none.

    As llama.cpp: top-p takes the shares among what top-k left, min-p compares with the best; both at temperature 1.
    Shares are whole numbers (`runtime.shares`), so the cut does not depend on the order of summing. The most probable
    first, the lower id first among equal logits, each filter leaves the begin of what the one before left.
    Source: llama.cpp, src/llama-sampler.cpp and the default chain of common/common.h.
    """
    ids = _top_k(row, params.top_k) if 0 < params.top_k < len(row) else np.flatnonzero(row > -np.inf)
    if params.top_p < 1:
        ids = ids[_top_p(row[ids], params.top_p)]
    if params.min_p > 0:
        below = row[ids].astype(np.float64) - float(row.max())
        ids = ids[below >= noise.log(np.array([params.min_p]))]
    return ids


def _top_k(row: F32, k: int) -> I64:
    """Ids, ascending, of the k greatest finite logits; lower ids first among equals."""
    least = np.partition(row, len(row) - k)[len(row) - k]
    if least == -np.inf:
        return np.flatnonzero(row > -np.inf)
    above = np.flatnonzero(row > least)
    return np.sort(np.concatenate([above, np.flatnonzero(row == least)[: k - len(above)]]))


def _top_p(logits: F32, top_p: float) -> I64:
    """Indices, ascending, of the fewest greatest logits whose shares reach ``top_p`` of all; at least one.

    A token stays if the shares before it, as binary64, are less than top_p times all shares, as binary64."""
    depth = float(logits.max()) - logits.astype(np.float64)
    each = shares(depth)
    needed = top_p * float(each.sum())
    inner, held = np.empty(0, np.int64), 0
    for low, high in itertools.pairwise(_DEPTHS):  # whole rings are taken unsorted, only the last one is ordered
        ring = np.flatnonzero((depth > low) & (depth <= high))
        total = held + int(each[ring].sum())
        if float(total) >= needed or high == math.inf:
            break
        inner, held = np.concatenate([inner, ring]), total
    order = ring[np.argsort(-logits[ring], kind="stable")]
    sums = (np.cumsum(each[order]) + np.uint64(held)).astype(np.float64)
    return np.sort(np.concatenate([inner, order[: int(np.searchsorted(sums, needed)) + 1]]))


def check_logits(logits: F32, positions: I64) -> None:
    """Raise NumericError naming the position of the first row of logits [R, N], as a model gave them, that holds a NaN
    or an infinity of either sign."""
    finite = np.isfinite(logits)
    if finite.all():
        return
    r = int(np.flatnonzero(~finite.all(axis=1))[0])
    n_nan, n_inf = int(np.isnan(logits[r]).sum()), int(np.isinf(logits[r]).sum())
    raise _no_choice(f"{n_nan} NaN and {n_inf} infinite", logits[r], int(positions[r]))


def _check_peaks(peak: noise.F64, logits: F32, positions: I64) -> None:
    """Raise NumericError at the first row whose greatest logit (NaN if the row holds one) is not finite."""
    bad = np.flatnonzero(~np.isfinite(peak))
    if not len(bad):
        return
    r = int(bad[0])
    row = logits[r]
    n_nan, n_inf = int(np.isnan(row).sum()), int(np.isposinf(row).sum())
    what = f"{n_nan} NaN and {n_inf} infinite" if n_nan or n_inf else "only masked (-inf)"
    raise _no_choice(what, row, int(positions[r]))


def _no_choice(what: str, row: F32, position: int) -> NumericError:
    return NumericError(
        f"logits for position {position}: {what} of {len(row)} values, so no token can be chosen; "
        "the model file or its engine is damaged"
    )


def _check_number(name: str, value: float, low: float, high: float, note: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value) or not low <= value <= high:
        raise UsageError(f"{name} must be a number from {low:g} to {high:g}, got {value!r}; {note}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
