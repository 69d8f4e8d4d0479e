"""`python -m runtime.eval`: prompts, figures, reports, servers."""

from __future__ import annotations

import contextlib
import csv
import http.server
import io
import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from engines.errors import EngineError, UsageError
from runtime import eval as evaluation
from runtime.engine_onnxruntime import OnnxTrunkEngine
from runtime.evaluation.measure import DRAFTING, PLAIN, LocalModel, Run
from runtime.evaluation.prompts import Prompt, load_prompts
from runtime.evaluation.server import Server
from runtime.evaluation.summary import length_splits, summarise
from tests.exported import Exported
from tests.runtime.command import Outcome, run_main
from tests.runtime.server import serving
from tests.vocabulary_files import TRAINED_MODEL

TIMINGS = {"prompt_n": 5, "predicted_n": 9, "predicted_ms": 90.0, "draft_n": 6, "draft_n_accepted": 4}
ASKED = Prompt("talk", ({"role": "user", "content": "Hello!"},), "here:1")
RUN = Run(PLAIN, 0.0, 0, "a", 10, 8, 80.0, "rounds", 7, 0, 0)


class Fake:
    """A server of OpenAI's kind that gives one reply to everything and keeps the requests."""

    def __init__(self) -> None:
        self.status, self.reply, self.asked, self.headers = 200, dict[str, Any](), list[dict[str, Any]](), {}
        self.models: Any = {"data": [{"id": "fake"}]}
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(200, fake.models)

            def do_POST(self) -> None:
                fake.headers = dict(self.headers)
                fake.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self._answer(fake.status, fake.reply)

            def _answer(self, status: int, reply: Any) -> None:
                data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def tell(self, **fields: Any) -> None:
        choice = {"finish_reason": "stop", "message": {"role": "assistant", "content": "Hi"}}
        usage = {"prompt_tokens": 7, "completion_tokens": 9}
        self.reply = {"choices": [choice], "usage": usage, **fields}


