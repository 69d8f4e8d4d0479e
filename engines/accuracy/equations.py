"""The canonical graph against the model's equations: both forms come from one exporter, and may be wrong alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from polygraphy.comparator import RunResults

from engines.accuracy.compare import outputs_of, quiet
from engines.accuracy.inputs import load_feeds
from engines.accuracy.measures import reference_state
from engines.accuracy.plan import LOWERED, load_plan, roles_of
from engines.evidence import HEAD_LOGITS, LOGITS, Place
from engines.witness import give_evidence

# Of three int8 terms, which keep 24 bits, and of keys and values as they are handed on.
_NMSE_MAX = 1e-9
# The equations go token by token; of a longer pass its begin is looked at, without the state that all of it leaves.
_MOST_TOKENS = 64


def against_equations(folder: Path) -> list[Place]:
    """The first pass of a prepared folder, which begins from nothing, as the reference has left it.

    Raises ModelFileError, EngineError."""
    _, manifest = load_plan(folder)
    blocks = sorted(role for role in manifest.files if role.startswith("blocks."))
    model = manifest.file(folder / LOWERED, blocks[0])
    whole = [int(token) for token in load_feeds(folder / "trunk.npz")[0]["tokens"]]
    tokens = whole[:_MOST_TOKENS]
    evidence, trunk = give_evidence(model, tokens), _first_pass(folder, "trunk")
    shown = {LOGITS: trunk["logits"][: len(tokens)]}
    for name, want in evidence.places.items():
        shape = (1, *want.shape) if name.endswith(".conv") else want.shape
        state = reference_state(name, trunk, shape)
        if state is not None and name.endswith("_cache"):
            shown[name] = state.swapaxes(0, 1)[:, : len(tokens)]
        elif state is not None and tokens == whole:
            shown[name] = state
    if "draft" in roles_of(manifest) and not manifest.draft_head_key:  # an LM head of its own is another by intent
        shown[HEAD_LOGITS] = _first_pass(folder, "draft")["logits"][: len(tokens)]
    return evidence.compared(shown, _NMSE_MAX)


def _first_pass(folder: Path, role: str) -> dict[str, np.ndarray]:
    with quiet():
        ((_, passes),) = RunResults.load(str(outputs_of(folder, role))).items()
    return {name: np.asarray(value) for name, value in passes[0].items()}
