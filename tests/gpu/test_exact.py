"""Exact to the bit: any number of rows in a pass, any rollback, whole rounds, drafting or not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from engines.errors import NumericError
from runtime import cuda
from runtime.engine import NO_CHOICE
from runtime.sampling import SamplingParams
from runtime.tensorrt_trunk import GREEDY
from tests.gpu.checks import assert_same_bits, assert_same_state, check_rows_agree, run, token_ids
from tests.gpu.conftest import Opened
from tests.gpu.prepare import MAX_ROWS, RANDOM_MODELS, TRAINED_MODELS, WIDE
from tests.peer.speculation import recorded

pytestmark = [pytest.mark.gpu, pytest.mark.trt]

Open = Callable[[str], Opened]


@pytest.mark.parametrize("start", [0, 5, 1000])
@pytest.mark.parametrize("name", [*TRAINED_MODELS, *RANDOM_MODELS])
def test_rows_agree(opened: Open, name: str, start: int) -> None:
    check_rows_agree(opened(name), start)


@pytest.mark.parametrize("rows", [1, 3, MAX_ROWS])
def test_wide_layers_are_as_few_kernels_as_is_said(opened: Open, rows: int) -> None:
    """Else the other tests of this model would be of single kernels. On other GPUs it depends on the shared memory."""
    if cuda.open_device().compute_capability != (9, 0):
        return
    trunk, geometry = opened(WIDE).trunk, opened(WIDE).manifest.geometry
    trunk.start(GREEDY)
    trunk.verify([1] * rows)
    recorded = {key[:2]: graph for key, graph in trunk.memory.recorder._graphs.items()}
    kernels = recorded["verify", rows].kernels
    besides = 10  # embedding, rope, norm, LM head, token choice
    # Attention: one before the mixer, two of it, one behind it.
    assert kernels <= len(geometry.gdn_layers) + 4 * len(geometry.attention_layers) + besides


@pytest.mark.parametrize("name", [*TRAINED_MODELS, *RANDOM_MODELS])
def test_head_rows_agree_bit_by_bit(opened: Open, name: str) -> None:
    """The head's logits after catching up with 1..8 rows at once are those after one row at a time."""
    engines = opened(name)
    ids = token_ids(engines.vocab_size, 200, seed=4)
    engines.trunk.start(GREEDY)
    hidden = engines.draft.join([engines.draft.zero_hidden(), engines.trunk.prefill(ids).hidden])
    for start in (0, 100):
        single = []
        engines.draft.start(GREEDY)
        if start:
            engines.draft.prefill(ids[:start], hidden[:start])
        for i in range(start, start + MAX_ROWS):
            engines.draft.prefill(ids[i : i + 1], hidden[i : i + 1])
            single.append(engines.draft.logits)
        for rows in range(2, MAX_ROWS + 1):
            engines.draft.start(GREEDY)
            if start:
                engines.draft.prefill(ids[:start], hidden[:start])
            end = start + rows
            drafts = engines.draft.draft(ids[start:end], hidden[start:end], 1)
            assert_same_bits(engines.draft.logits, single[rows - 1], f"head logits after {rows} rows at {start}")
            assert drafts[0] == single[rows - 1].argmax()


@pytest.mark.parametrize("n_drafts", [1, 3, 7])
@pytest.mark.parametrize("rows", [1, 2, MAX_ROWS, 40])
@pytest.mark.parametrize("name", ["trained", WIDE])
def test_a_round_is_its_parts(opened: Open, name: str, rows: int, n_drafts: int) -> None:
    """Drafting and verifying in one graph gives the drafts, choices and state of the two calls, bit by bit."""
    engines = opened(name)
    ids = token_ids(engines.vocab_size, 100, seed=rows)
    results = []
    for whole in (False, True):
        trunk, draft = engines.trunk, engines.draft
        trunk.start(GREEDY)
        draft.start(GREEDY)
        hidden = draft.join([draft.zero_hidden(), trunk.prefill(ids[:99]).hidden])
        draft.prefill(ids[: 100 - rows], hidden[: 100 - rows])
        tail = ids[100 - rows :].tolist(), hidden[100 - rows :]
        if whole:
            queued = draft.begin_round(trunk, *tail, n_drafts)
            assert queued is not None
            both = queued.outcome()
            assert 0 < both.draft_share < 1
            drafts, result = both.drafts, both.result
        else:
            drafts = draft.draft(*tail, n_drafts).tolist()
            result = trunk.verify([int(ids[99]), *drafts])
        logits = trunk.logits, draft.logits
        trunk.commit(n_drafts)
        results.append((drafts, result.choices, engines.host(result.hidden), *logits, trunk.state()))
    (drafts, choices, *arrays, state), (want_drafts, want_choices, *want_arrays, want_state) = results
    assert drafts == want_drafts and choices == want_choices
    for got, want in zip(arrays, want_arrays, strict=True):
        assert_same_bits(got, want, f"{rows} rows, {n_drafts} drafts")
    assert_same_state(state, want_state, f"{rows} rows, {n_drafts} drafts")


