"""What a model's equations give for a few tokens, as `engines.witness` says, and why a build may be off from it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

LOGITS, HEAD_LOGITS = "logits", "head logits"
# A state that is rounded to half precision is off by less (bfloat16, one pass: 2e-6 of its energy), heads in another
# order by about 1.
ROUNDING_NMSE = 1e-3
# What rounding may come to after any number of layers: 4e-4 after 64; the least of the usual faults came to 1.6e-2.
ROUNDING_MOST = 5e-3
# An explanation is one if the place is so much nearer to it.
_EXPLAINED = 1e-2
_KEPT = {"state": "the recurrent state", "conv": "the convolution's window"}
_SUSPECTS = {
    "conv": "what the delta net is given: its input products or norm",
    "state": "the delta rule (which key head a value head reads, decay, rate) or the convolution before it",
    "value_cache": "what attention is given: its input products or norm",
    "key_cache": "rope (position, frequencies, pairs) or the key norm",
    LOGITS: "the last norm or the LM head",
    HEAD_LOGITS: "the draft head: eh_proj (the order of its halves), its norms, its block",
}


@dataclass(frozen=True)
class Place:
    """A place that was compared. nmse: squared error over squared reference; explanation: of one that is off."""

    name: str
    nmse: float
    ok: bool
    explanation: str = ""


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

    def compared(self, shown: Mapping[str, np.ndarray], limit: float) -> list[Place]:
        """What a build shows of these places, each of as many values. limit: the NMSE that rounding may come to in the
        first layer."""
        layers = layers_so_far(self.places)
        limits = {name: max(limit, min(limit * layers[name], ROUNDING_MOST)) for name in self.places}
        with np.errstate(all="ignore"):  # what is no number is found, not warned of
            return [self._place(name, shown[name], limits[name]) for name in self.places if name in shown]

    def after_the_last(self) -> Evidence:
        """For a build that shows the last token's logits alone."""
        places = {name: _last(name, values) for name, values in self.places.items()}
        others = {
            name: {fault: _last(name, values) for fault, values in each.items()}
            for name, each in self.explanations.items()
        }
        return replace(self, places=places, explanations=others)

    def _place(self, name: str, got: np.ndarray, limit: float) -> Place:
        want = self.places[name]
        if got.size != want.size:
            return Place(name, float("inf"), False)
        got = got.astype(np.float64).reshape(want.shape)
        nmse = _nmse(got, want)
        if nmse < ROUNDING_NMSE and (rounded := rounded_state(name, got, want)):
            return Place(name, nmse, False, rounded)
        if nmse <= limit:
            return Place(name, nmse, True)
        others = {fault: _nmse(got, other) for fault, other in self.explanations.get(name, {}).items()}
        best = min(others, key=others.__getitem__, default="")
        explained = best and np.isfinite(others[best]) and others[best] <= _EXPLAINED * nmse
        return Place(name, nmse, False, best if explained else "")


def layers_so_far(names: Iterable[str]) -> dict[str, int]:
    """Of places named blk.N.., how many layers' rounding is in them, their own counted; of others, that of all layers.
    It adds up: squared errors of sound builds of random models grow with depth, by 6 to 65 from 8 layers to 32."""
    found = {name: re.match(r"blk\.(\d+)", name) for name in names}
    blocks = sorted({int(each[1]) for each in found.values() if each})
    return {name: blocks.index(int(each[1])) + 1 if each else max(1, len(blocks)) for name, each in found.items()}


def rounded_state(name: str, got: np.ndarray, want: np.ndarray) -> str:
    """What is kept in half precision, if all values are some of that type where the reference's are not; "" otherwise.
    Engines round activations as coarsely, so that an error as small as this tells nothing."""
    what = _KEPT.get(name.rsplit(".", 1)[-1])
    if what is None or not got.any():
        return ""
    for kind, mantissa in (("bfloat16", 7), ("float16", 10)):
        if _are_of(got, mantissa).all() and _are_of(want.astype(np.float32), mantissa).mean() < 0.5:
            return f"the precision of {what}: every value of it is a {kind}"
    return ""


def _are_of(values: np.ndarray, mantissa: int) -> np.ndarray:
    """Which values need no more than so many bits after the first."""
    scaled = np.ldexp(np.frexp(values)[0], mantissa + 1)
    return np.asarray(scaled == np.rint(scaled))


def _last(name: str, values: np.ndarray) -> np.ndarray:
    return values[-1:] if name in (LOGITS, HEAD_LOGITS) else values


def _nmse(got: np.ndarray, want: np.ndarray) -> float:
    error = float(np.square(got - want).sum() / max(float(np.square(want).sum()), 1e-30))
    return error if np.isfinite(error) else float("inf")


def first_off(places: Sequence[Place]) -> list[str]:
    """The first place that is off and what to suspect. The head follows from a trunk that is off."""
    index = next((index for index, place in enumerate(places) if not place.ok), None)
    if index is None:
        return []
    place, leaf = places[index], places[index].name.rsplit(".", 1)[-1]
    if place.explanation:
        suspect = f"{place.explanation} (which explains it)"
    else:
        suspect = _SUSPECTS[leaf]
        if leaf == "state" and place.nmse < ROUNDING_NMSE:
            suspect += ", or their precision"
        if leaf in ("conv", "value_cache", LOGITS):
            suspect += f", or what comes after {places[index - 1].name}" if index else ", or the embedding"
    error = f"NMSE {place.nmse:.1e}" if np.isfinite(place.nmse) else "NaN or infinite"
    return [f"{place.name} is not what the model's equations give ({error}); suspect {suspect}"]
