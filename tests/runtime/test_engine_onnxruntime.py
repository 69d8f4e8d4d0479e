"""The engines on ONNX Runtime: passes of many rows equal one-row passes bit by bit, and a rollback leaves no trace."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engines.errors import EngineError, NumericError
from engines.manifest import load_manifest
from runtime import onnx_draft
from runtime.engine_onnxruntime import open_engines
from runtime.onnx_session import CACHE_STEP, check_version, run_session
from runtime.sampling import SamplingParams, choose
from tests import compare
from tests.exported import Exported, append, greedy, prefill, shifted, trunk_rows
from tests.model_checks import check_logits, check_rollback, check_rows_agree, check_state, oracle_rows, token_ids
from tests.named_inputs import GEOMETRIES

Export = Callable[[str], Exported]

MODELS = [*GEOMETRIES, "mixed_types", "other_types", "trained"]


@pytest.mark.parametrize("name", MODELS)
def test_many_rows_equal_single_ones(exported: Export, name: str) -> None:
    """From the start of a sequence on."""
    check_rows_agree(exported(name), start=0, n=16)


@pytest.mark.parametrize("name", MODELS)
def test_many_rows_at_the_cache_border(exported: Export, name: str) -> None:
    """Where the cache grows: a pass of many rows then sees a longer cache than the one-row passes before the border."""
    check_rows_agree(exported(name), start=CACHE_STEP - 9, n=16)


def test_many_rows_on_two_threads(exported: Export) -> None:
    """Threads share a product out by its size, so differently for many rows; no sum is cut."""
    check_rows_agree(replace(exported("trained"), threads=2), start=0, n=16)


@pytest.mark.parametrize(
    ("name", "start"),
    [("f32", 1), ("heads_odd", 1), ("trained", 1), ("heads_odd", CACHE_STEP - 3), ("mixed_types", CACHE_STEP - 3)],
)
def test_rollback(exported: Export, name: str, start: int) -> None:
    check_rollback(exported(name), start, rows=5)


def test_rollback_twice(exported: Export) -> None:
    """A rollback after a rollback, with passes of other sizes between, which swap the two copies of the state."""
    trunk = exported("heads_odd").trunk()
    ids, kept = token_ids(320, 60), list[int]()
    prefill(trunk, ids[:10])
    for rows, keep in ((4, 2), (8, 1), (1, 1), (3, 2), (5, 5), (2, 1), (2, 1), (7, 3)):
        at = 10 + sum(kept)
        trunk.verify([*ids[at : at + keep], *ids[-rows:][: rows - keep]])
        trunk.commit(keep)
        kept.append(keep)
    state, total = trunk.state(), 10 + sum(kept)
    assert trunk.position == total
    prefill(trunk, ids[:10])
    append(trunk, ids[10:total], 1)
    compare.assert_same_state(state, trunk.state(), "state after rollbacks")


@pytest.mark.parametrize("name", ["f32", "heads_odd", "q4_k_m"])
def test_prefill_in_any_chunks(exported: Export, name: str) -> None:
    """Chunks change the rounding, not the result; the same chunks give the same bits."""
    model = exported(name)
    vocab = model.manifest.geometry.vocab_size
    want = oracle_rows(model.model, vocab)
    trunk = model.trunk()
    for chunk in (1, 7, 64, 95):
        hidden = prefill(trunk, token_ids(vocab), chunk)
        compare.assert_close(hidden, want.hidden, what=f"hidden in chunks of {chunk}", max_abs=compare.HIDDEN_MAX_ABS)
        check_logits(f"logits after chunks of {chunk}", trunk.logits, want.logits[-1:])
        check_state(f"after chunks of {chunk}", trunk.state(), want.state)
    first = trunk.state()
    prefill(trunk, token_ids(vocab), 95)
    compare.assert_same_state(trunk.state(), first, "the same prefill again")


def test_sequences_do_not_mix(exported: Export) -> None:
    """After `start`, nothing of a longer sequence before is left."""
    trunk = exported("f32").trunk()
    ids = token_ids(320, 300)
    fresh = trunk_rows(trunk, ids[:20])[0]
    prefill(trunk, ids)
    trunk.verify(ids[:3])  # left without a commit
    compare.assert_same_bits(trunk_rows(trunk, ids[:20])[0], fresh, "second sequence")


def test_a_longer_sequence_after_a_short_one(exported: Export) -> None:
    """A prompt that makes the cache grow: passes of a size met before then read the new cache, not the old one."""
    ids = token_ids(320, CACHE_STEP + 40)
    trunk, fresh = exported("f32").trunk(), exported("f32").trunk()
    trunk_rows(trunk, ids[:20])
    wanted = []
    for engine in (fresh, trunk):
        prefill(engine, ids[:CACHE_STEP])
        engine.prefill(ids[CACHE_STEP:-16])
        wanted.append((append(engine, ids[-16:], engine.max_rows)[0], engine.state()))
    compare.assert_same_bits(wanted[1][0], wanted[0][0], "logits of the longer sequence")
    compare.assert_same_state(wanted[1][1], wanted[0][1], "state of the longer sequence")
    prefill(trunk, ids[:12])  # and a short one again, in the cache that has grown
    prefill(fresh, ids[:12])
    got, want = (append(engine, ids[12:20], engine.max_rows)[0] for engine in (trunk, fresh))
    compare.assert_same_bits(got, want, "logits of a short sequence in the larger cache")


@pytest.mark.parametrize("name", ["f32", "heads_odd", "trained"])
def test_head_takes_rows_in_any_split(exported: Export, name: str) -> None:
    """True rows taken before, at once, or with the draft: the same drafts, from the same logits but for rounding."""
    model = exported(name)
    vocab = model.manifest.geometry.vocab_size
    trunk, draft = model.engines()
    ids = token_ids(vocab, 20)
    before = shifted(prefill(trunk, ids))
    results: list[tuple[list[int], np.ndarray, list[int]]] = []
    for split in (0, 1, 12, 19):
        draft.start(greedy)
        if split:
            draft.prefill(ids[:split], before[:split])
        drafts, logits = draft.draft(ids[split:], before[split:], 3).tolist(), draft.logits.copy()
        assert draft.position == len(ids)
        again = draft.draft([7], before[:1], 2)
        # Its own drafts are dead rows: the next true row takes the place of the first.
        assert draft.position == len(ids) + 1
        results.append((drafts, logits, again.tolist()))
    for drafts, logits, following in results[1:]:
        assert (drafts, following) == (results[0][0], results[0][2])
        compare.assert_close(logits, results[0][1], what="logits of the third draft", max_abs=compare.LOGITS_MAX_ABS)


def test_nan_in_one_sequence_does_not_reach_the_next(exported: Export) -> None:
    """Dead cache rows count as zero times their value, which is NaN when they hold one."""
    trunk = exported("f32").trunk()
    ids = token_ids(320, 12)
    prefill(trunk, ids)
    want = trunk.logits.copy()

    def sampler(logits: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return choose(logits, positions, SamplingParams())

    trunk.start(sampler)
    trunk.prefill(ids)
    for buffer in trunk._cache.buffers.values():
        buffer[:, :, len(ids) - 1] = np.nan
    with pytest.raises(NumericError, match=str(len(ids) + 1)):
        trunk.verify(ids[:1])
    prefill(trunk, ids)
    assert np.array_equal(trunk.logits, want)


def test_old_runtime_is_refused() -> None:
    check_version("1.32.0")
    check_version("2.0.1+cpu")
    with pytest.raises(EngineError, match=r"1\.31\.1 .* install onnxruntime >= 1\.32"):
        check_version("1.31.1")


def test_damaged_export(exported: Export, tmp_path: Path) -> None:
    """A graph cut short, of the right size but garbage, or gone: one line that names it and the cure."""
    folder = tmp_path / "damaged"
    shutil.copytree(exported("f32").folder, folder)
    graph = folder / "trunk.onnx"
    whole = graph.read_bytes()
    for content in (whole[:-100], b"\xff" * len(whole), None):
        graph.unlink(missing_ok=True)
        if content is not None:
            graph.write_bytes(content)
        with pytest.raises(EngineError) as caught:
            open_engines(folder, load_manifest(folder), context_size=64)
        message = str(caught.value)
        assert "trunk.onnx" in message and "python -m export" in message and "\n" not in message


def test_head_without_drafting(exported: Export) -> None:
    """No head is loaded when none is wanted or there is none."""
    for name, wanted in (("f32", False), ("nextn_absent", True)):
        model = exported(name)
        trunk, draft = open_engines(model.folder, model.manifest, context_size=64, threads=1, draft=wanted)
        assert draft is None
        assert np.isfinite(trunk_rows(trunk, token_ids(320, 8))[0]).all()


@pytest.mark.parametrize("n", [1, 3])
def test_rows_of_the_last_round_ride_along_with_the_first_draft(
    exported: Export, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    """Catching up is no pass of its own: n drafts after any number of rows are n passes of the head."""
    trunk, draft = exported("agreeing").engines()
    hidden = shifted(trunk_rows(trunk, [1, 2, 3, 4])[1])
    passes: list[object] = []

    def counted(session: object, binding: object) -> None:
        passes.append(session)
        run_session(session, binding)  # type: ignore[arg-type]

    monkeypatch.setattr(onnx_draft, "run_session", counted)
    for rows in (1, 4):
        draft.start(greedy)
        passes.clear()
        drafts = draft.draft([1, 2, 3, 4][:rows], hidden[:rows], n)
        assert (len(drafts), len(passes)) == (n, n)
