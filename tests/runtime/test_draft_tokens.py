"""A head that knows a part of the vocabulary drafts as the whole head does with the other tokens masked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engines.draft_head import DraftHeadOptions
from engines.errors import EngineError
from runtime import check, generate
from runtime.draft_tokens import DraftTokens, load_draft_tokens
from runtime.engine import Sampler
from runtime.sampling import ParamsSampler, SamplingParams
from tests.exported import Exported, export, generate_tokens
from tests.peer.speculation import recorded
from tests.runtime.command import run_main
from tests.vocabulary_files import TRAINED_MODEL

ROWS = 1024
SAMPLERS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(0.8, seed=3),
    "top-k and top-p": SamplingParams(1.2, top_k=40, top_p=0.9, seed=4),
    "min-p": SamplingParams(1.0, min_p=0.05, seed=5),
}


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return export(TRAINED_MODEL, tmp_path_factory.mktemp("cut") / "x", DraftHeadOptions(ROWS))


class MaskedHead:
    """A whole draft engine whose sampler sees -inf at the tokens outside ``ids``."""

    def __init__(self, engine, ids: np.ndarray) -> None:  # type: ignore[no-untyped-def]
        self._engine, self._ids = engine, ids

    def __getattr__(self, name: str):  # type: ignore[no-untyped-def]
        return getattr(self._engine, name)

    def start(self, sampler: Sampler) -> None:
        def masked(logits: np.ndarray, positions: np.ndarray) -> np.ndarray:
            kept = np.full_like(logits, -np.inf)
            kept[:, self._ids] = logits[:, self._ids]
            return sampler(kept, positions)

        self._engine.start(masked)


@pytest.mark.parametrize("name", SAMPLERS)
def test_drafts_are_the_masked_whole_heads(exported: Callable[[str], Exported], cut: Exported, name: str) -> None:
    """Text, drafts and accepted counts, round by round; and the text is that of plain decoding."""
    sampler = ParamsSampler(SAMPLERS[name])
    ids = load_draft_tokens(cut.folder, cut.manifest).ids
    assert ids is not None and len(ids) == ROWS
    trunk, head = exported("trained").engines()
    cut_trunk, cut_head = cut.engines()
    accepted = 0
    for run in recorded()[::8]:
        prompt = run.prompt[:16]
        plain, _, _ = generate_tokens(trunk, None, prompt, 40, 0, sampler)
        text, rounds, stats = generate_tokens(cut_trunk, cut_head, prompt, 40, 3, sampler)
        masked, want, _ = generate_tokens(trunk, MaskedHead(head, ids), prompt, 40, 3, sampler)  # type: ignore[arg-type]
        assert text == plain == masked
        assert (rounds.drafted, rounds.accepted) == (want.drafted, want.accepted)
        accepted += stats.draft_n_accepted
    assert accepted > 5


def test_what_a_smaller_head_costs_in_acceptance(exported: Callable[[str], Exported], cut: Exported) -> None:
    """Fewer drafts are right, by no more than the tokens that the head cannot name explain."""
    ids = set(load_draft_tokens(cut.folder, cut.manifest).ids.tolist())  # type: ignore[union-attr]
    shares, unknown, total = [], 0, 0
    for model in (exported("trained"), cut):
        trunk, head = model.engines()
        drafted = accepted = 0
        for run in recorded()[::4]:
            text, _, stats = generate_tokens(trunk, head, run.prompt, 64, 1)
            drafted, accepted = drafted + stats.draft_n, accepted + stats.draft_n_accepted
            unknown, total = unknown + sum(token not in ids for token in text), total + len(text)
        shares.append(accepted / drafted)
    assert shares[0] - unknown / total - 0.05 < shares[1] <= shares[0] + 0.02
    assert 0 < unknown < total


def test_masked_rows() -> None:
    tokens = DraftTokens(6, np.array([1, 4], np.int32))
    row = tokens.whole_rows(np.array([[2.0, 3.0]], np.float32))
    assert row.tolist() == [[-np.inf, 2.0, -np.inf, -np.inf, 3.0, -np.inf]]
    assert tokens.whole_rows(np.zeros((0, 2), np.float32)).shape == (0, 6)
    logits = np.zeros((1, 6), np.float32)
    assert DraftTokens(6).whole_rows(logits) is logits


@pytest.mark.parametrize("ids", [[], [3, 3], [5, 4], [-1, 4], [7, 4096]])
def test_damaged_ids(cut: Exported, tmp_path: Path, ids: list[int]) -> None:
    path = tmp_path / "draft_ids.bin"
    path.write_bytes(np.array(ids, "<i4").tobytes())
    manifest = replace(cut.manifest, files={"draft_ids": (path.name, path.stat().st_size)})
    with pytest.raises(EngineError, match=r"draft_ids.bin: is no list of ascending tokens below 4096"):
        load_draft_tokens(tmp_path, manifest)
    path.unlink()
    with pytest.raises(EngineError, match="missing"):
        load_draft_tokens(tmp_path, manifest)


# ---------------------------------------------------------------- command lines
FLAGS = ("--draft-head-rows", ROWS, "--draft-head-type", "q4_k")


def test_check_tells_what_the_head_knows(tmp_path: Path) -> None:
    short = ("--cache-dir", tmp_path, "--n-prompts", 2, "-n", 24, "--threads", 1, "--json")
    whole = run_main(check.main, TRAINED_MODEL, *short).json
    cut = run_main(check.main, TRAINED_MODEL, *short, *FLAGS).json
    assert (whole["spec_agree"], whole["draft_known"]) == (1.0, 1.0)
    assert cut["spec_agree"] == 1.0
    assert cut["draft_top1"] <= cut["draft_known"] < 1.0
    assert np.isfinite(cut["kl"])
    assert len(list(tmp_path.iterdir())) == 2, "one export each"


def test_generate_on_the_way(tmp_path: Path) -> None:
    flags = ("--cache-dir", tmp_path, "--threads", 1, "-p", "What does len do?", "-n", 24, "--json")
    whole = run_main(generate.main, TRAINED_MODEL, *flags)
    cut = run_main(generate.main, TRAINED_MODEL, *flags, *FLAGS)
    assert cut.json["text"] == whole.json["text"]
    assert "note: draft head: 1024 of 4096 rows, Q6_K as Q4_K" in cut.err
    again = run_main(generate.main, TRAINED_MODEL, *flags, *FLAGS)
    assert again.json["tokens"] == cut.json["tokens"] and "note" not in again.err, "exported once"
    folder = next(iter(sorted(tmp_path.iterdir(), key=lambda path: -len(path.name))))
    run_main(generate.main, folder, *flags[2:], *FLAGS).refused(2, "is exported already", "give the .gguf")
    assert run_main(generate.main, folder, *flags[2:]).json["tokens"] == cut.json["tokens"]


def test_flags_that_are_refused(tmp_path: Path) -> None:
    run = lambda *flags: run_main(generate.main, TRAINED_MODEL, "--cache-dir", tmp_path, "-p", "x", *flags)  # noqa: E731
    run("--draft-head-rows", "0").refused(2, "'0': wanted a number of tokens, or full")
    run("--draft-head-rows", "20").refused(2, "--draft-head-rows 20: wanted", "always kept")
    run("--draft-head-type", "q2_k").refused(2, "--draft-head-type")
    run("--draft-head-text", tmp_path / "absent").refused(2, "--draft-head-rows N")
    run("--draft-head-rows", 900, "--draft-head-text", tmp_path / "absent").refused(2, "absent: cannot be read")
    assert list(tmp_path.iterdir()) == []
