"""Which tokens the draft head's logits stand for: all, or those whose rows its cut-down LM head kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engines.errors import EngineError
from engines.manifest import Manifest

_ROLE = "draft_ids"


class DraftTokens:
    """The tokens of a draft engine's logits [R, N]. ids: int32 [N], ascending; None: token i has logit i."""

    def __init__(self, vocab_size: int, ids: np.ndarray | None = None) -> None:
        self.ids, self.vocab_size = ids, vocab_size
        self.count = vocab_size if ids is None else len(ids)

    def whole_rows(self, logits: np.ndarray) -> np.ndarray:
        """logits [R, N] f32 -> [R, V] f32, -inf at the tokens that the head does not know: to a sampler these are
        masked, so it chooses from the others by their true ids."""
        if self.ids is None:
            return logits
        whole = np.full((len(logits), self.vocab_size), -np.inf, np.float32)
        whole[:, self.ids] = logits
        return whole


def load_draft_tokens(folder: Path, manifest: Manifest) -> DraftTokens:
    """Of an exported folder. Raises EngineError when its table of ids is damaged."""
    vocab_size = manifest.geometry.vocab_size
    if _ROLE not in manifest.files:
        return DraftTokens(vocab_size)
    path = manifest.file(folder, _ROLE)
    try:
        ids = np.fromfile(path, "<i4")
    except OSError as error:
        raise EngineError(f"{path}: cannot be read ({error.strerror}); run `python -m export` again") from error
    if not len(ids) or ids[0] < 0 or ids[-1] >= vocab_size or (np.diff(ids) <= 0).any():
        raise EngineError(f"{path}: is no list of ascending tokens below {vocab_size}; run `python -m export` again")
    return DraftTokens(vocab_size, ids.astype(np.int32))
