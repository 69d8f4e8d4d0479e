"""`python -m runtime.eval`: prompts, figures, reports."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from engines.errors import UsageError
from runtime import eval as evaluation
from runtime.engine_onnxruntime import OnnxTrunkEngine
from runtime.evaluation.measure import DRAFTING, PLAIN, LocalModel, Run
from runtime.evaluation.prompts import load_prompts
from runtime.evaluation.summary import length_splits, summarise
from tests.exported import Exported
from tests.runtime.command import Outcome, run_main

RUN = Run(PLAIN, 0.0, 0, "a", 10, 8, 80.0, "rounds", 7, 0, 0)


@pytest.fixture(scope="module")
def reports(exported: Callable[[str], Exported], tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path]:
    """One evaluation of the trained model, and the folder of its reports."""
    folder = tmp_path_factory.mktemp("eval")
    flags = [f for kind in ("json", "csv", "html") for f in (f"--{kind}", folder / f"report.{kind}")]
    some = ["--per-category", 1, "-n", 12, "-t", 1, "--lengths", "64"]
    return run_main(evaluation.main, exported("trained").folder, *some, *flags), folder


def read(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def test_an_evaluation(reports: tuple[Outcome, Path]) -> None:
    ran, folder = reports
    assert ran.code == 0 and ran.err == "", ran.err
    report = read(folder)
    assert report["failures"] == report["left_out"] == []
    names = [(g["temperature"], g["split"], g["name"]) for g in report["groups"]]
    categories = ["python", "reference", "code", "talk", "long input"]
    for temperature in (0.0, 0.6):
        wanted = [("all", "all"), *(("category", c) for c in categories)]
        wanted += [("length", "below 64"), ("length", "64 and more")]
        assert [name[1:] for name in names if name[0] == temperature] == wanted
    assert "temperature 0.6" in ran.out and "greedy" in ran.out


def test_the_figures_add_up(reports: tuple[Outcome, Path]) -> None:
    report = read(reports[1])
    for group in report["groups"]:
        plain, drafting = (group["sources"][source] for source in (PLAIN, DRAFTING))
        assert (plain["tokens_per_round"], plain["over_plain"], plain["drafted"]) == (1.0, 1.0, 0)
        assert drafting["tokens"] == plain["tokens"] and drafting["prompts"] == plain["prompts"]
        assert drafting["tokens_per_round"] == pytest.approx(1 + drafting["accepted"] / drafting["rounds"], rel=1e-4)
        shares = drafting["acceptance_by_position"]
        assert shares == sorted(shares, reverse=True) and len(shares) <= 3
        assert drafting["over_plain"] == pytest.approx(plain["ms"] / drafting["ms"], rel=1e-3)
    whole = [g for g in report["groups"] if g["split"] == "all"]
    for split in ("category", "length"):
        parts = [g["sources"][DRAFTING]["accepted"] for g in report["groups"] if g["split"] == split]
        assert sum(parts) == sum(g["sources"][DRAFTING]["accepted"] for g in whole) > 0
    texts = {(r["source"], r["temperature"], r["prompt"]): r["text"] for r in report["runs"]}
    assert all(text == texts[(PLAIN, *key[1:])] for key, text in texts.items())


def test_csv_has_a_line_a_text(reports: tuple[Outcome, Path]) -> None:
    report = read(reports[1])
    rows = list(csv.DictReader(io.StringIO((reports[1] / "report.csv").read_text())))
    assert [(r["source"], int(r["prompt"]), int(r["tokens"])) for r in rows] == [
        (r["source"], r["prompt"], r["tokens"]) for r in report["runs"]
    ]


def test_the_page_stands_alone(reports: tuple[Outcome, Path]) -> None:
    page = (reports[1] / "report.html").read_text(encoding="utf-8")
    open_tags: list[str] = []
    addresses: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            addresses.extend(name for name, _ in attributes if name in ("src", "href", "xlink:href"))
            if tag != "meta":
                open_tags.append(tag)

        def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            pass

        def handle_endtag(self, tag: str) -> None:
            assert open_tags.pop() == tag

    Reader().feed(page)
    assert open_tags == [] and addresses == [] and "url(" not in page and "@import" not in page
    assert page.count("<svg role") == 8 and page.count("<table>") == 2 and "long input" in page


def test_summary_by_hand() -> None:
    drafted = replace(
        RUN, source=DRAFTING, ms=40.0, rounds=4, drafted=6, accepted=4, offered=(4, 2), accepted_at=(3, 1)
    )
    other = replace(RUN, prompt=1, category="b", prompt_tokens=200, ms=160.0)
    groups = summarise([RUN, drafted, other], [128])
    by_name = {group["name"]: group["sources"] for group in groups}
    assert list(by_name) == ["all", "a", "b", "below 128", "128 and more"]
    assert by_name["a"] == by_name["below 128"]
    assert by_name["all"][PLAIN]["tokens_per_second"] == pytest.approx(1000 * 16 / 240, rel=1e-4)
    found = by_name["a"][DRAFTING]
    assert (found["over_plain"], found["tokens_per_round"]) == (2.0, 2.0)
    assert found["acceptance_by_position"] == [0.75, 0.5] and found["acceptance_rate"] == 0.66667


def test_length_splits() -> None:
    assert length_splits([]) == [("any length", 0, float("inf"))]
    assert [name for name, _, _ in length_splits([4, 8])] == ["below 4", "4 to 7", "8 and more"]


def test_a_text_that_differs_is_found(exported: Callable[[str], Exported], monkeypatch: pytest.MonkeyPatch) -> None:
    generate = LocalModel._generate

    def wrong(self: LocalModel, source: str, *rest: Any) -> Any:
        tokens, stats = generate(self, source, *rest)
        return (tokens if source == PLAIN else [*tokens[:-1], 7]), stats

    monkeypatch.setattr(LocalModel, "_generate", wrong)
    some = ["--per-category", 1, "-n", 4, "-t", 1, "--temps", "0"]
    ran = run_main(evaluation.main, exported("trained").folder, *some)
    assert ran.code == 1 and ran.err.count("the text with drafts is another") == 5


def test_a_state_that_is_not_rolled_back_is_found(
    exported: Callable[[str], Exported], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Refused drafts stay in the recurrent state, as in a broken build."""
    commit = OnnxTrunkEngine.commit

    def without_replay(self: OnnxTrunkEngine, n_keep: int) -> None:
        replay, self._replay = self._replay, None
        commit(self, n_keep)
        self._replay = replay

    monkeypatch.setattr(OnnxTrunkEngine, "commit", without_replay)
    (tmp_path / "set.jsonl").write_text(json.dumps({"category": "code", "prompt": "def water(self, bed, litres):"}))
    some = ["--prompts", tmp_path / "set.jsonl", "-n", 48, "-t", 1, "--temps", "0,0.6"]
    ran = run_main(evaluation.main, exported("trained").folder, *some)
    assert ran.code == 1 and "set.jsonl:1, temperature 0.6: the text with drafts is another" in ran.err


