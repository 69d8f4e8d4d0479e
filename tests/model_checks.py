"""What must hold of an export and its engines, as functions: the tests assert them, and `test_broken_builds` shows that
each one fails on a build with the fault it is there for."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

from tests import compare
from tests.exported import Exported, append, greedy, head_rows, prefill, shifted, trunk_rows
from tests.oracle.model import Model, Rows

NUM_POSITIONS = 96


@cache
def oracle(path: Path) -> Model:
    return Model(path)


def token_ids(vocab_size: int, n: int = NUM_POSITIONS, seed: int = 3) -> list[int]:
    """n ids drawn evenly from the whole vocabulary."""
    ids: list[int] = np.random.default_rng(seed).integers(0, vocab_size, n).tolist()
    return ids


@cache
def oracle_rows(path: Path, vocab_size: int, n: int = NUM_POSITIONS) -> Rows:
    """The reference's trunk over `token_ids`."""
    return oracle(path).trunk(token_ids(vocab_size, n))


def check_logits(what: str, got: np.ndarray, want: np.ndarray) -> None:
    """Within the bound of the logits' scale, and the same greedy token in every row."""
    compare.assert_close(got, want, what=what, max_abs=compare.logits_max_abs(want))
    compare.assert_same_choices(got, want, what)


def check_trunk(exported: Exported) -> None:
    """Logits and hidden of every position, and all state after them, are the reference's."""
    vocab = exported.manifest.geometry.vocab_size
    want = oracle_rows(exported.model, vocab)
    trunk = exported.trunk()
    logits, hidden = trunk_rows(trunk, token_ids(vocab))
    check_logits("trunk logits", logits, want.logits)
    compare.assert_close(hidden, want.hidden, what="trunk hidden", max_abs=compare.HIDDEN_MAX_ABS)
    check_state("after verify passes", trunk.state(), want.state)
    in_one_pass = prefill(trunk, token_ids(vocab))
    compare.assert_close(in_one_pass, want.hidden, what="hidden of one prefill pass", max_abs=compare.HIDDEN_MAX_ABS)
    check_logits("logits after a prefill pass", trunk.logits, want.logits[-1:])
    check_state("after one prefill pass", trunk.state(), want.state)


def check_state(when: str, got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for name, values in want.items():
        compare.assert_close(got[name][0], values, what=f"{name} {when}", max_abs=compare.STATE_MAX_ABS)


def check_head(exported: Exported) -> None:
    """The head's logits at every position are the reference's."""
    vocab = exported.manifest.geometry.vocab_size
    before = shifted(oracle_rows(exported.model, vocab).hidden)
    want = oracle(exported.model).head(token_ids(vocab), before)
    _, draft = exported.engines()
    check_logits("head logits", head_rows(draft, token_ids(vocab), before.astype(np.float32)), want.logits)


def check_chain(exported: Exported, n: int) -> None:
    """The head's logits along a chain of ``n`` drafts, where it is fed its own tokens and hiddens."""
    vocab = exported.manifest.geometry.vocab_size
    rows, before = token_ids(vocab), shifted(oracle_rows(exported.model, vocab).hidden)
    _, draft = exported.engines()
    first, last = np.split(before.astype(np.float32), [-1])
    for step in range(1, n + 1):
        want = oracle(exported.model).head(rows, before)
        draft.start(greedy)
        draft.prefill(token_ids(vocab)[:-1], first)
        drafted = draft.draft(token_ids(vocab)[-1:], last, step)
        check_logits(f"head logits of draft {step}", draft.logits, want.logits[-1:])
        assert drafted[-1] == want.logits[-1].argmax()
        rows, before = [*rows, int(drafted[-1])], np.concatenate([before, want.hidden[-1:]])


def check_long_memory(exported: Exported, n: int = 400) -> None:
    """With next to no decay, logits after ``n`` tokens still are the reference's."""
    vocab = exported.manifest.geometry.vocab_size
    logits, _ = trunk_rows(exported.trunk(), token_ids(vocab, n))
    want = oracle_rows(exported.model, vocab, n).logits
    compare.assert_close(logits[-1:], want[-1:], what=f"logits after {n} tokens", max_rel=compare.LONG_MEMORY_MAX_REL)


def check_rows_agree(exported: Exported, start: int, n: int) -> None:
    """After a prefill of ``start`` tokens, passes of 2..8 rows over the next ``n`` give the very logits, hiddens and
    states that one-token passes give."""
    vocab = exported.manifest.geometry.vocab_size
    ids = token_ids(vocab, start + n, seed=start)
    trunk = exported.trunk()

    def begin() -> None:
        trunk.start(greedy)
        if start:
            prefill(trunk, ids[:start])

    begin()
    single, states = [], []
    for token in ids[start:]:
        single.append(append(trunk, [token], 1))
        states.append(trunk.state())
    for rows in range(2, trunk.max_rows + 1):
        begin()
        for first in range(0, n - rows + 1, rows):
            logits, hidden = append(trunk, ids[start + first : start + first + rows], rows)
            where = f"{rows} rows at position {start + first}"
            want = [np.concatenate(parts) for parts in zip(*single[first : first + rows], strict=True)]
            compare.assert_same_bits(logits, want[0], f"logits of {where}")
            compare.assert_same_bits(hidden, want[1], f"hidden of {where}")
            compare.assert_same_state(trunk.state(), states[first + rows - 1], f"state after {where}")


def check_rollback(exported: Exported, start: int, rows: int) -> None:
    """However many of ``rows`` provisional tokens are kept, state and all that follows are as if the others had never
    been."""
    vocab = exported.manifest.geometry.vocab_size
    ids, followers = token_ids(vocab, start + rows, seed=start), token_ids(vocab, 3, seed=1)
    trunk = exported.trunk()
    for keep in range(1, rows + 1):
        prefill(trunk, ids[:start])
        trunk.verify(ids[start:])
        trunk.commit(keep)
        state, (logits, hidden) = trunk.state(), append(trunk, followers, 1)
        prefill(trunk, ids[:start])
        append(trunk, ids[start : start + keep], 1)
        where = f"{keep} of {rows} rows kept at position {start}"
        compare.assert_same_state(state, trunk.state(), f"state with {where}")
        want_logits, want_hidden = append(trunk, followers, 1)
        compare.assert_same_bits(logits, want_logits, f"logits after {where}")
        compare.assert_same_bits(hidden, want_hidden, f"hidden after {where}")
