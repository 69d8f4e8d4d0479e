"""A build against what its model's equations give: which place is off first, and what would explain it.

Shared by `runtime.check`, `runtime.eval`, `runtime.profile` and `runtime.inspect` (--against, --build). Drafting
against plain decoding does not show a build that is wrong in itself; this does.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engines.errors import NumericError, UsageError
from engines.evidence import HEAD_LOGITS, LOGITS, Evidence, Place, first_off
from engines.whole_files import verify_whole
from runtime.engine import any_token
from runtime.model_cache import content_key_of, evidence_of
from runtime.session import Session
from runtime.state_probe import ShowsState, probed, state_faults

# The begin of a text, of which so many tokens are run: one by one, and as a prompt, in passes too long for the kernels
# of rounds.
TEXT = "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n"
TOKENS, _PROMPT_PASSES = 20, 2
_ROWS = 4  # of the pass whose parts are taken back
# Squared error over squared reference that rounding may come to: of float32 sums and activations of 24 bits; of
# activations of 16 bits and a cache in half precision; of float16 ones, over a prompt; of a cache in int8. Measured: up
# to 5e-13, 4e-7, 4e-6 and 5e-5.
_NMSE_MAX = {"onnxruntime": 1e-9, "tensorrt": 1e-5}
_NMSE_MAX_PROMPT = {"onnxruntime": 1e-9, "tensorrt": 1e-4}
_NMSE_MAX_INT8 = 1e-3


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
    """Look at a loaded build of ``model``, its files included: few tokens do not read every row of them. probe_state:
    also whether its passes can be taken back. Leaves trunk and head without a sequence.

    Raises UsageError (the model is another), ModelFileError, EngineError (a file is damaged)."""
    verify_whole(session.folder, session.manifest)
    tokens = session.tokenizer.encode(TEXT)[: max(1, min(TOKENS, session.context_size - 1))]
    geometry = session.manifest.geometry
    evidence = evidence_of(model, tokens)
    if evidence.places[LOGITS].shape[1] != geometry.vocab_size:
        raise UsageError(f"{model}: the build in {session.folder} is of another model; give that one's .gguf")
    single = _places(evidence, _one_by_one(session, tokens), _NMSE_MAX[session.backend])
    prompt = _places(evidence.after_the_last(), _as_prompt(session, tokens), _NMSE_MAX_PROMPT[session.backend])
    off = first_off(single) or [f"of a prompt in {_PROMPT_PASSES} passes, {said}" for said in first_off(prompt)]
    if off and content_key_of(model) != session.manifest.content_key:
        off[0] += f"; or {model.name}: the build was made from another file"
    rows = min(_ROWS, session.trunk.max_rows, session.context_size - 1)
    faults = []
    if probe_state and rows and all(math.isfinite(place.nmse) for place in (*single, *prompt)):
        faults = [f"state: {fault}" for fault in state_faults(session.trunk, probed(tokens, rows), rows)]
    return Diagnosis((*faults, *off), (*single, *prompt))


@contextlib.contextmanager
def naming(diagnosis: Diagnosis | None) -> Iterator[None]:
    """What ends in numbers that are none is told with what the build was found to be."""
    try:
        yield
    except NumericError as error:
        raise NumericError("; ".join([str(error), *(diagnosis.faults if diagnosis else ())])) from error


def _places(evidence: Evidence, shown: Mapping[str, np.ndarray], limit: float) -> list[Place]:
    if any(values.dtype == np.int8 for values in shown.values()):
        limit = _NMSE_MAX_INT8
    # Rows of int8, scales and all, are not looked at: what is read of them shows.
    return evidence.compared({name: values for name, values in shown.items() if values.dtype != np.int8}, limit)


def _one_by_one(session: Session, tokens: Sequence[int]) -> dict[str, np.ndarray]:
    """What the engines show of a fresh sequence, by the names of `Evidence`, after a pass for each token."""
    trunk, head = _started(session)
    logits: list[np.ndarray] = []
    of_head: list[np.ndarray] = []
    before = head.zero_hidden() if head is not None else None
    for token in tokens:
        hidden = trunk.verify([token]).hidden
        logits.append(np.array(trunk.logits))
        trunk.commit(1)
        if head is not None:
            joined = head.join([before, hidden])
            head.prefill([token], joined[:1])
            of_head.append(np.array(head.logits))
            before = joined[1:]
    return _shown(session, logits, of_head)


def _as_prompt(session: Session, tokens: Sequence[int]) -> dict[str, np.ndarray]:
    """The same after passes over several tokens, which show the logits of their last."""
    trunk, head = _started(session)
    before = head.zero_hidden() if head is not None else None
    step = min(trunk.prefill_chunk, -(-len(tokens) // _PROMPT_PASSES))
    for first in range(0, len(tokens), step):
        part = tokens[first : first + step]
        hidden = trunk.prefill(part).hidden
        if head is not None:
            joined = head.join([before, hidden])
            head.prefill(part, joined[: len(part)])
            before = joined[len(part) :]
    return _shown(session, [np.array(trunk.logits)], [] if head is None else [np.array(head.logits)])


def _started(session: Session) -> tuple[Any, Any]:
    for engine in (session.trunk, session.draft):
        if engine is not None:
            engine.start(any_token)
    return session.trunk, session.draft


def _shown(session: Session, logits: list[np.ndarray], of_head: list[np.ndarray]) -> dict[str, np.ndarray]:
    shown = session.trunk.state() if isinstance(session.trunk, ShowsState) else {}
    shown[LOGITS] = np.concatenate(logits)
    if of_head and not session.manifest.draft_head_key:  # an LM head of its own is another by intent
        shown[HEAD_LOGITS] = np.concatenate(of_head)
    _started(session)
    return shown
