"""Clients that are many, slow to ask, or slow to read: others are served all the same."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from runtime.server.connections import ConnectionLimits, allowed
from runtime.server.security import Limits
from runtime.server.service import ServiceOptions
from tests.exported import Exported
from tests.runtime.server import USER, Running, serving
from tests.runtime.serving import WAIT_S
from tests.runtime.test_server_requests import CHAT, ENDLESS, wait_for

Export = Callable[[str], Exported]
HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@contextlib.contextmanager
def connected(server: Running, receive_bytes: int = 0) -> Iterator[socket.socket]:
    made = socket.socket()
    if receive_bytes:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    made.settimeout(WAIT_S)
    made.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
    with made:
        yield made


def everything(made: socket.socket) -> bytes:
    """What the server sends until it closes the connection."""
    out = b""
    with contextlib.suppress(ConnectionResetError):
        while part := made.recv(65536):
            out += part
    return out


@pytest.fixture(scope="module")
def hasty(exported: Export) -> Iterator[Running]:
    """A server that soon loses its patience."""
    connections = ConnectionLimits(head_s=0.3, body_s=0.3, stalled_s=0.3)
    with serving(exported("trained"), ServiceOptions(num_sequences=2), connections=connections) as running:
        yield running


def test_thousands_of_connections(exported: Export) -> None:
    """Those beyond the limit are told to come back; whoever is connected is served, and everybody afterwards."""
    count, beyond = 2000, 100
    assert allowed(2 * (count + beyond) + 100) == 2 * (count + beyond) + 100, "this machine allows too few open files"
    with serving(exported("trained"), connections=ConnectionLimits(count=count)) as server:
        want = server.chat(max_tokens=5, temperature=0)["choices"]  # its client stays connected
        with contextlib.ExitStack() as stack:
            idle = [stack.enter_context(connected(server)) for _ in range(count - 1)]
            late = [stack.enter_context(connected(server)) for _ in range(beyond)]
            for made in late:
                reply = everything(made)
                assert reply.startswith(b"HTTP/1.1 503 ") and b"Retry-After: " in reply
                assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
            assert server.chat(max_tokens=5, temperature=0)["choices"] == want
            idle[count // 2].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert everything(idle[count // 2]).endswith(b'{"status":"ok"}')
        wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 200)


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HT", HEAD.encode(), b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGE"]
)
def test_a_client_that_does_not_say_what_it_wants(hasty: Running, sent: bytes) -> None:
    with connected(hasty) as made:
        made.sendall(sent)
        reply = everything(made)
        assert reply == b"" or (sent.startswith(b"GET /health") and reply.endswith(b'{"status":"ok"}'))


@pytest.mark.parametrize("path", [CHAT, "/tokenize", "/health"])
def test_a_client_that_does_not_send_its_body(hasty: Running, path: str) -> None:
    """Byte by byte, as slowly as it may."""
    with connected(hasty) as made:
        made.sendall(HEAD.replace(CHAT, path).encode() + b"Content-Length: 1000\r\n\r\n{")
        assert b" 200 " not in everything(made)
    assert hasty.chat(max_tokens=3)["choices"]


def test_a_client_that_does_not_read(hasty: Running) -> None:
    """It asks for far more than buffers hold, over and over. Once it is cut off nothing is done for it any longer."""
    request = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connected(hasty, receive_bytes=4096) as made:
        made.setblocking(False)
        with contextlib.suppress(BlockingIOError, ConnectionError):
            for _ in range(5000):
                made.sendall(request)

        def cut() -> bool:
            try:
                made.send(b"x")
            except BlockingIOError:
                return False
            except ConnectionError:
                return True
            return False

        wait_for(cut)
    assert hasty.chat(max_tokens=3)["choices"]


def test_a_patient_client_is_not_cut_off(hasty: Running) -> None:
    """A stream that is read as it comes may take as long as it takes: no limit is for the whole."""
    fields = {"logit_bias": ENDLESS, "max_tokens": 700, "temperature": 0.8, "seed": 1}
    events = hasty.events(**fields)
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_many_large_bodies_at_once(exported: Export) -> None:
    """Memory for them is bounded: the next one is told to come back, until others are done."""
    limits = Limits(body_bytes=10_000, bodies_at_once=2)
    body = json.dumps({"messages": USER, "max_tokens": 1}).encode().ljust(9_000)
    with serving(exported("trained"), limits=limits) as server, contextlib.ExitStack() as stack:
        held = [stack.enter_context(connected(server)) for _ in range(2)]
        for made in held:
            made.sendall(HEAD.encode() + b"Connection: close\r\nContent-Length: 9000\r\n\r\n" + body[:8_900])

        def post() -> httpx.Response:
            return server.http.post(CHAT, content=body, headers={"Content-Type": "application/json"})

        wait_for(lambda: post().status_code == 503)
        reply = post()
        assert (reply.json()["error"]["code"], int(reply.headers["Retry-After"]) > 0) == ("too_busy", True)
        for made in held:
            made.sendall(body[8_900:])
            assert everything(made).startswith(b"HTTP/1.1 200 ")
        assert post().status_code == 200


def test_bodies_of_clients_that_left_are_not_held(exported: Export) -> None:
    limits = Limits(body_bytes=10_000, bodies_at_once=1)
    with serving(exported("trained"), limits=limits) as server:
        for _ in range(5):
            with connected(server) as made:
                made.sendall(HEAD.encode() + b"Content-Length: 9000\r\n\r\n" + b" " * 8_000)
        wait_for(lambda: server.http.post(CHAT, json={"messages": USER, "max_tokens": 1}).status_code == 200)
        assert server.chat(max_tokens=1)["choices"]


def asking(path: str, body: dict[str, Any] | None = None, version: str = "1.1") -> bytes:
    if body is None:
        return f"GET {path} HTTP/{version}\r\nHost: localhost\r\n\r\n".encode()
    text = json.dumps(body)
    return (
        HEAD.replace(CHAT, path).replace("1.1", version).encode()
        + f"Content-Length: {len(text)}\r\n\r\n{text}".encode()
    )


LONG = {"messages": USER, "logit_bias": ENDLESS, "max_tokens": 150, "temperature": 0.5, "seed": 1}


@pytest.mark.parametrize(
    "sent",
    [
        asking("/health"),
        asking("/health") + asking("/v1/models"),
        asking(CHAT, {"messages": USER, "max_tokens": 1}),
        asking(CHAT, LONG),
        asking(CHAT, LONG, "1.0"),
        asking(CHAT, {**LONG, "stream": True}),
        asking(CHAT, {"messages": USER, "n": 2}),
        asking("/nowhere"),
        asking("/v1/completions", {"prompt": "def f(x):", "max_tokens": 60}),
    ],
)
def test_a_client_that_has_said_all_is_answered(hasty: Running, sent: bytes) -> None:
    """It shuts its side of the connection down, and reads: the answer, all of it, and the end."""
    with connected(hasty) as made:
        made.sendall(sent)
        made.shutdown(socket.SHUT_WR)
        reply = everything(made)
    statuses = re.findall(rb"HTTP/1.1 (\d+) ", reply)
    final = [status for status in statuses if status != b"102"]
    assert len(final) == sent.count(b" HTTP/1."), reply
    assert statuses == final if b" HTTP/1.0" in sent else statuses.count(b"102") <= 1
    assert reply.rstrip().endswith((b"}", b"\r\n0"))
    if b'"stream"' in sent:
        assert b"data: [DONE]" in reply
    hasty.idle()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("half_first", [True, False])
def test_a_client_that_leaves_is_noticed(hasty: Running, stream: bool, half_first: bool) -> None:
    """Also one that had shut its side down before. It would be answered for a minute otherwise."""
    for _ in range(3):
        with connected(hasty) as made:
            made.sendall(asking(CHAT, {**LONG, "max_tokens": None, "stream": stream}))
            wait_for(lambda: hasty.service.scheduler.num_active > 0)
            if half_first:
                made.shutdown(socket.SHUT_WR)
        wait_for(lambda: hasty.service.scheduler.num_active == 0)


@pytest.mark.parametrize("sent", [b"nonsense\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\r\n\r\n"])
def test_what_is_no_http(hasty: Running, sent: bytes) -> None:
    """Told as all errors are."""
    with connected(hasty) as made:
        made.sendall(sent)
        reply = everything(made)
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"application/json" in head
    assert json.loads(body)["error"].keys() == {"message", "type", "param", "code"}
