"""An exported model and its ONNX Runtime engines, driven so that every row's logits are seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engines.draft_head import DraftHeadOptions
from engines.manifest import Manifest
from export.exporter import WHOLE_HEAD, export_model
from runtime.controller import FixedDraft, Round
from runtime.engine import Sampler
from runtime.engine_onnxruntime import OnnxDraftEngine, OnnxTrunkEngine, open_engines
from runtime.speculative import SpecStats, generate

MAX_ROWS = 8


@dataclass(frozen=True)
class Exported:
    """A model file and what was made of it."""

    model: Path
    folder: Path
    manifest: Manifest
    threads: int = 1

    def trunk(self, context_size: int = 1024, max_rows: int = MAX_ROWS) -> OnnxTrunkEngine:
        trunk, _ = open_engines(
            self.folder, self.manifest, context_size=context_size, threads=self.threads, max_rows=max_rows, draft=False
        )
        return trunk

    def engines(self, context_size: int = 1024, max_rows: int = MAX_ROWS) -> tuple[OnnxTrunkEngine, OnnxDraftEngine]:
        trunk, draft = open_engines(
            self.folder, self.manifest, context_size=context_size, threads=self.threads, max_rows=max_rows
        )
        assert draft is not None
        return trunk, draft


def export(model: Path, folder: Path, draft_head: DraftHeadOptions = WHOLE_HEAD) -> Exported:
    """Export ``model`` into ``folder``."""
    return Exported(model, folder, export_model(model, folder, draft_head=draft_head))


def greedy(logits: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return logits.argmax(axis=1)


def prefill(trunk: OnnxTrunkEngine, tokens: Sequence[int], chunk: int = 0) -> np.ndarray:
    """Start afresh and take ``tokens`` in chunks (0: as large as may be). -> hidden rows [T, D]"""
    trunk.start(greedy)
    step = chunk or trunk.prefill_chunk
    return np.concatenate([trunk.prefill(tokens[i : i + step]).hidden for i in range(0, len(tokens), step)])


def append(trunk: OnnxTrunkEngine, tokens: Sequence[int], rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Take ``tokens`` in committed verify passes of up to ``rows``. -> logits [T, V], hidden [T, D]"""
    logits, hidden = [], []
    for i in range(0, len(tokens), rows):
        part = tokens[i : i + rows]
        hidden.append(trunk.verify(part).hidden)
        logits.append(trunk.logits.copy())
        trunk.commit(len(part))
    return np.concatenate(logits), np.concatenate(hidden)


def trunk_rows(trunk: OnnxTrunkEngine, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits [T, V] and hidden [T, D] of a fresh sequence."""
    trunk.start(greedy)
    return append(trunk, tokens, trunk.max_rows)


def shifted(hidden: np.ndarray) -> np.ndarray:
    """The hidden of the position before each row: zeros, then all rows but the last."""
    return np.concatenate([np.zeros_like(hidden[:1]), hidden[:-1]])


def head_rows(draft: OnnxDraftEngine, tokens: Sequence[int], hidden_before: np.ndarray) -> np.ndarray:
    """The head's logits [T, V] over a fresh sequence of true rows."""
    draft.start(greedy)
    logits = []
    for token, row in zip(tokens, hidden_before, strict=True):
        draft.prefill([token], row[None])
        logits.append(draft.logits[0].copy())
    return np.stack(logits)


class Rounds(FixedDraft):
    """Always ``n`` drafts; remembers how many were made and accepted, round by round."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.drafted: list[int] = []
        self.accepted: list[int] = []

    def observe(self, done: Round) -> None:
        self.drafted.append(done.draft_n)
        self.accepted.append(done.n_accept)


def generate_tokens(
    trunk: OnnxTrunkEngine,
    draft: OnnxDraftEngine | None,
    prompt: Sequence[int],
    max_tokens: int,
    draft_n: int,
    sampler: Sampler = greedy,
    end_token_ids: Sequence[int] = (),
) -> tuple[list[int], Rounds, SpecStats]:
    """The product's loop with ``draft_n`` drafts a round (0: plain decoding)."""
    rounds, stats = Rounds(draft_n), SpecStats()
    tokens = list(
        generate(
            trunk,
            draft if draft_n else None,
            prompt,
            sampler=sampler,
            controller=rounds,
            max_tokens=max_tokens,
            end_token_ids=end_token_ids,
            context_size=trunk.context_size,
            stats=stats,
        )
    )
    return tokens, rounds, stats
