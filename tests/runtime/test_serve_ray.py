"""Two replicas on CPUs over Ray Serve: chats stay where their state is, and a replica's death is its own."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime import serve_ray
from tests.exported import Exported
from tests.runtime.command import run_main
from tests.runtime.serving import WAIT_S

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.ray
WAIT_RAY_S = 3 * WAIT_S  # it starts and stops processes
KEY = {"Authorization": "Bearer abc"}
TWO_TURNS_AGO = "What does len do? " * 20


@pytest.fixture(scope="module")
def url(exported: Callable[[str], Exported]) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tempfile.mkdtemp(prefix="ray")  # short: sockets have short names
    flags = (
        f"{exported('trained').folder} -t 1 --replicas 2 --sequences 2 --queue 1 --port {port} --api-key abc --temp 0"
    )
    try:
        serve_ray.start_ray(num_cpus=4, object_store_memory=100 << 20, log_to_driver=False, _temp_dir=folder)
        import ray
        from ray import serve

        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        serve.run(serve_ray.build({"arguments": flags}), name=serve_ray.NAME)
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=WAIT_RAY_S, headers=KEY) as client:
        yield client


def turn(http: httpx.Client, messages: list[dict[str, str]], **fields: Any) -> tuple[str, dict[str, Any]]:
    """Which replica answered, and what."""
    reply = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 8, **fields})
    assert reply.status_code == 200, reply.text
    return reply.headers["x-replica"], reply.json()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class Stream(threading.Thread):
    """A long reply in a thread of its own."""

    def __init__(self, url: str, text: str, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self._url = url
        # The end of a text is out of the question: all of it has to come.
        bias = {"4089": -100, "4091": -100}
        self._body = {"messages": [user(text)], "max_tokens": max_tokens, "stream": True, "logit_bias": bias}
        self.replica, self.events, self.done = "", [], False
        self.began = threading.Event()

    def run(self) -> None:
        with (
            httpx.Client(timeout=WAIT_RAY_S, headers=KEY) as http,
            http.stream("POST", f"{self._url}/v1/chat/completions", json=self._body) as reply,
        ):
            self.replica = reply.headers.get("x-replica", "")
            for line in reply.iter_lines():
                if line == "data: [DONE]":
                    self.done = True
                elif line.startswith("data: "):
                    self.events.append(json.loads(line[6:]))
                    if len(self.events) > 2:
                        self.began.set()
        self.began.set()

    @property
    def reason(self) -> str | None:
        return self.events[-1]["choices"][0]["finish_reason"] if "choices" in self.events[-1] else None


def test_who_may_ask(http: httpx.Client, url: str) -> None:
    assert httpx.get(f"{url}/v1/models").status_code == 401
    assert http.get("/v1/models", headers={"Host": "evil.example"}).status_code == 403
    assert http.get("/v1/models").json()["data"][0]["id"] == "tiny-qwen35-mtp"
    assert http.get("/metrics").status_code == 404
    refused = http.post("/v1/chat/completions", json={"messages": [user("x")], "heat": 1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "heat")
    assert httpx.get(url).headers["content-type"].startswith("text/html")


def test_nothing_listens_for_others(http: httpx.Client) -> None:
    """Neither the front nor any process of Ray's: there is no authentication."""
    mine = {str(os.getpid()), *descendants(os.getpid())}
    listening = [(address, Path(f"/proc/{pid}/cmdline").read_text()) for pid in mine for address in listens_on(pid)]
    assert len(listening) > 5
    assert not [each for each in listening if not each[0].is_loopback]


