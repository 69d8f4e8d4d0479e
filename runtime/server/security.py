"""What is turned away before a route sees it: too much, without the key, or from where it should not come."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.server.errors import ApiError
from runtime.server.http import error_response
from runtime.server.page import PATHS as PAGE_PATHS

BODY_BYTES_DEFAULT = 16 << 20
HEADER_BYTES_MAX = 32 << 10  # uvicorn keeps no more of headers that come in pieces
_OPEN_PATHS = ("/health", *PAGE_PATHS)


@dataclass(frozen=True)
class Limits:
    """api_key "": none needed. hosts: names in the Host header that are answered, empty: any. bodies_at_once: so many
    bodies of the largest size may be held together."""

    body_bytes: int = BODY_BYTES_DEFAULT
    bodies_at_once: int = 16
    api_key: str = ""
    hosts: Collection[str] = ()


class Guard:
    """ASGI middleware. A body is counted as it comes, whatever its header claims."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app, self._limits = app, limits
        self._key_digest = _digest(limits.api_key.encode()) if limits.api_key else None
        self._held_bytes = 0  # of bodies whose requests are not answered yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            await error_response(refusal)(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            more = len(message.get("body", b""))
            num_bytes += more
            self._held_bytes += more
            if num_bytes > self._limits.body_bytes:
                raise self._too_large()
            if self._held_bytes > self._limits.body_bytes * self._limits.bodies_at_once:
                raise ApiError(503, "too many large requests at once; try again later", code="too_busy", retry=True)
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._held_bytes -= num_bytes

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        if sum(len(name) + len(value) for name, value in headers.raw) > HEADER_BYTES_MAX:
            return ApiError(431, f"the headers have more than {HEADER_BYTES_MAX} bytes", code="headers_too_large")
        host = headers.get("host", "")
        if self._limits.hosts and _host_name(host) not in self._limits.hosts:
            return ApiError(403, "this host name is not served here; see --allow-host", code="host_not_allowed")
        if self._key_digest is not None and path not in _OPEN_PATHS:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            given = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
            if not hmac.compare_digest(_digest(given.encode("latin-1")), self._key_digest):
                return ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._limits.body_bytes:
            return self._too_large()
        return None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the request has more than {self._limits.body_bytes} bytes", code="request_too_large")


def _digest(key: bytes) -> bytes:
    """Of one length, so that comparing tells nothing about the key's."""
    return hashlib.sha256(key).digest()


def _host_name(host: str) -> str:
    """Without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
