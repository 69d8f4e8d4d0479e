"""The page at `/`: files of this package, served as they are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

# What a page may load and do: its own files, requests to its own server, and nothing else.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_FOLDER = Path(__file__).parent / "web"
_FILES = {
    "/": ("index.html", "text/html"),
    "/chat.css": ("chat.css", "text/css"),
    "/chat.js": ("chat.js", "text/javascript"),
    "/stream.js": ("stream.js", "text/javascript"),
}
# They hold no secrets, and a browser sends no key for them.
PATHS = tuple(_FILES)


def add_page(app: FastAPI) -> None:
    """Serve the page's files, each read once."""
    for path, (name, kind) in _FILES.items():
        app.add_route(path, _file((_FOLDER / name).read_bytes(), kind), include_in_schema=False)


def _file(body: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def serve(_: Request) -> Response:
        return Response(body, media_type=kind, headers=_HEADERS)

    return serve
