"""`python -m runtime.eval` on servers: stand-ins, ours, llama.cpp's."""

from __future__ import annotations

import contextlib
import http.server
import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engines.errors import EngineError
from runtime import eval as evaluation
from runtime.evaluation.measure import DRAFTING, PLAIN
from runtime.evaluation.prompts import Prompt
from runtime.evaluation.server import Server
from runtime.evaluation.summary import summarise
from tests.exported import Exported
from tests.runtime.command import run_main
from tests.runtime.server import serving
from tests.vocabulary_files import TRAINED_MODEL

TIMINGS = {"prompt_n": 5, "predicted_n": 9, "predicted_ms": 90.0, "draft_n": 6, "draft_n_accepted": 4}
ASKED = Prompt("talk", ({"role": "user", "content": "Hello!"},), "here:1")


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
    report = json.loads((tmp_path / "report.json").read_text())
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
    runs = json.loads((tmp_path / "report.json").read_text())["runs"]
    assert len(runs) == 5 and all(run["ms_kind"] == "rounds" and run["tokens"] > 0 for run in runs)
    assert (sum(run["drafted"] for run in runs) > 0) == bool(draft)