def test_prompts_that_do_not_fit_are_named(exported: Callable[[str], Exported]) -> None:
    some = ["--per-category", 1, "-n", 2, "-c", 100, "-t", 1, "--temps", "0"]
    ran = run_main(evaluation.main, exported("trained").folder, *some)
    assert ran.code == 0 and "4 prompts" in ran.out and "left out: prompts.jsonl:" in ran.out


def test_prompt_files(tmp_path: Path) -> None:
    file = tmp_path / "set.jsonl"
    rows = [
        {"category": "maths", "turns": ["1 + 1?", "And twice that?"], "question_id": 1},
        {
            "category": "chat",
            "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}],
        },
        {"prompt": "Once upon a time"},
        {"category": "maths", "prompt": "2 + 2?"},
    ]
    file.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8")
    prompts = load_prompts([file])
    assert [p.category for p in prompts] == ["maths", "chat", "all", "maths"]
    assert prompts[0].text == "1 + 1?" and len(prompts[1].messages) == 2
    with pytest.raises(UsageError, match=r"set.jsonl:3: has 2 messages"):
        assert prompts[1].text
    assert [p.place for p in load_prompts([file], 1)] == [f"{file}:{n}" for n in (1, 3, 5)]
    assert {p.category for p in load_prompts([])} == {"python", "reference", "code", "talk", "long input"}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not JSON"),
        ("[]", "wanted an object"),
        ('{"category": 5, "prompt": "x"}', "category"),
        ('{"category": "a\\nb", "prompt": "x"}', "of one line"),
        ('{"category": "a\\ud800", "prompt": "x"}', "of one line"),
        ('{"category": "a"}', "has none of them"),
        ('{"turns": ["x\\ud800"]}', "jsonl:1: turns has a lone surrogate"),
        ('{"prompt": "x", "turns": ["y"]}', "has prompt and turns"),
        ('{"prompt": ""}', "none of them empty"),
        ('{"turns": []}', "none of them empty"),
        ('{"messages": [{"role": "user"}]}', "none of them empty"),
        ("", "no prompt in there"),
    ],
)
def test_wrong_prompt_files(line: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "set.jsonl").write_text(line)
    with pytest.raises(UsageError, match=says) as caught:
        load_prompts([tmp_path / "set.jsonl"])
    assert "set.jsonl" in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "nothing to evaluate"),
        (["--server", "localhost:8080"], "wanted the address"),
        (["--server", "http://h:x"], "wanted the address"),
        (["--server", "http://h", "--raw"], "--raw"),
        (["M", "-n", 0], "--predict"),
        (["M", "--per-category", -1], "--per-category"),
        (["M", "--lengths", "8,4"], "rising"),
        (["M", "--lengths", "a"], "whole numbers"),
        (["M", "--temps", "warm"], "wanted numbers"),
        (["M", "--temps", "-1"], "temp"),
        (["M", "-s", -1], "--seed"),
        (["M", "--html", "/no/such/folder/page.html"], "no such folder"),
        (["M", "--prompts", "/no/such/file"], "cannot be read"),
    ],
)
def test_wrong_use(flags: list[object], says: str) -> None:
    run_main(evaluation.main, *flags).refused(2, says)