def descendants(pid: int) -> set[str]:
    """Processes that it started, and those that these did."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[path.parent.name] = path.read_text().rpartition(")")[2].split()[1]
    found, more = set(), {str(pid)}
    while more:
        more = {child for child, parent in parents.items() if parent in more} - found
        found |= more
    return found


def listens_on(pid: str) -> Iterator[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    held = set()
    for path in Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(OSError):
            held.add(os.readlink(path))
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in held:
                words = bytes.fromhex(fields[1].partition(":")[0])  # of 32 bits, each turned round
                packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                address = ipaddress.ip_address(packed)
                yield getattr(address, "ipv4_mapped", None) or address


def test_a_chat_stays_with_its_replica(http: httpx.Client) -> None:
    replicas = set()
    for i in range(6):
        messages = [user(f"{i}: {TWO_TURNS_AGO}")]
        first, reply = turn(http, messages)
        content = reply["choices"][0]["message"]["content"]
        again, second = turn(http, [*messages, {"role": "assistant", "content": content}, user("And map?")])
        assert again == first and second["timings"]["cache_n"] > 100
        replicas.add(first)
    for i in range(20):  # which of the two it is, is chance
        replicas.add(turn(http, [user(f"{i}?")], max_tokens=1)[0])
    assert len(replicas) == 2
    named = {turn(http, [user(f"{i}!")], prompt_cache_key="mine", max_tokens=1)[0] for i in range(6)}
    assert len(named) == 1


def test_a_client_that_leaves_frees_its_place(http: httpx.Client) -> None:
    """With two sequences and one place to wait, the fifth would find none."""
    for _ in range(5):
        body = {"messages": [user("Say anything.")], "stream": True, "logit_bias": {"4089": -100, "4091": -100}}
        with http.stream("POST", "/v1/chat/completions", json=body) as reply:
            assert reply.status_code == 200
            next(reply.iter_lines())
    turn(http, [user("Say anything.")])


def test_a_replica_that_dies_loses_its_own_requests_alone(http: httpx.Client, url: str) -> None:
    import ray

    texts: dict[str, list[str]] = {}
    for i in range(40):  # two chats of each replica
        texts.setdefault(turn(http, [user(f"chat {i}")], max_tokens=1)[0], []).append(f"chat {i}")
        if len(texts) == 2 and min(map(len, texts.values())) >= 2:
            break
    victim, survivor = texts
    streams = [Stream(url, text, 300) for replica in (victim, survivor) for text in texts[replica][:2]]
    for stream in streams:
        stream.start()
    for stream in streams:
        assert stream.began.wait(WAIT_RAY_S)
    assert [stream.replica for stream in streams] == [victim, victim, survivor, survivor]
    (name,) = [each for each in ray.util.list_named_actors(all_namespaces=True) if each["name"].endswith(victim)]
    ray.kill(ray.get_actor(name["name"], namespace=name["namespace"]))
    for stream in streams:
        stream.join(WAIT_RAY_S)
        assert not stream.is_alive() and stream.done
    for stream in streams[:2]:
        assert stream.events[-1]["error"]["code"] == "replica_lost" and stream.reason is None
    assert [stream.reason for stream in streams[2:]] == ["length", "length"]
    # Its chats go on elsewhere at once, and Ray starts another.
    turn(http, [user(texts[victim][0])])
    until, seen = time.monotonic() + WAIT_RAY_S, set()
    while len(seen) < 2:
        assert time.monotonic() < until, "no new replica"
        seen.add(turn(http, [user(str(time.monotonic()))], max_tokens=1)[0])
    assert victim not in seen and survivor in seen


def test_the_command(exported: Callable[[str], Exported]) -> None:
    """It starts, serves, ends when asked to, and leaves no process. (After the tests above: one Ray at a time.)"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = exported("trained").folder
    words = [sys.executable, "-m", "runtime.serve_ray", folder, "-t", 1, "--port", port, "--max-replicas", 2]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with subprocess.Popen(
        list(map(str, words)), cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        try:
            assert any(line == f"listening on http://127.0.0.1:{port}, replicas: 1\n" for line in process.stderr)
            reply = httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=WAIT_RAY_S)
            assert reply.json()["data"][0]["meta"]["spec"] == "draft-mtp"
            process.send_signal(signal.SIGTERM)
            process.stderr.read()
            assert process.wait(WAIT_RAY_S) == 0
        finally:
            process.kill()


def test_what_cannot_be_served(exported: Callable[[str], Exported], tmp_path: Path) -> None:
    folder = exported("trained").folder
    run_main(serve_ray.main, folder, "--port", 0).refused(2, "--port 0")
    run_main(serve_ray.main, folder, "--replicas", -1).refused(2, "--replicas")
    run_main(serve_ray.main, folder, "--temp", -1).refused(2, "temperature")
    run_main(serve_ray.main, tmp_path / "none").refused(2, "no such file")
    run_main(serve_ray.main, folder, "--replicas", 3, "--max-replicas", 2).refused(2, "--max-replicas 2")


def test_what_clients_hear_of_errors() -> None:
    from ray.exceptions import RayActorError, RayTaskError
    from ray.serve.exceptions import BackPressureError, RayServeException

    from runtime.replicas.front import _api_error

    errors = (
        BackPressureError(1, 1),
        RayActorError(),
        RayTaskError("f", "trace", ValueError("x")),
        RayServeException(),
    )
    told = [_api_error(error) for error in errors]
    assert [(each.status, each.code) for each in told] == [
        (503, "queue_full"),
        (503, "replica_lost"),
        (500, "internal_error"),
        (503, "no_replica"),
    ]
    assert "trace" not in str([each.body() for each in told])


def test_an_application_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    """After its answer: that stands. Before it: the front hears of it."""
    from runtime.replicas.exchange import Asked, Head
    from runtime.replicas.replica import Replica

    def parts(*messages: dict[str, Any]) -> list[Any]:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            for message in messages:
                await send(message)
            raise ZeroDivisionError

        async def collected() -> list[Any]:
            return [part async for part in replica.serve(Asked("GET", "/", b"", [], b""))]

        replica = Replica.__new__(Replica)
        replica._app, replica._name, replica._running = app, b"x", set()  # type: ignore[assignment]
        return asyncio.run(collected())

    start = {"type": "http.response.start", "status": 500, "headers": []}
    body = {"type": "http.response.body", "body": b"sorry"}
    assert parts(start, body) == [Head(500, [(b"x-replica", b"x")]), b"sorry"]
    assert "/ failed" in caplog.text
    for messages in ((), (start,), (start, {**body, "more_body": True})):
        with pytest.raises(ZeroDivisionError):
            parts(*messages)
