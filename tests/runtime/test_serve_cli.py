"""`python -m runtime.serve`: what it prints, where it listens, how it ends, what it refuses."""

from __future__ import annotations

import contextlib
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from runtime import serve
from tests.exported import Exported
from tests.runtime.command import run_main
from tests.runtime.serving import WAIT_S

ROOT = Path(__file__).parents[2]
QUESTION = {"messages": [{"role": "user", "content": "What does len do?"}], "temperature": 0, "max_tokens": 30}


@pytest.fixture
def start(exported: Callable[[str], Exported]) -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """``start(flags...)``: a server of its own process and its address."""
    started: list[subprocess.Popen[str]] = []

    def run(*flags: object) -> tuple[subprocess.Popen[str], str]:
        words = [sys.executable, "-m", "runtime.serve", exported("trained").folder, "--port", 0, "-t", 1, *flags]
        process = subprocess.Popen(list(map(str, words)), cwd=ROOT, stderr=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.match(r"listening on (http://\S+), model (\S+), drafting (\S+)", line):
                assert (found[2], found[3]) in (("tiny-qwen35-mtp", "draft-mtp"), ("mine", "draft-mtp"))
                return process, found[1]
        raise AssertionError("it never listened")

    yield run
    for process in started:
        process.kill()
        process.wait()
        process.stderr.close()  # type: ignore[union-attr]


def test_serves_and_ends_gracefully(start: Callable[..., tuple[subprocess.Popen[str], str]], tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("abc\n")
    process, url = start("--api-key-file", key_file, "--alias", "mine", "--sequences", 2, "--spec-type", "draft-mtp")
    assert url.startswith("http://127.0.0.1:")
    headers = {"Authorization": "Bearer abc"}
    with httpx.Client(base_url=url, headers=headers, timeout=WAIT_S) as http:
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert http.get("/health", headers={"Host": "evil.example"}).status_code == 403
        reply = http.post("/v1/chat/completions", json=QUESTION).json()
        assert (reply["model"], reply["choices"][0]["finish_reason"]) == ("mine", "stop")
        assert reply["timings"]["draft_n_accepted"] > 0
        body = {**QUESTION, "stream": True, "logit_bias": {"4089": -100, "4091": -100}, "max_tokens": 60}
        with http.stream("POST", "/v1/chat/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert list(lines)[-2] == "data: [DONE]"
    assert process.wait(WAIT_S) in (0, -signal.SIGTERM)


def test_more_connections_at_once_than_it_may_open_files(
    start: Callable[..., tuple[subprocess.Popen[str], str]],
) -> None:
    """They wait at the system's door. Each file that is refused is a page in the log."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (600, limits[1]))
    try:
        process, url = start("--max-connections", 100)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    process.send_signal(signal.SIGSTOP)
    with contextlib.ExitStack() as stack:
        for _ in range(800):
            made = stack.enter_context(socket.socket())
            made.setblocking(False)
            made.connect_ex(address)
        process.send_signal(signal.SIGCONT)
        assert httpx.get(f"{url}/health", timeout=WAIT_S).status_code in (200, 503)
    assert httpx.get(f"{url}/health", timeout=WAIT_S).status_code in (200, 503)
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    assert "out of system resource" not in process.stderr.read()
    assert process.wait(WAIT_S) in (0, -signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_its_processes_end_with_it(
    start: Callable[..., tuple[subprocess.Popen[str], str]], number: signal.Signals
) -> None:
    """However it ends; those of grammars, one of them at work."""
    process, url = start("--grace", 0)
    body = {**QUESTION, "response_format": {"type": "json_object"}, "logit_bias": {"4089": -100, "4091": -100}}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json={**body, "stream": True}, timeout=WAIT_S) as stream:
        next(stream.iter_lines())
        mine = children(process.pid)
        (grammars,) = [pid for pid in mine if b"grammar_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(children(grammars)) == 1
        mine += children(grammars)
        process.send_signal(number)
        process.wait(WAIT_S)
    for _ in range(1000):
        if not any(map(running, mine)):
            return
        time.sleep(0.02)
    raise AssertionError("still there")


def children(pid: int) -> list[int]:
    words = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(word) for path in words for word in path.read_text().split()]


def running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_replies_past_the_grace_are_told_so(
    start: Callable[..., tuple[subprocess.Popen[str], str]], number: signal.Signals
) -> None:
    process, url = start("--grace", 1)
    body = {"prompt": "x", "logit_bias": {"4089": -100, "4091": -100}, "max_tokens": 4000, "temperature": 1}
    with ThreadPoolExecutor() as pool, httpx.Client(base_url=url, timeout=WAIT_S) as http:
        whole = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=WAIT_S)
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            await_replies(http, 2)
            process.send_signal(number)
            said = [line for line in lines if line]
    assert said[-1] == "data: [DONE]" and "shutting_down" in said[-2]
    reply = whole.result()
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "shutting_down")
    assert int(reply.headers["Retry-After"]) > 0
    assert process.wait(WAIT_S) in (0, -number)
    assert process.stderr is not None and "Traceback" not in process.stderr.read()


def test_who_reads_that_it_listens_may_connect(
    exported: Callable[[str], Exported], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before the web server has begun."""

    class Web:
        def run(self, sockets: list[socket.socket]) -> None:
            socket.create_connection(sockets[0].getsockname(), timeout=WAIT_S).close()

    monkeypatch.setattr("runtime.server.connections.web_server", lambda *_, **__: Web())
    ran = run_main(serve.main, exported("trained").folder, "--port", 0, "-t", 1)
    assert ran.code == 0 and "listening on http://127.0.0.1:" in ran.err, ran.err


def await_replies(http: httpx.Client, count: int) -> None:
    """Until so many are being made."""
    for _ in range(1000):
        gauges = dict(re.findall(r"^(nextn_\w+) (\S+)$", http.get("/metrics").text, re.MULTILINE))
        if float(gauges["nextn_sequences_active"]) + float(gauges["nextn_requests_queued"]) == count:
            return
        time.sleep(0.02)
    raise AssertionError(gauges)


def test_what_cannot_be_served(exported: Callable[[str], Exported], tmp_path: Path) -> None:
    folder = exported("trained").folder
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        outcome = run_main(serve.main, folder, "--port", taken.getsockname()[1])
        assert (outcome.code, "cannot listen on 127.0.0.1" in outcome.err) == (6, True)
    for flags, message in (
        (("--port", 70000), "--port 70000"),
        (("--max-body", 0), "--max-body 0: wanted 1"),
        (("--max-connections", 0), "--max-connections 0: wanted 1"),
        (("--sequences", -1), "--sequences -1"),
        (("--timeout", "nan"), "--timeout"),
        (("--temp", -1), "temperature"),
        (("--api-key-file", tmp_path / "none"), "cannot be read"),
        (("--api-key", "a", "--api-key-file", "b"), "not allowed with"),
        (("--ctx-size", 10**9), "--ctx-size"),
        (("--host", "no such host"), "cannot listen on"),
    ):
        outcome = run_main(serve.main, folder, *((*flags,) if "--port" in flags else ("--port", 0, *flags)))
        assert outcome.code in (2, 6) and message in outcome.err, outcome.err


def test_a_machine_without_the_packages(exported: Callable[[str], Exported], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_PACKAGES", ("fastapi", "no_such_package"))
    outcome = run_main(serve.main, exported("trained").folder)
    assert outcome.code == 2 and "pip install 'nextn-trt[serve]'" in outcome.err


def test_a_lost_gpu_ends_the_server(exported: Callable[[str], Exported]) -> None:
    """Whoever is served is told, and whoever runs the server learns it by the exit code of an engine's error."""
    lost = """
import sys
from engines.command import run_command
from engines.errors import DeviceLostError
from runtime import serve
from runtime.engine_onnxruntime import OnnxTrunkEngine
def verify(self, tokens):
    raise DeviceLostError("the GPU failed; start it again")
real = serve.session_to_serve
def opened(options):
    session = real(options)
    OnnxTrunkEngine.verify = verify
    return session
serve.session_to_serve = opened
run_command(lambda: serve.main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", lost, str(exported("trained").folder), "--port", "0", "--threads", "1"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    with process.stderr:
        said = next(line for line in process.stderr if line.startswith("listening on "))
        url = said.split()[2].rstrip(",")
        reply = httpx.post(f"{url}/v1/chat/completions", json=QUESTION, timeout=WAIT_S)
        assert reply.status_code == 500, reply.text
        rest = process.stderr.read()
        assert process.wait(WAIT_S) == 4
    assert rest.splitlines()[-1] == "error: the GPU failed; start it again"
