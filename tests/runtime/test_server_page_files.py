"""The files of the page at `/`, without a browser."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import httpx
import pytest

from runtime.server.page import PATHS
from tests.exported import Exported
from tests.runtime.server import Running, serving


@pytest.fixture(scope="module")
def server(exported: Callable[[str], Exported]) -> Iterator[Running]:
    with serving(exported("trained")) as running:
        yield running


@pytest.mark.parametrize("path", PATHS)
def test_the_files_may_load_nothing_else(server: Running, path: str) -> None:
    reply = httpx.get(server.url + path)
    assert reply.status_code == 200
    policy = reply.headers["content-security-policy"].split("; ")
    assert {"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'", "base-uri 'none'"} <= set(policy)
    assert "unsafe" not in str(policy) and reply.headers["x-content-type-options"] == "nosniff"
    assert not re.search(r"(?i)https?://|\son\w+=|style=|innerHTML|eval\(", reply.text)
    assert httpx.get(f"{server.url}/..{path}x").status_code == 404
