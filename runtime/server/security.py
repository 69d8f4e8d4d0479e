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
    """api_key "": none needed. hosts: names in the Host header that are answered, empty: any."""

    body_bytes: int = BODY_BYTES_DEFAULT
    api_key: str = ""
    hosts: Collection[str] = ()


class Guard:
    """ASGI middleware. A body is counted as it comes, whatever its header claims."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app, self._limits = app, limits
        self._key_digest = _digest(limits.api_key.encode()) if limits.api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            await error_response(refusal)(scope, receive, send)
            return
        await self._app(scope, self._counted(receive), send)

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

    def _counted(self, receive: Receive) -> Receive:
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._limits.body_bytes:
                raise self._too_large()
            return message

        return counted

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
