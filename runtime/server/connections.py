"""Limits of connections: how many there may be, and how long a client may take to ask and to read."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import resource
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from engines.signals import handling
from runtime.server.security import HEADER_BYTES_MAX

CONNECTIONS_DEFAULT = 1024
_LAST_WORDS_S = 10  # for clients to be told that their replies are cut off
_PROBE_AFTER_S, _PROBE_EVERY_S = 0.005, 0.005  # whether a client that sends no more is still there
WAITING = 2048  # connections that the system holds until they are accepted
# That are accepted at a time. Some times as many are open at once until those that are too many are closed; a file too
# many would fill the log.
_AT_A_TIME = 64
_FILES_BESIDE = 128 + 5 * _AT_A_TIME  # open files that are no connections, and connections on their way out
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\nConnection: close\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b"
)
_FULL_BODY = (
    b'{"error":{"message":"too many connections","type":"server_error","param":null,"code":"too_many_connections"}}'
)
_NO_HTTP = {
    "message": "this is no HTTP request",
    "type": "invalid_request_error",
    "param": None,
    "code": "invalid_http",
}
_log = logging.getLogger("runtime.server")


@dataclass(frozen=True)
class ConnectionLimits:
    """count: of connections. Seconds that a client may take for the head of a request, for its body, and to read on
    when what is sent to it has piled up."""

    count: int = CONNECTIONS_DEFAULT
    head_s: float = 20.0
    body_s: float = 300.0
    stalled_s: float = 60.0


class _Limited(H11Protocol):
    """A connection. One that is too slow is cut, which ends its request as if the client had left."""

    limits = ConnectionLimits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refused = False
        self._awaited: object = None  # what of a request is waited for
        self._asking: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None
        self._probed = self._half_closed = False  # the client sends no more, and may be gone
        self._probing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self.limits.count:
            self._refused = True
            self.transport = transport
            transport.write(_FULL % (len(_FULL_BODY), _FULL_BODY))
            transport.close()
            return
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop(self._asking)
        self._stop(self._reading)
        self._stop(self._probing)
        if not self._refused:
            super().connection_lost(exc)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """A client that shuts its side down may still read the answer to what it has asked. One that has left looks
        the same, until something is sent to it: its system then says so."""
        if self._refused or not self._answering() or self.conn.their_state is h11.SEND_BODY:
            return None  # the connection is closed
        self._half_closed = True
        self._probing = self.loop.call_later(_PROBE_AFTER_S, self._probe)
        return True

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _probe(self) -> None:
        """Once the answer takes its time: an interim response, which clients pass over, and its outcome."""
        if self.transport.is_closing() or not self._answering():
            return
        connection: socket.socket = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if not self._probed and not self.cycle.response_started and self.cycle.scope["http_version"] != "1.0":
            self.transport.write(b"HTTP/1.1 102 Processing\r\n\r\n")
        self._probed = True
        self._probing = self.loop.call_later(_PROBE_EVERY_S, self._probe)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading = self.loop.call_later(self.limits.stalled_s, self._cut, "reads")

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop(self._reading)

    def _watch(self) -> None:
        """A timer for the part of a request that is waited for, if it is another one than before."""
        state = self.conn.their_state
        awaited = state if state in (h11.IDLE, h11.SEND_BODY) else None
        if awaited is self._awaited:
            return
        self._stop(self._asking)
        self._awaited = awaited
        if awaited is not None:
            seconds = self.limits.head_s if awaited is h11.IDLE else self.limits.body_s
            self._asking = self.loop.call_later(seconds, self._cut, "asks")

    def on_response_complete(self) -> None:
        """Between requests the web server itself closes connections, after a few seconds."""
        self._stop(self._asking)
        self._awaited = None
        super().on_response_complete()
        if self._half_closed and not self._answering():  # nothing more was asked
            self.transport.close()
        if self.conn.their_state is h11.SEND_BODY:  # the next request came along with this one
            self._watch()

    def send_400_response(self, msg: str) -> None:
        """As all errors are told."""
        body = json.dumps({"error": _NO_HTTP}).encode()
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        headers.append((b"content-length", str(len(body)).encode()))
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _cut(self, what: str) -> None:
        _log.info("a client %s too slowly: its connection is cut", what)
        self.transport.abort()

    @staticmethod
    def _stop(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, over: Callable[[], bool], closing: Callable[[], None]) -> None:
        super().__init__(config)
        self._over, self._closing = over, closing

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        with handling(signal.SIGHUP, self.handle_exit):  # of other signals uvicorn takes care
            await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in itertools.chain.from_iterable(server.sockets for server in self.servers):
            with each.dup() as listening:  # the same one: asyncio takes one number for both
                listening.listen(WAITING)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Replies are ended by ``closing``, while their connections are still there to be told so."""
        asyncio.get_running_loop().run_in_executor(None, self._closing)
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._over()


def web_server(
    app: ASGIApp,
    limits: ConnectionLimits,
    grace_s: int | None = None,
    over: Callable[[], bool] = lambda: False,
    closing: Callable[[], None] = lambda: None,
) -> uvicorn.Server:
    """uvicorn with these limits; `allowed` says how many connections there can be. over: whether it is to end. closing:
    called when it does, in a thread; it is to end all replies in ``grace_s`` seconds."""
    config = uvicorn.Config(
        app,
        log_config=None,
        http=type("Limited", (_Limited,), {"limits": limits}),
        backlog=_AT_A_TIME,
        h11_max_incomplete_event_size=HEADER_BYTES_MAX,
        timeout_graceful_shutdown=None if grace_s is None else grace_s + _LAST_WORDS_S,
        server_header=False,
    )
    return _Server(config, over, closing)


def allowed(count: int) -> int:
    """How many of ``count`` connections this process may have open. Raises its limit of open files where that is too
    low and may be raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _FILES_BESIDE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return count if soft == resource.RLIM_INFINITY else max(1, min(count, soft - _FILES_BESIDE))
