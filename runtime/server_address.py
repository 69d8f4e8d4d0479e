"""Addresses of servers, as flags give them."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from engines.errors import UsageError


def server_address(flag: str, url: str) -> SplitResult:
    """The parts of ``url``. Raises UsageError for what can be no server's address."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")
        usable = parts.scheme in ("http", "https") and bool(host) and parts.port != 0
    except ValueError:  # brackets without an address, a port that is no number, a name that is too long
        usable = False
    # Python's own client sends nothing else.
    usable = usable and url.isprintable() and " " not in url and parts.path.isascii()
    if not usable or parts.query or parts.fragment or parts.username:
        raise UsageError(f"{flag} {url}: wanted the address of a server, as in http://127.0.0.1:8080")
    return parts
