"""The front: turns away what should not come in, and sends every turn of a chat to the same replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from runtime.replicas.exchange import Asked, Head, session_key
from runtime.replicas.loopback import keep_to_loopback
from runtime.server.errors import ApiError
from runtime.server.http import DONE, ClientGoneError, dumps, error_response
from runtime.server.security import Guard, Limits


class Front:
    """replicas: Ray's handle of the `runtime.replicas.replica.Replica` deployment."""

    def __init__(self, replicas: Any, limits: Limits) -> None:
        keep_to_loopback()
        self._replicas = replicas
        self._guard = Guard(self._pass_on, limits)

    async def __call__(self, request: Request) -> Response:
        return _Guarded(self._guard)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/metrics":
            told = ApiError(404, "each replica counts for itself: see Ray's own metrics", code="http_error")
            await error_response(told)(scope, receive, send)
            return
        try:
            asked = await _read(scope, receive)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        except ClientGoneError:
            return
        await _Relay(scope, receive, send).run(self._replicas, asked)


class _Guarded(Response):
    """What Ray takes for an answer, made by an ASGI application."""

    def __init__(self, app: Guard) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


class _Relay:
    """One answer on its way."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._head: Head | None = None

    async def run(self, replicas: Any, asked: Asked) -> None:
        answer = replicas.options(stream=True, session_id=session_key(asked)).serve.remote(asked)
        gone = asyncio.create_task(_disconnect(self._receive))
        try:
            async for part in _until(answer, gone):
                await self._part(part)
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientGoneError:
            return
        except (RayError, RayServeException) as error:
            await self._failed(_api_error(error))
        finally:
            gone.cancel()
            answer.cancel()

    async def _part(self, part: Head | bytes) -> None:
        if isinstance(part, Head):
            self._head = part
            await self._send({"type": "http.response.start", "status": part.status, "headers": part.headers})
        else:
            await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def _failed(self, error: ApiError) -> None:
        if self._head is None:
            await error_response(error)(self._scope, self._receive, self._send)
            return
        # The status line is long gone. Answers that are no streams come in one piece, so this is one.
        last = b"data: " + dumps(error.body()) + b"\n\n" + DONE
        await self._send({"type": "http.response.body", "body": last, "more_body": False})


async def _until(answer: Any, gone: asyncio.Task[None]) -> AsyncIterator[Head | bytes]:
    """The parts of an answer. Raises ClientGoneError when ``gone`` is done first."""
    parts = answer.__aiter__()
    while True:
        coming = asyncio.ensure_future(parts.__anext__())
        await asyncio.wait({coming, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not coming.done():
            coming.cancel()
            raise ClientGoneError
        try:
            yield coming.result()
        except StopAsyncIteration:
            return


def _api_error(error: Exception) -> ApiError:
    if isinstance(error, BackPressureError):
        return ApiError(503, "too many requests are waiting already; try again later", code="queue_full", retry=True)
    if isinstance(error, RayActorError):
        message = "the replica that made this reply was lost; send the request again"
        return ApiError(503, message, code="replica_lost", retry=True)
    if isinstance(error, RayTaskError):
        return ApiError(500, "the replica failed; its log says more", code="internal_error")
    return ApiError(503, f"no replica could answer ({type(error).__name__})", code="no_replica", retry=True)


async def _read(scope: Scope, receive: Receive) -> Asked:
    """The whole request. Raises ApiError for one that is too large, ClientGoneError."""
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return Asked(scope["method"], scope["path"], scope["query_string"], list(scope["headers"]), body)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
