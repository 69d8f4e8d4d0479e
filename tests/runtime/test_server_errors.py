"""Errors as OpenAI's clients read them, whoever makes them: message, type, param, code; fields by their paths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from runtime.server.service import ServiceOptions
from tests.exported import Exported
from tests.runtime.server import USER, Running, serving

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(exported: Callable[[str], Exported]) -> Iterator[Running]:
    with serving(exported("trained"), ServiceOptions(num_sequences=2)) as running:
        yield running


LONE = "\ud800"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": f"a{LONE}"}]}, "messages[0].content"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": LONE}]}]},
            "messages[0].content[0].text",
        ),
        (CHAT, {"messages": [{"role": "user", "content": "x", "name": LONE}]}, "messages[0].name"),
        (CHAT, {"stop": [LONE]}, "stop[0]"),
        (CHAT, {"user": LONE}, "user"),
        (CHAT, {"model": LONE}, "model"),
        (CHAT, {"chat_template_kwargs": {"a": [{"b": LONE}]}}, "chat_template_kwargs.a[0].b"),
        (CHAT, {"chat_template_kwargs": {LONE: 1}}, "chat_template_kwargs.\\ud800"),
        (
            CHAT,
            {"tools": [{"type": "function", "function": {"name": "f", "description": LONE}}]},
            "tools[0].function.description",
        ),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [LONE]}}}},
            "response_format.json_schema.schema.enum[0]",
        ),
        ("/v1/completions", {"prompt": LONE}, "prompt"),
        ("/v1/completions", {"prompt": [LONE]}, "prompt[0]"),
        ("/tokenize", {"content": LONE}, "content"),
    ],
)
def test_text_that_is_no_unicode_is_named(server: Running, path: str, fields: dict[str, Any], param: str) -> None:
    status, error = server.refusal(path, **fields)
    assert (status, error["param"]) == (404 if param == "model" else 400, param)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/detokenize", {"tokens": [1, 4096]}, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {}, "tokens"),
        ("/tokenize", {"content": 1}, "content"),
        ("/tokenize", {"content": "a", "with_pieces": True}, "with_pieces"),
    ],
)
def test_the_field_of_tokens_is_named(server: Running, path: str, fields: dict[str, Any], param: str) -> None:
    status, error = server.refusal(path, **fields)
    assert (status, error["param"], param in error["message"]) == (400, param, True)


def test_too_many_stops_are_said_to_be(server: Running) -> None:
    """Not that the list is no string, which is what the field may be instead."""
    assert "at most 16" in server.refusal(stop=["a"] * 17)[1]["message"]


def test_every_error_is_one_of_openais(server: Running) -> None:
    """Whoever makes it."""
    requests: list[tuple[str, str, dict[str, Any]]] = [
        ("GET", "/nowhere", {}),
        ("GET", CHAT, {}),
        ("GET", "/v1/models/none", {}),
        ("POST", CHAT, {"content": b"{"}),
        ("POST", CHAT, {"content": b"\x1f\x8b\xff"}),
        ("POST", CHAT, {"content": b"[" * 100_000}),
        ("POST", CHAT, {"json": {}}),
        ("POST", CHAT, {"json": {"messages": USER, "model": "none"}}),
        ("POST", CHAT, {"json": {"messages": USER}, "headers": {"Content-Type": "text/plain"}}),
        ("POST", CHAT, {"content": b" " * (17 << 20)}),
        ("GET", "/health", {"headers": {"X-Long": "x" * 40_000}}),
    ]
    for method, path, more in requests:
        more.setdefault("headers", {"Content-Type": "application/json"})
        reply = server.http.request(method, path, **more)
        error = reply.json()["error"]
        assert reply.status_code >= 400 and error.keys() == {"message", "type", "param", "code"}, (path, more)
        assert error["message"] and error["code"] and error["type"] == "invalid_request_error"