@pytest.mark.parametrize("rows", [2, 5, MAX_ROWS])
@pytest.mark.parametrize("start", [0, 300])
@pytest.mark.parametrize("name", [*TRAINED_MODELS, WIDE])
def test_rollback(opened: Open, name: str, rows: int, start: int) -> None:
    """However many provisional tokens are kept, state and what follows are as if the others had never been."""
    engines = opened(name)
    ids = token_ids(engines.vocab_size, start + rows, seed=rows)
    followers = token_ids(engines.vocab_size, 3, seed=1)
    for keep in range(1, rows + 1):
        engines.prefill(ids[:start])
        engines.trunk.verify(ids[start:])
        engines.trunk.commit(keep)
        state, (logits, hidden) = engines.trunk.state(), engines.append(followers, 1)
        engines.prefill(ids[:start])
        engines.append(ids[start : start + keep], 1)
        where = f"with {keep} of {rows} rows kept at position {start}"
        assert_same_state(state, engines.trunk.state(), where)
        want_logits, want_hidden = engines.append(followers, 1)
        assert_same_bits(logits, want_logits, f"logits {where}")
        assert_same_bits(hidden, want_hidden, f"hidden {where}")


def test_state_after_drafting(opened: Open) -> None:
    """After many rejections the trunk's state is that of plain decoding, bit by bit."""
    engines, prompt = opened("trained"), recorded()[0].prompt
    run(engines, prompt, 0, 256, SamplingParams())
    want = engines.trunk.state()
    _, stats = run(engines, prompt, 4, 256, SamplingParams())
    assert stats.draft_n - stats.draft_n_accepted > 20
    assert_same_state(engines.trunk.state(), want, "after drafting")


@pytest.mark.parametrize("name", ["trained", *RANDOM_MODELS])
@pytest.mark.parametrize("rows", [2, 5, MAX_ROWS])
def test_damaged_rows_reach_no_earlier_ones(opened: Open, name: str, rows: int) -> None:
    """A token outside the vocabulary has an embedding of NaN. Behind a rejected draft that is no error; choices, hidden
    rows, state and what follows are as without it."""
    engines, trunk = opened(name), opened(name).trunk
    ids, followers = token_ids(engines.vocab_size, 20 + rows, seed=rows), token_ids(engines.vocab_size, 3, seed=1)
    for bad in range(1, rows):
        choices, arrays, states = [], [], []
        for behind in (rows - bad, 0):
            engines.prefill(ids[:20])
            result = trunk.verify([*ids[20 : 20 + bad], *[NO_CHOICE] * behind])
            assert result.choices[bad:] == [NO_CHOICE] * behind
            choices.append(result.choices[:bad])
            parts = [engines.host(result.hidden)[:bad], trunk.logits[:bad]]
            trunk.commit(bad)
            states.append(trunk.state())
            arrays.append([*parts, *engines.append(followers, 1)])
        where = f"of {rows} rows, NaN from row {bad} on"
        assert choices[0] == choices[1]
        for got, want in zip(*arrays, strict=True):
            assert_same_bits(np.ascontiguousarray(got), np.ascontiguousarray(want), where)
        assert_same_state(*states, where)


def test_a_damaged_row_that_counts(opened: Open) -> None:
    """At each place of a pass, behind drafts that are accepted: the next pass names the position."""
    engines, trunk, prompt = opened("trained"), opened("trained").trunk, recorded()[0].prompt
    engines.prefill(np.array(prompt))
    with pytest.raises(NumericError, match=f"position {len(prompt) + 1}: {engines.vocab_size} NaN"):
        trunk.verify([NO_CHOICE])
    for rows in range(1, MAX_ROWS):
        trunk.start(GREEDY)
        text = trunk.prefill(prompt).choices
        for _ in range(rows - 1):
            text += trunk.verify(text[-1:]).choices
            trunk.commit(1)

        def forced(logits: np.ndarray, positions: np.ndarray, last: int = trunk.position + 1) -> np.ndarray:
            return np.where(positions == last, NO_CHOICE, GREEDY(logits, positions))

        trunk.start(forced)
        trunk.prefill(prompt)
        result = trunk.verify([*text, NO_CHOICE])
        assert result.choices == [*text[1:], NO_CHOICE, NO_CHOICE]
        trunk.commit(rows)
        with pytest.raises(NumericError, match=f"position {len(prompt) + rows + 1}: {engines.vocab_size} NaN"):
            trunk.verify([NO_CHOICE])
