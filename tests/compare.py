"""The one place that says when numbers are close enough, and why.

Everything raises AssertionError with what was compared, how far off it is and where: not-a-number first, then the
largest difference with its index, then the rows it is spread over.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]

# Logits of a float32 run against float64 or another float32 run, at the logit rms of 3 to 4.5 that most test models
# have: a few dozen float32 sums of some hundred terms each. Measured: 2e-5 to 9e-5, llama.cpp against itself 3e-5.
LOGITS_MAX_ABS = 2e-4
# The logit rms that LOGITS_MAX_ABS is meant for. Rounding errors grow with what is rounded, so wider logits (a tied
# random head has rms 16) get a bound wider in proportion.
USUAL_LOGIT_RMS = 4.0
# Hidden states have rms 1 or so (they come out of a norm); the same chain of sums as for logits.
HIDDEN_MAX_ABS = 1e-4
# Recurrent state, conv window and KV rows against float64; entries are below 10 in all test models.
STATE_MAX_ABS = 1e-4
# Rotary frequencies: the same formula in float64 twice.
FREQUENCY_MAX_REL = 1e-12
# Logits after 400 tokens with next to no decay, relative to the largest: rounding of the state adds up over tokens.
LONG_MEMORY_MAX_REL = 1e-3


def logits_max_abs(want: Array) -> float:
    """LOGITS_MAX_ABS at the scale of ``want``; never less than at the usual scale."""
    return LOGITS_MAX_ABS * max(1.0, float(np.sqrt(np.mean(np.square(want)))) / USUAL_LOGIT_RMS)


def assert_close(
    got: Array, want: Array, *, what: str, max_abs: float | None = None, max_rel: float | None = None
) -> None:
    """Every entry within ``max_abs``, and within ``max_rel`` times the largest entry of ``want``; same shape, finite.

    At least one of the two bounds must be given. ``want`` is the reference; its rows are along axis 0."""
    assert (max_abs is None) + (max_rel is None) < 2, "assert_close without a bound"
    _check_shapes(got, want, what)
    for name, array in (("reference", want), ("result", got)):
        bad = np.argwhere(~np.isfinite(array))
        assert not len(bad), f"{what}: the {name} is not finite at {len(bad)} places, first at {_index(bad[0])}"
    if not want.size:
        return
    off = np.abs(got.astype(np.float64) - want)
    peak = float(np.abs(want).max())
    bounds = [max_abs] if max_abs is not None else []
    bounds += [max_rel * peak] if max_rel is not None else []
    if off.max() > min(bounds):
        raise AssertionError(_report(got, want, off, min(bounds), what))


def assert_same_bits(got: Array, want: Array, what: str) -> None:
    """Equal bit by bit: also tells -0 from 0."""
    _check_shapes(got, want, what)
    assert got.dtype == want.dtype, f"{what}: {got.dtype} against {want.dtype}"
    words = {4: np.uint32, 8: np.uint64}[got.dtype.itemsize]
    differ = np.argwhere(np.ascontiguousarray(got).view(words) != np.ascontiguousarray(want).view(words))
    if len(differ):
        at = tuple(differ[0])
        raise AssertionError(
            f"{what}: {len(differ)} of {got.size} entries differ in their bits, first at {_index(at)}: "
            f"{got[at]!r} against {want[at]!r}; largest difference {np.abs(got - want).max():.3g}"
        )


def assert_same_state(got: dict[str, Array], want: dict[str, Array], what: str) -> None:
    """Two engine states, entry by entry, equal in their bits."""
    assert got.keys() == want.keys(), f"{what}: entries {sorted(got.keys() ^ want.keys())} in one only"
    for name, values in want.items():
        assert_same_bits(got[name], values, f"{what}: {name}")


def assert_same_choices(got: Array, want: Array, what: str) -> None:
    """The greedy token of every row is the same.   got, want: logits [R, V]"""
    _check_shapes(got, want, what)
    ours, theirs = got.argmax(axis=1), want.argmax(axis=1)
    differ = np.flatnonzero(ours != theirs)
    if len(differ):
        row = differ[0]
        second, first = np.sort(want[row])[-2:]
        raise AssertionError(
            f"{what}: top-1 equal in {len(want) - len(differ)} of {len(want)} rows; row {row} gives {ours[row]}, "
            f"wanted {theirs[row]} (reference gap to its second {first - second:.3g})"
        )


def kl_divergence(want: Array, got: Array) -> Array:
    """KL(want || got) of logits [..., V], in nats, [...]."""
    p, q = (_log_softmax(logits.astype(np.float64)) for logits in (want, got))
    kl: Array = (np.exp(p) * (p - q)).sum(axis=-1)
    return kl


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    total: Array = np.exp(shifted).sum(axis=-1, keepdims=True)
    return shifted - np.log(total)


def nmse(got: Array, want: Array) -> float:
    """Squared error over squared reference; 0 for two zeros."""
    power = float(np.square(want).sum())
    error = float(np.square(got.astype(np.float64) - want).sum())
    return error / power if power else (0.0 if error == 0 else float("inf"))


def _check_shapes(got: Array, want: Array, what: str) -> None:
    assert got.shape == want.shape, f"{what}: shape {got.shape}, wanted {want.shape}"


def _report(got: Array, want: Array, off: Array, bound: float, what: str) -> str:
    at = np.unravel_index(int(off.argmax()), off.shape)
    by_row = off.reshape(len(off), -1).max(axis=1)
    rows = np.flatnonzero(by_row > bound)
    shown = ", ".join(f"{row}: {by_row[row]:.2g}" for row in rows[:6])
    return (
        f"{what}: off by {off[at]:.3g} at {_index(at)} ({got[at]:.6g}, wanted {want[at]:.6g}; bound {bound:.3g}); "
        f"nmse {nmse(got, want):.2g}; {len(rows)} of {len(off)} rows beyond it ({shown})"
    )


def _index(at: np.ndarray | tuple[np.intp, ...]) -> str:
    return "[" + ", ".join(str(int(i)) for i in at) + "]"