@contextmanager
def fake_server() -> Iterator[Fake]:
    fake = Fake()
    fake.tell(timings=TIMINGS)
    thread = threading.Thread(target=fake.server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield fake
    fake.server.shutdown()
    fake.server.server_close()
    thread.join()


@pytest.fixture
def fake() -> Iterator[Fake]:
    with fake_server() as server:
        yield server


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


def test_a_server_with_timings(fake: Fake) -> None:
    server = Server(f"{fake.url}/v1/", predict=16, seed=3, api_key="secret")
    assert server.model() == "fake" and "secret" not in repr(server)
    run = server.run(ASKED, 4, 0.6, "fake")
    assert (run.source, run.prompt_tokens, run.tokens, run.ms, run.ms_kind) == (fake.url, 7, 9, 90.0, "rounds")
    assert (run.rounds, run.drafted, run.accepted, run.text) == (4, 6, 4, "Hi")
    (asked,) = fake.asked
    assert asked["messages"] == list(ASKED.messages) and (asked["max_tokens"], asked["seed"]) == (16, 3)
    assert (asked["temperature"], asked["top_p"], asked["top_k"], asked["min_p"]) == (0.6, 1.0, 0, 0.0)
    assert fake.headers["Authorization"] == "Bearer secret"
    fake.tell(timings={**TIMINGS, "verify_steps": 5})
    assert server.run(ASKED, 4, 0.0, "fake").rounds == 5
    assert "top_k" not in fake.asked[-1]


def test_a_server_that_drafts_nothing_and_one_that_does_not_tell(fake: Fake) -> None:
    fake.tell(timings={"predicted_n": 9, "predicted_ms": 9.0})
    server = Server(fake.url, 16, 0)
    run = server.run(ASKED, 0, 0.0, "fake")
    assert (run.drafted, run.accepted, run.rounds) == (0, 0, 8)
    fake.tell()
    run = server.run(ASKED, 0, 0.0, "fake")
    assert (run.tokens, run.ms_kind, run.drafted, run.accepted) == (9, "request", None, None) and run.ms > 0
    (group, *_) = summarise([run], [])
    metrics = group["sources"][fake.url]
    assert metrics["tokens_per_round"] is metrics["drafted"] is metrics["acceptance_rate"] is None


@pytest.mark.parametrize("name", ["predicted_n", "predicted_ms", "draft_n", "draft_n_accepted", "verify_steps"])
@pytest.mark.parametrize("number", [-1, float("nan"), float("inf"), 10**400, "many"])
def test_a_server_whose_numbers_are_none(name: str, number: Any, fake: Fake) -> None:
    fake.tell(timings={**TIMINGS, name: number})
    with pytest.raises(EngineError, match="none of OpenAI's kind"):
        Server(fake.url, 16, 0).run(ASKED, 0, 0.0, "fake")


@pytest.mark.parametrize(
    ("status", "reply", "says"),
    [
        (400, {"error": {"message": "no top_k"}}, "answers 400: .*no top_k"),
        (200, b"<html>", "no JSON"),
        (200, [], "no JSON object"),
        (200, {"choices": []}, "none of OpenAI's kind"),
        (200, {"choices": [{}]}, "none of OpenAI's kind"),
    ],
)
def test_a_server_that_fails(status: int, reply: Any, says: str, fake: Fake) -> None:
    fake.status, fake.reply = status, reply
    with pytest.raises(EngineError, match=says):
        Server(fake.url, 16, 0).run(ASKED, 0, 0.0, "fake")


def test_no_server(fake: Fake) -> None:
    fake.models = {"data": []}
    with pytest.raises(EngineError, match="names no model"):
        Server(fake.url, 16, 0).model()
    closed = Fake()
    closed.server.server_close()
    run_main(evaluation.main, "--server", closed.url).refused(4, "does not answer")


def test_a_server_of_half_a_name(fake: Fake, tmp_path: Path) -> None:
    fake.models = {"data": [{"id": "fa\ud800ke"}]}
    files = [word for kind in ("json", "csv", "html") for word in (f"--{kind}", tmp_path / f"report.{kind}")]
    ran = run_main(evaluation.main, "--server", fake.url, "--per-category", 1, "--temps", 0, *files)
    assert ran.code == 0 and "fa?ke" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_servers_alone(fake: Fake, tmp_path: Path) -> None:
    ran = run_main(evaluation.main, "--server", fake.url, "--per-category", 1, "--html", tmp_path / "page.html")
    assert ran.code == 0, ran.err
    assert f"fake at {fake.url}" in ran.out and "40/60" not in ran.out and "20/30" in ran.out
    assert len(fake.asked) == 1 + 2 * 5
    assert fake.url in (tmp_path / "page.html").read_text()


def test_our_server_beside_the_model(exported: Callable[[str], Exported], tmp_path: Path) -> None:
    """The same prompts, the same greedy texts."""
    model = exported("trained")
    with serving(model) as running:
        some = ["--per-category", 1, "-n", 8, "-t", 1, "--json", tmp_path / "report.json"]
        ran = run_main(evaluation.main, model.folder, "--server", running.url, *some)
    assert ran.code == 0, ran.err
    report = read(tmp_path)
    assert report["servers"] == [{"url": running.url, "model": running.model}]
    texts = {(r["source"], r["temperature"], r["prompt"]): r["text"].strip() for r in report["runs"]}
    greedy = [key for key in texts if key[1] == 0.0]
    assert {source for source, _, _ in greedy} == {PLAIN, DRAFTING, running.url}
    assert all(texts[key] == texts[(PLAIN, *key[1:])] for key in greedy)
    whole = report["groups"][0]["sources"]
    assert whole[running.url]["times"] == "rounds" and whole[running.url]["over_plain"] > 0


@pytest.mark.skipif(shutil.which("llama-server") is None, reason="needs llama-server on PATH")
@pytest.mark.parametrize("draft", [[], ["--spec-type", "draft-mtp", "--spec-draft-n-max", "3"]])
def test_a_real_llama_server(tmp_path: Path, draft: list[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = ["llama-server", "-m", str(TRAINED_MODEL), "-ngl", "0", "--device", "none", "-c", "1024", "-t", "1"]
    server = subprocess.Popen(
        [*command, "-np", "1", "--jinja", "--port", str(port), *draft],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(600):
            with contextlib.suppress(EngineError):
                Server(url, 16, 0).model()
                break
            time.sleep(0.1)
        some = ["--per-category", 1, "-n", 16, "--temps", 0, "--json", tmp_path / "report.json"]
        ran = run_main(evaluation.main, "--server", url, *some)
    finally:
        server.terminate()
        server.wait()
    assert ran.code == 0, ran.err
    runs = read(tmp_path)["runs"]
    assert len(runs) == 5 and all(run["ms_kind"] == "rounds" and run["tokens"] > 0 for run in runs)
    assert (sum(run["drafted"] for run in runs) > 0) == bool(draft)


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
