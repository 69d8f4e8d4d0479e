"""A server on a free port of this machine, run by the real web server in a thread."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import openai

from runtime.server.app import create_app
from runtime.server.connections import ConnectionLimits, web_server
from runtime.server.security import Limits
from runtime.server.service import Service, ServiceOptions
from runtime.session import Session
from tests.runtime.serving import WAIT_S, open_trained

if TYPE_CHECKING:
    from tests.exported import Exported

USER = [{"role": "user", "content": "What does len do?"}]


class Running:
    """The server, and ways to talk to it."""

    def __init__(self, service: Service, url: str, api_key: str = "") -> None:
        self.service, self.url = service, url
        self.model = service.model
        headers = {"Authorization": f"Bearer {api_key}".encode()} if api_key else {}
        self.http = httpx.Client(base_url=url, timeout=WAIT_S, headers=headers)
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key=api_key or "none", max_retries=0, timeout=WAIT_S)

    def chat(self, **fields: Any) -> dict[str, Any]:
        """A whole reply; asserts that there is one."""
        reply = self.http.post("/v1/chat/completions", json={"messages": USER, **fields})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def events(self, **fields: Any) -> list[dict[str, Any]]:
        """The events of a streamed chat, the last mark left out."""
        body = {"messages": USER, "stream": True, **fields}
        with self.http.stream("POST", "/v1/chat/completions", json=body) as reply:
            assert reply.status_code == 200, reply.read()
            lines = [line for line in reply.iter_lines() if line.startswith("data: ")]
        assert lines.pop() == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    def refusal(self, path: str = "/v1/chat/completions", **fields: Any) -> tuple[int, dict[str, Any]]:
        """Status and error of a request that is not served."""
        body = {"messages": USER, **fields} if "chat" in path else fields
        content = json.dumps(body).encode()  # what is no Unicode, too
        reply = self.http.post(path, content=content, headers={"Content-Type": "application/json"})
        assert reply.status_code >= 400, reply.text
        return reply.status_code, reply.json()["error"]

    def idle(self) -> None:
        """Wait until no sequence runs and nobody waits."""
        until = time.monotonic() + WAIT_S
        while self.service.scheduler.num_active or self.service.scheduler.num_queued:
            assert time.monotonic() < until, "a slot stays taken"
            time.sleep(0.01)


@contextlib.contextmanager
def serving(
    model: Exported,
    options: ServiceOptions | None = None,
    limits: Limits | None = None,
    grace_s: float = 0.0,
    connections: ConnectionLimits | None = None,
) -> Iterator[Running]:
    with serving_session(open_trained(model, spec_type="auto"), options, limits, grace_s, connections) as running:
        yield running


@contextlib.contextmanager
def serving_session(
    session: Session,
    options: ServiceOptions | None = None,
    limits: Limits | None = None,
    grace_s: float = 0.0,
    connections: ConnectionLimits | None = None,
) -> Iterator[Running]:
    """Owns the session's engines."""
    limits = limits or Limits()
    service = Service(session, options or ServiceOptions())
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    app = create_app(service, limits, grace_s)
    server = web_server(app, connections or ConnectionLimits())
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    running = Running(service, f"http://127.0.0.1:{listening.getsockname()[1]}", limits.api_key)
    try:
        until = time.monotonic() + WAIT_S
        while not server.started:
            assert time.monotonic() < until and thread.is_alive(), "the server does not start"
            time.sleep(0.01)
        yield running
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
        assert not thread.is_alive(), "the server does not end"
        service.close()
        running.http.close()
        running.openai.close()


def text_of(events: list[dict[str, Any]], field: str = "content") -> str:
    return "".join(event["choices"][0]["delta"].get(field) or "" for event in events if event["choices"])
