"""Errors as OpenAI's clients read them, whoever makes them: message, type, param, code; fields by their paths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from runtime.server.service import ServiceOptions
from tests.exported import Exported
from tests.runtime.server import USER, Running, serving
from tests.runtime.test_infinite_logits import spoil_trunk

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


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("fields", [{}, {"logit_bias": {"5": -90}}, {"temperature": 0.7, "top_p": 0.9}], ids=str)
def test_a_logit_that_is_no_number_ends_its_own_reply(
    server: Running, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], value: float
) -> None:
    """Whole or streamed; what was generated before stays said. A shorter text beside it and the next are as ever."""
    body = {"temperature": 0, "seed": 3, **fields}
    whole = server.chat(**body, max_tokens=8)
    assert whole["usage"]["completion_tokens"] > 5
    place = whole["usage"]["prompt_tokens"] + 5
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as beside:
        spoil_trunk(patch, place, value)
        shorter = beside.submit(server.chat, **body, max_tokens=4)
        status, error = server.refusal(**body, max_tokens=8)
        assert (status, error["code"]) == (500, "not_finite") and f"position {place}: " in error["message"]
        *events, last = server.events(**body, max_tokens=8)
        assert last["error"] == error
        said = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
        assert said and whole["choices"][0]["message"]["content"].startswith(said)
        assert whole["choices"][0]["message"]["content"].startswith(
            shorter.result()["choices"][0]["message"]["content"]
        )
    server.idle()
    assert server.chat(**body, max_tokens=8)["choices"] == whole["choices"]
