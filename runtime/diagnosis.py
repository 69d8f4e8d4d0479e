"""A build against what its model's equations give: which place is off first, and what would explain it.

Shared by `runtime.check`, `runtime.eval`, `runtime.profile` and `runtime.inspect` (--against, --build). Drafting
against plain decoding does not show a build that is wrong in itself; this does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engines.errors import UsageError
from engines.evidence import HEAD_LOGITS, LOGITS, Evidence
from runtime.model_cache import evidence_of
from runtime.sampling import SamplingParams
from runtime.session import Session, make_sampler
from runtime.state_probe import ShowsState, probed, state_faults

# The begin of a text, of which so many tokens are run.
TEXT = "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n"
TOKENS = 8
_ROWS = 4  # of the pass whose parts are taken back
# Squared error over squared reference that rounding may come to: of float32 sums and activations of 24 bits; of
# activations of 16 bits and a cache in half precision; of a cache in int8.
_NMSE_MAX = {"onnxruntime": 1e-9, "tensorrt": 1e-4}
_NMSE_MAX_INT8 = 1e-2
# A state that is rounded to half precision after every pass is off by less, heads in another order by about 1.
_ROUNDING_NMSE = 1e-3
# An explanation is one if the place is so much nearer to it.
_EXPLAINED = 1e-2
_GREEDY = SamplingParams()
_SUSPECTS = {
    "conv": "what the delta net is given: its input products or norm",
    "state": "the delta rule: which key head a value head reads, decay, rate",
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
class Diagnosis:
    """What was found. places: all that were compared, in order; faults: a line each, none for a sound build."""

    faults: tuple[str, ...]
    places: tuple[Place, ...]

    @property
    def worst(self) -> float:
        return max(place.nmse for place in self.places)

    def as_dict(self) -> dict[str, Any]:
        return {"faults": list(self.faults), "places": len(self.places), "worst_nmse": self.worst}

    def __str__(self) -> str:
        if self.faults:
            return "; ".join(self.faults)
        return f"as the model's equations have it, at {len(self.places)} places (worst NMSE {self.worst:.1e})"


def diagnose(session: Session, model: Path, probe_state: bool = True) -> Diagnosis:
    """Look at a loaded build of ``model``. probe_state: also whether its passes can be taken back. Leaves trunk and
    head without a sequence.

    Raises UsageError (the model is another), ModelFileError."""
    tokens = session.tokenizer.encode(TEXT)[: min(TOKENS, session.context_size - 1)]
    geometry = session.manifest.geometry
    evidence = evidence_of(model, tokens)
    if evidence.places[LOGITS].shape[1] != geometry.vocab_size:
        raise UsageError(f"{model}: the build in {session.folder} is of another model; give that one's .gguf")
    rows = min(_ROWS, session.trunk.max_rows, session.context_size - 1)
    faults = []
    if probe_state:
        faults = [f"state: {fault}" for fault in state_faults(session.trunk, probed(tokens, rows), rows)]
    shown = _shown(session, tokens)
    limit = _NMSE_MAX_INT8 if any(values.dtype == np.int8 for values in shown.values()) else _NMSE_MAX[session.backend]
    # Rows of int8, scales and all, are not looked at: what is read of them shows.
    names = [name for name in evidence.places if name in shown and shown[name].dtype != np.int8]
    places = [_place(name, shown[name], evidence, limit) for name in names]
    return Diagnosis((*faults, *_first_off(places)), tuple(places))


def _shown(session: Session, tokens: Sequence[int]) -> dict[str, np.ndarray]:
    """What the engines show of a fresh sequence, by the names of `Evidence`."""
    trunk: Any = session.trunk
    head: Any = session.draft
    trunk.start(make_sampler(_GREEDY))
    logits: list[np.ndarray] = []
    of_head: list[np.ndarray] = []
    if head is not None:
        head.start(make_sampler(_GREEDY))
        before = head.zero_hidden()
    for token in tokens:
        hidden = trunk.verify([token]).hidden
        logits.append(np.array(trunk.logits))
        trunk.commit(1)
        if head is not None:
            joined = head.join([before, hidden])
            head.draft([token], joined[:1], 1)
            of_head.append(np.array(head.logits))
            before = joined[1:]
    shown = trunk.state() if isinstance(trunk, ShowsState) else {}
    shown[LOGITS] = np.concatenate(logits)
    if of_head and not session.manifest.draft_head_key:  # an LM head of its own is another by intent
        shown[HEAD_LOGITS] = np.concatenate(of_head)
    for engine in (trunk, head):
        if engine is not None:
            engine.start(make_sampler(_GREEDY))
    return shown


def _place(name: str, got: np.ndarray, evidence: Evidence, limit: float) -> Place:
    want = evidence.places[name]
    if got.size != want.size:
        return Place(name, float("inf"), False)
    got = got.astype(np.float64).reshape(want.shape)
    nmse = _nmse(got, want)
    if nmse <= limit:
        return Place(name, nmse, True)
    others = {fault: _nmse(got, other) for fault, other in evidence.explanations.get(name, {}).items()}
    best = min(others, key=others.__getitem__, default="")
    return Place(name, nmse, False, best if best and others[best] <= _EXPLAINED * nmse else "")


def _nmse(got: np.ndarray, want: np.ndarray) -> float:
    error = float(np.square(got - want).sum() / max(float(np.square(want).sum()), 1e-30))
    return error if np.isfinite(error) else float("inf")


def _first_off(places: Sequence[Place]) -> list[str]:
    """The first place that is off and what to suspect. The head follows from a trunk that is off."""
    index = next((index for index, place in enumerate(places) if not place.ok), None)
    if index is None:
        return []
    place, leaf = places[index], places[index].name.rsplit(".", 1)[-1]
    if place.explanation:
        suspect = f"{place.explanation} (which explains it)"
    elif leaf == "state" and place.nmse < _ROUNDING_NMSE:
        suspect = "the precision of the recurrent state (half precision?)"
    else:
        suspect = _SUSPECTS[leaf]
        if leaf in ("conv", "value_cache", LOGITS) and index:
            suspect += f", or what comes after {places[index - 1].name}"
    return [f"{place.name} is not what the model's equations give (NMSE {place.nmse:.1e}); suspect {suspect}"]
