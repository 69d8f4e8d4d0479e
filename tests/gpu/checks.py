"""What the GPU tests share: bit by bit comparison, and the product's loop over opened engines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.controller import FixedDraft
from runtime.sampling import SamplingParams
from runtime.session import make_sampler
from runtime.speculative import SpecStats, generate
from tests.gpu.conftest import Opened
from tests.gpu.prepare import MAX_ROWS

ROW_COUNTS = range(2, MAX_ROWS + 1)
STATE_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def token_ids(vocab_size: int, n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab_size, n)


def assert_same_bits(got: np.ndarray, want: np.ndarray, what: str) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype, what
    word = STATE_WORDS[got.dtype.itemsize]
    differ = np.argwhere(got.view(word) != want.view(word))
    first = tuple(differ[0]) if len(differ) else ()
    assert not len(differ), f"{what}: {len(differ)} of {got.size} differ, first at {first}: {got[first]} {want[first]}"
    assert np.isfinite(want).all(), f"{what}: not finite"


def assert_same_state(got: dict[str, np.ndarray], want: dict[str, np.ndarray], where: str) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert_same_bits(np.ascontiguousarray(got[name]), np.ascontiguousarray(want[name]), f"{name} {where}")


def check_rows_agree(engines: Opened, start: int, n: int = 24, row_counts: Sequence[int] = ROW_COUNTS) -> None:
    """After ``start`` tokens, passes of ``row_counts`` over n more give the logits, hidden and all state of one-token
    passes."""
    start = min(start, engines.trunk.context_size - n)
    ids = token_ids(engines.vocab_size, start + n, seed=start)
    engines.prefill(ids[:start])
    single, states = [], []
    for token in ids[start:]:
        single.append(engines.append([token], 1))
        states.append(engines.trunk.state())
    for rows in row_counts:
        engines.prefill(ids[:start])
        for first in range(0, n - rows + 1, rows):
            logits, hidden = engines.append(ids[start + first : start + first + rows], rows)
            where = f"of {rows} rows at position {start + first}"
            want = [np.concatenate(parts) for parts in zip(*single[first : first + rows], strict=True)]
            assert_same_bits(logits, want[0], f"logits {where}")
            assert_same_bits(hidden, want[1], f"hidden {where}")
            assert_same_state(engines.trunk.state(), states[first + rows - 1], where)


def run(
    engines: Opened,
    prompt: list[int],
    n_drafts: int,
    max_tokens: int,
    params: SamplingParams,
    ends: tuple[int, ...] = (),
    on_host: bool = False,
) -> tuple[list[int], SpecStats]:
    """on_host: tokens are chosen from copies of the logits, by the definition."""
    stats, sampler = SpecStats(), make_sampler(params)
    draft = engines.draft if n_drafts else None
    tokens = generate(
        engines.trunk,
        draft,
        prompt,
        sampler=(lambda logits, positions: sampler(logits, positions)) if on_host else sampler,
        controller=FixedDraft(n_drafts),
        max_tokens=max_tokens,
        end_token_ids=ends,
        context_size=engines.trunk.context_size,
        stats=stats,
    )
    return list(tokens), stats
