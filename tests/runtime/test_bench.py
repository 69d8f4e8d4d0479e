"""`runtime.bench` on small models: what it measures, that it notices wrong texts and counts, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.bench import main
from runtime.engine_onnxruntime import OnnxTrunkEngine
from tests.known_text import ENDLESS
from tests.runtime.command import Outcome, run_main
from tests.vocabulary_files import TRAINED_MODEL

SHORT = ("-n", 12, "--repeats", 2, "--bandwidth", 50)
PASSAGE = "Return the length of an object. The argument may be a sequence"

Bench = Callable[..., Outcome]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """``bench(model, flags...)`` with a short prompt, one depth and no prefill unless the flags say otherwise."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "passage.txt").write_text(PASSAGE + "\n", encoding="utf-8")
    given = ("--cache-dir", folder / "cache", "--threads", 1, "-f", folder / "passage.txt", "--depths", 0)
    return lambda model, *flags: run_main(main, model, *given, "--prefill", "", *SHORT, *flags)


@pytest.fixture(scope="module")
def report(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("report") / "report.json"
    flags = ("--depths", "0,40,9000", "--prefill", "300,9000", "--spec-draft-n-max", 2, "--json", path)
    outcome = bench(TRAINED_MODEL, *flags)
    assert (outcome.code, outcome.err) == (0, "")
    return json.loads(path.read_text()) | {"table": outcome.out}


def test_the_report_holds_every_setting(report: dict[str, Any]) -> None:
    assert (report["format"], report["backend"], report["model"]) == (1, "onnxruntime", "tiny-qwen35-mtp")
    assert report["failures"] == [] and report["gpu"] is None
    at_0, at_40, at_9000 = report["depths"]
    assert [len(entry["prompt_tokens"]) for entry in (at_0, at_40)] == [1, 1]
    assert at_40["prompt_tokens"][0] == at_0["prompt_tokens"][0] + 40
    for entry in (at_0, at_40):
        settings = {setting["name"]: setting for setting in entry["settings"]}
        assert list(settings) == ["plain", "0, head fed", "1", "2", "adaptive"]
        for setting in settings.values():
            speed = setting["tokens_per_second"]
            assert 0 < speed["least"] <= speed["median"] <= speed["most"]
            assert len(setting["runs"]) == 2
            assert setting["accepted"] <= setting["drafted"]
        assert settings["plain"]["over_plain"] == {"median": 1.0, "least": 1.0, "most": 1.0}
        assert settings["plain"]["tokens_per_round"] == settings["0, head fed"]["tokens_per_round"] == 1.0
        assert settings["plain"]["acceptance_rate"] is None and settings["plain"]["drafted"] == 0
        assert len(settings["2"]["acceptance_by_position"]) == 2
        assert settings["2"]["draft_n_used"][2] > 0
        assert settings["2"]["acceptance_rate"] == pytest.approx(
            settings["2"]["accepted"] / settings["2"]["drafted"], rel=1e-4
        )
    assert "tokens are needed, the context holds 4096" in at_9000["left_out"]


def test_the_report_holds_the_cost_of_passes(report: dict[str, Any]) -> None:
    at_0, at_40, _ = report["depths"]
    for entry in (at_0, at_40):
        assert [each["rows"] for each in entry["passes"]] == [1, 2, 3]
        assert entry["passes"][0]["over_plain"] == 1.0
        for each in (*entry["passes"], entry["draft_step"]):
            assert each["gb_per_s"] == pytest.approx(each["bytes"] / 1e6 / each["ms"]["median"], rel=1e-3)
            assert each["of_roofline"] == pytest.approx(each["gb_per_s"] / 50, rel=1e-3)
    # Keys and values of 40 positions more: two layers of two heads of 256, float32.
    assert at_40["passes"][0]["bytes"] - at_0["passes"][0]["bytes"] == 40 * 2 * 2 * 2 * 256 * 4
    assert report["bandwidth"] == {"gb_per_s": 50.0, "source": "as given"}


def test_the_report_holds_the_reading_of_prompts(report: dict[str, Any]) -> None:
    plain, with_head, left_out = report["prefill"]
    assert (plain["tokens"], plain["with_head"], with_head["with_head"]) == (300, False, True)
    assert plain["tokens_per_second"]["least"] > 0 and "context holds 4096" in left_out["left_out"]


def test_the_table_shows_it(report: dict[str, Any]) -> None:
    lines = report["table"].splitlines()
    assert lines[0].startswith("tiny-qwen35-mtp on onnxruntime")
    for words in (
        "context 40",
        "context 9000: left out",
        "tokens/round",
        "adaptive",
        "0, head fed",
        "verify rows",
        "% of roofline",
        "draft step",
        "prompt tokens",
        "read bandwidth 50 GB/s (as given)",
    ):
        assert words in report["table"], words


def test_a_chart(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "chart.png"
    assert bench(TRAINED_MODEL, "--spec-draft-n-max", 1, "--chart", path, "--repeats", 1).code == 0
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) > 5000


def test_the_device_is_measured_and_the_context_filled(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    given = ("--cache-dir", tmp_path / "cache", "--threads", 1, "--depths", "", "--prefill", "", "--repeats", 1)
    flags = ("-c", 256, "--fill", "-n", 9, "--json", path, "--spec-draft-n-max", 1)
    outcome = run_main(main, TRAINED_MODEL, *given, *flags)
    assert outcome.code == 0, outcome.err
    report = json.loads(path.read_text())
    (entry,) = report["depths"]
    assert entry["prompt_tokens"] == [256 - 9] and entry["state_is_finite"]
    assert report["how"]["prompts"] == 4
    assert 0.1 < report["bandwidth"]["gb_per_s"] < 10000 and "measured" in report["bandwidth"]["source"]
    assert "all state is finite" in outcome.out


@pytest.mark.parametrize("flags", [("--spec-draft-n-max", 0), ()])
def test_without_a_head_or_without_drafts(
    bench: Bench, tiny: Callable[[str], Path], tmp_path: Path, flags: tuple[object, ...]
) -> None:
    path = tmp_path / "report.json"
    model = TRAINED_MODEL if flags else tiny("nextn_absent")
    assert bench(model, *flags, "--json", path).code == 0
    report = json.loads(path.read_text())
    assert [setting["name"] for setting in report["depths"][0]["settings"]] == ["plain"]
    assert report["depths"][0]["draft_step"] is None


# ---------------------------------------------------------------- what is known beforehand
def expectation(path: Path, **changes: object) -> Path:
    """Of the model draft_perfect, after the letter t."""
    known = {"after": ord("t"), "tokens": ENDLESS.greedy(ord("t"), 20), "right": [1] * 20}
    path.write_text(json.dumps(known | changes))
    return path


def test_text_and_counts_as_expected(bench: Bench, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    outcome = bench(tiny("draft_perfect"), "--expect", expectation(tmp_path / "expected"), "--depths", "0,30")
    assert (outcome.code, outcome.err) == (0, "")
    assert bench(tiny("draft_perfect"), "--expect", expectation(tmp_path / "expected", right=[])).code == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokens": [*ENDLESS.greedy(ord("t"), 11), *[65] * 9]}, "drafts plain: token 11 of the text"),
        ({"right": [1] * 5 + [0] + [1] * 14}, "were expected"),
    ],
)
def test_text_or_counts_not_as_expected(
    bench: Bench, tiny: Callable[[str], Path], tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    outcome = bench(tiny("draft_perfect"), "--expect", expectation(tmp_path / "expected", **changes))
    assert outcome.code == 1
    assert "NOT AS IT SHOULD BE" in outcome.out
    assert "failed: context 0, " in outcome.err and says in outcome.err


def test_a_build_whose_drafts_change_the_text_fails(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def keep_everything(self: OnnxTrunkEngine, n_keep: int) -> None:
        dropped = self._pending - n_keep
        sound_commit(self, self._pending)
        self._position -= dropped

    sound_commit = OnnxTrunkEngine.commit
    monkeypatch.setattr(OnnxTrunkEngine, "commit", keep_everything)
    outcome = bench(TRAINED_MODEL, "-n", 40, "--repeats", 1)
    assert outcome.code == 1
    assert "drafts 3: the text after prompt 0 is not the plain one from token" in outcome.err
    assert "drafts plain:" not in outcome.err


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("-n", 2), ("--predict 2", "3 to")),
        (("--repeats", 0), ("--repeats 0", "1 to")),
        (("--depths", "0,x"), ("--depths", "whole numbers")),
        (("--depths", "-1"), ("--depths -1",)),
        (("--prefill", "0"), ("--prefill 0",)),
        (("--drafts", "0"), ("--drafts 0",)),
        (("--drafts", "4"), ("--drafts 4", "--spec-draft-n-max")),
        (("--spec-draft-n-max", 65), ("--spec-draft-n-max 65",)),
        (("--bandwidth", 0), ("--bandwidth 0",)),
        (("--bandwidth", "nan"), ("--bandwidth nan",)),
        (("--json", "/no/such/folder/x"), ("--json", "no such folder")),
        (("--chart", "/"), ("--chart", "is a folder")),
        (("-f", "/no/such/file"), ("/no/such/file", "cannot be read")),
        (("--expect", "/no/such/file"), ("/no/such/file", "cannot be read")),
        (("-c", 16), ("the context holds 16", "--predict")),
    ],
)
def test_refused(bench: Bench, flags: tuple[object, ...], says: tuple[str, ...]) -> None:
    bench(TRAINED_MODEL, *flags).refused(2, *says)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("no JSON", "wanted a JSON object"),
        ('{"tokens": []}', "'after'"),
        ("[1]", "wanted a JSON object"),
        ('{"after": 1, "tokens": [1, 2, 3]}', '"tokens" has 3 entries'),
        ('{"after": 1, "tokens": [4096]}', "4096 is no token"),
        ('{"after": "x", "tokens": [1]}', "'x' is no token"),
    ],
)
def test_expectations_that_are_none(bench: Bench, tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "expected").write_text(content)
    bench(TRAINED_MODEL, "--expect", tmp_path / "expected").refused(2, "expected: ", says)


def test_an_empty_prompt_file(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    bench(TRAINED_MODEL, "-f", tmp_path / "empty.txt").refused(2, "empty.txt", "is empty")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    bench(TRAINED_MODEL, "-f", tmp_path / "latin.txt").refused(2, "latin.txt", "byte 3 is not UTF-8")


def test_a_chart_without_matplotlib(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    outcome = bench(TRAINED_MODEL, "--chart", tmp_path / "chart.png")
    outcome.refused(2, "matplotlib is not installed", "nextn-trt[bench]")
    assert not list(tmp_path.iterdir())
