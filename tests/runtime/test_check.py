"""`runtime.check`: passes on sound builds, fails on one that loses state, and its floor catches a broken head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from runtime.agreement import HeadAgreement, PromptResult, Report, compare, head_agreement
from runtime.check import main
from runtime.controller import FixedDraft
from runtime.engine_onnxruntime import OnnxDraftEngine, OnnxTrunkEngine
from runtime.sampling import SamplingParams
from runtime.session import Session
from runtime.speculative import SpecStats
from tests.runtime.command import Outcome, run_main
from tests.runtime.fake_engines import ToyHead, ToyTrunk, UnrestoredTrunk, logits_of
from tests.vocabulary_files import TRAINED_MODEL

SHORT = ("--n-prompts", 2, "--prompt-length", 16, "-n", 40)


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    cache = tmp_path_factory.mktemp("cache")
    return lambda model, *flags: run_main(main, model, "--cache-dir", cache, "--threads", 1, *flags)


# ---------------------------------------------------------------- the command
@pytest.mark.parametrize(("draft_n", "temperature"), [(1, 0), (3, 0), (4, 0.8)])
def test_a_sound_model_passes(check: Callable[..., Outcome], draft_n: int, temperature: float) -> None:
    report = check(TRAINED_MODEL, *SHORT, "--spec-draft-n-max", draft_n, "--temp", temperature, "--json").json
    assert (report["passed"], report["spec_agree"], report["first_differences"]) == (True, 1.0, [None, None])
    assert (report["draft_n"], report["temperature"], report["backend"]) == (draft_n, temperature, "onnxruntime")
    assert report["draft_top1"] > 0.4
    assert 0.1 < report["kl"] < 2.0
    assert len(report["acceptance_by_position"]) == draft_n
    assert report["acceptance_rate"] > 0.25
    assert report["tokens_per_step"] == 1 + report["timings"]["draft_n_accepted"] / report["timings"]["verify_steps"]
    assert (report["plain_timings"]["draft_n"], report["plain_timings"]["verify_steps"]) == (0, 2 * 39)


def test_the_table_names_every_measure(check: Callable[..., Outcome]) -> None:
    outcome = check(TRAINED_MODEL, *SHORT)
    assert (outcome.code, outcome.err) == (0, "")
    names = (
        "SPEC_AGREE",
        "DRAFT_TOP1",
        "KL(trunk || draft)",
        "acceptance rate",
        "tokens per step",
        "2 of 2 texts equal",
    )
    for name in names:
        assert name in outcome.out


def test_prompts_from_a_file(check: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("Return the length of an object.\n\nSort a list\n", encoding="utf-8")
    report = check(TRAINED_MODEL, "--prompts", tmp_path / "prompts.txt", "-n", 12, "--json").json
    assert len(report["first_differences"]) == 2
    check(TRAINED_MODEL, "--prompts", tmp_path / "none.txt").refused(2, "none.txt")
    (tmp_path / "longer.txt").write_text("Sort a list\n" + "word " * 300 + "\n", encoding="utf-8")
    assert check(TRAINED_MODEL, "--prompts", tmp_path / "longer.txt", "-n", 12, "--json").json["spec_agree"] == 1.0
    (tmp_path / "empty.txt").write_text("\n")
    check(TRAINED_MODEL, "--prompts", tmp_path / "empty.txt").refused(2, "empty.txt")


def test_a_build_that_does_not_restore_state_fails(
    check: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    def keep_everything(self: OnnxTrunkEngine, n_keep: int) -> None:
        dropped = self._pending - n_keep
        sound_commit(self, self._pending)
        self._position -= dropped

    sound_commit = OnnxTrunkEngine.commit
    monkeypatch.setattr(OnnxTrunkEngine, "commit", keep_everything)
    outcome = check(TRAINED_MODEL, *SHORT)
    assert outcome.code == 1
    assert "failed: prompt 0: the text differs from token" in outcome.err
    assert "SPEC_AGREE             0." in outcome.out
    outcome = check(TRAINED_MODEL, *SHORT, "--json")
    assert (outcome.code, '"passed": false' in outcome.out) == (1, True)


def test_a_broken_head_shows_only_in_the_acceptance(
    check: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    def off_by_one(self: OnnxDraftEngine, tokens: Sequence[int], hidden: np.ndarray, n: int) -> np.ndarray:
        return (sound_draft(self, tokens, hidden, n) + 1) % 4000

    sound_draft = OnnxDraftEngine.draft
    assert check(TRAINED_MODEL, *SHORT, "--min-acceptance", 0.25).code == 0
    monkeypatch.setattr(OnnxDraftEngine, "draft", off_by_one)
    outcome = check(TRAINED_MODEL, *SHORT, "--min-acceptance", 0.25)
    assert outcome.code == 1
    assert "SPEC_AGREE             1.000" in outcome.out
    assert "acceptance rate 0.0" in outcome.err and "below 0.25" in outcome.err
    outcome = check(TRAINED_MODEL, *SHORT)
    assert (outcome.code, "warning: hardly any draft" in outcome.err) == (0, True)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--n-prompts", 0), "--n-prompts"),
        (("--prompt-length", 0), "--prompt-length"),
        (("--spec-draft-n-max", 0), "--spec-draft-n-max"),
        (("--spec-draft-n-max", 10**6), "1000000"),
        (("-n", 2), "--predict"),
        (("-c", 32), "a context of 32"),
        (("-c", 34, "--n-prompts", 1), "wanted room for 3"),
        (("-c", 100, "--prompt-length", 4000, "--n-prompts", 1), "a context of 100"),
        (("--seed", -1), "--seed"),
        (("--temp", -1), "temperature"),
        (("--min-acceptance", 1.5), "1.5"),
    ],
)
def test_edges_that_are_refused(check: Callable[..., Outcome], flags: tuple[object, ...], says: str) -> None:
    check(TRAINED_MODEL, *flags).refused(2, says)


def test_the_shortest_text_is_drafted(check: Callable[..., Outcome]) -> None:
    report = check(TRAINED_MODEL, "-c", 35, "-n", 3, "--n-prompts", 1, "--json").json
    assert (report["timings"]["predicted_n"], report["timings"]["draft_n"]) == (3, 1)


def test_a_model_without_head_has_nothing_to_check(check: Callable[..., Outcome], tiny: Callable[[str], Path]) -> None:
    check(tiny("nextn_absent")).refused(2, "no NextN draft head")


# ---------------------------------------------------------------- the measures, on toy engines
def toy_session(trunk: ToyTrunk, head: ToyHead, draft_n: int = 3) -> Session:
    return Session(
        folder=Path(), manifest=cast(Any, None), backend="toy", spec_type="draft-mtp", context_size=64, trunk=trunk,
        draft=head, tokenizer=cast(Any, SimpleNamespace(end_token_ids=())), controller=FixedDraft(draft_n),
    )  # fmt: skip


PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5, 8, 9, 7, 9, 3, 2, 3]]
GREEDY = SamplingParams()


def test_toy_engines_that_agree() -> None:
    session = toy_session(ToyTrunk(), ToyHead())
    report = Report.of([compare(session, prompt, GREEDY, 30) for prompt in PROMPTS])
    assert (report.spec_agree, report.draft_top1, report.drafting.acceptance_rate) == (1.0, 1.0, 1.0)
    assert (report.kl, report.failures(1.0)) == (None, [])  # the toys show no logits
    assert [r.head.n for r in report.results] == [31] * 3


def test_toy_engines_that_do_not() -> None:
    def sometimes_wrong(token: int, position: int) -> int:
        return token if position % 3 else (token + 1) % 13

    session = toy_session(UnrestoredTrunk(), ToyHead(sometimes_wrong))
    report = Report.of([compare(session, prompt, GREEDY, 30) for prompt in PROMPTS])
    assert report.spec_agree == 0.0
    assert [line.split(":")[0] for line in report.failures(0.0)] == ["prompt 0", "prompt 1", "prompt 2"]
    sound = toy_session(ToyTrunk(), ToyHead(sometimes_wrong))
    head = head_agreement(sound, PROMPTS[0], compare(sound, PROMPTS[0], GREEDY, 30).plain)
    assert (head.n, head.n_top1) == (31, sum(position % 3 > 0 for position in range(7, 38)))


def test_kl_compares_the_same_position() -> None:
    class Trunk(ToyTrunk):
        def verify(self, tokens: Sequence[int]) -> Any:
            result = super().verify(tokens)
            self.logits = np.concatenate([logits_of(int(state)) for state in result.hidden[:, 0]])
            return result

    class Head(ToyHead):
        shift = 0.0

        def draft(self, tokens: Sequence[int], hidden: np.ndarray, n: int) -> np.ndarray:
            drafts = super().draft(tokens, hidden, n)
            self.logits = logits_of(self.last_state) + 3.0  # a constant changes no probability
            self.logits[0, 0] += self.shift
            return drafts

    head = Head()
    session = toy_session(Trunk(), head)
    agreement = head_agreement(session, PROMPTS[0], [1, 2, 3, 4])
    assert agreement.kl_sum == pytest.approx(0.0, abs=1e-6)
    head.shift = 2.0
    agreement = head_agreement(session, PROMPTS[0], [1, 2, 3, 4])
    assert agreement.kl_sum is not None and agreement.kl_sum > 0.1


@pytest.mark.parametrize(
    ("plain", "drafted", "at"),
    [([1, 2, 3], [1, 2, 3], None), ([1, 2, 3], [1, 9, 3], 1), ([1, 2, 3], [1, 2], 2), ([], [4], 0)],
)
def test_the_first_difference(plain: list[int], drafted: list[int], at: int | None) -> None:
    result = PromptResult(plain, drafted, SpecStats(), SpecStats(), HeadAgreement(1, 0, None, 1))
    assert result.first_difference == at
    assert len(Report.of([result]).failures(0.0)) == (0 if at is None else 1)
