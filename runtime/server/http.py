"""Bytes to and from clients: JSON, server-sent events, and clients that go away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from runtime.server.errors import ApiError, api_error
from runtime.server.listener import End, Piece, ReplyListener

_KEEP_ALIVE_S = 15.0
DONE = b"data: [DONE]\n\n"


def dumps(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content)


def error_response(error: ApiError) -> Json:
    return Json(error.body(), status_code=error.status, headers=error.headers)


class ClientGoneError(Exception):
    """The client closed its connection: there is nobody to answer."""


async def collect(request: Request, listener: ReplyListener, cancel: Callable[[], None]) -> list[Piece]:
    """All of a reply. Raises ApiError when it failed, ClientGoneError (and calls ``cancel``) when the client left."""
    gone = asyncio.create_task(_disconnect(request.receive))
    pieces: list[Piece] = []
    try:
        while True:
            event = await _next(listener, gone)
            if isinstance(event, End):
                check_end(event)
                return pieces
            pieces.append(event)
    finally:
        gone.cancel()
        cancel()


class EventStream(Response):
    """Server-sent events. ``frames`` makes the bytes of each event; ``cancel`` is called however it ends."""

    media_type = "text/event-stream"

    def __init__(
        self, listener: ReplyListener, frames: Callable[[Piece | End], list[dict[str, Any]]], cancel: Callable[[], None]
    ) -> None:
        self.status_code, self.background = 200, None
        self._listener, self._frames, self._cancel = listener, frames, cancel
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_disconnect(receive))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for chunk in self._chunks(gone):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (ClientGoneError, OSError):  # nobody reads any more
            return
        finally:
            gone.cancel()
            self._cancel()

    async def _chunks(self, gone: asyncio.Task[None]) -> AsyncIterator[bytes]:
        while True:
            try:
                event = await _next(self._listener, gone, timeout=_KEEP_ALIVE_S)
            except asyncio.TimeoutError:
                yield b": waiting\n\n"
                continue
            try:
                if isinstance(event, End):
                    check_end(event)
                frames = self._frames(event)
            except ApiError as error:  # the status line is long gone
                frames, event = [error.body()], End("error", error)
            yield b"".join(b"data: " + dumps(frame) + b"\n\n" for frame in frames)
            if isinstance(event, End):
                yield DONE
                return


def check_end(end: End) -> None:
    """Raise ApiError when the reply did not come to its end."""
    if end.error is not None:
        raise api_error(end.error)
    if end.reason == "cancelled":
        raise ApiError(503, "shutting down: the reply was cut off", code="shutting_down", retry=True)


async def _next(listener: ReplyListener, gone: asyncio.Task[None], timeout: float | None = None) -> Piece | End:
    """The next event. Raises ClientGoneError, asyncio.TimeoutError."""
    waiting = asyncio.create_task(listener.events.get())
    try:
        await asyncio.wait({waiting, gone}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        if gone.done():
            raise ClientGoneError
        raise asyncio.TimeoutError
    finally:
        waiting.cancel()


async def _disconnect(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
