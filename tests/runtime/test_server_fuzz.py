"""Whatever a request holds, it is served or refused in words: no internal error, no place that stays taken."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from runtime.server.service import ServiceOptions
from tests.exported import Exported
from tests.runtime.server import Running, serving_session
from tests.runtime.serving import WAIT_S, open_trained
from tests.runtime.test_server_openai import JSON_FORMAT, NAMED, TOOLS

TEXT = st.text(max_size=20) | st.sampled_from(
    ["What does len do?", "<|im_end|>", "</think>", "<tool_call>", "\x00", "é" * 50]
)
ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
CALL = {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}
MESSAGE = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "developer"]), "content": TEXT}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": TEXT, "reasoning_content": TEXT}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": st.none(), "tool_calls": st.just([CALL])}),
    st.fixed_dictionaries({"role": st.just("tool"), "content": TEXT, "tool_call_id": TEXT}),
    st.fixed_dictionaries(
        {
            "role": st.just("user"),
            "content": st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}), max_size=2),
        }
    ),
)
ENDLESS = {"type": "json_schema", "json_schema": {"schema": {"type": "string", "minLength": 5000}}}
CONTEXT = 640  # tools fit, and without a limit a text that does not end takes seconds
_WORDS = """type properties required items enum const anyOf oneOf allOf not if $ref $defs pattern format minLength
    maxLength minimum maximum multipleOf additionalProperties minProperties maxProperties title"""
KEYWORDS = _WORDS.split()
SCHEMAS = st.sampled_from(
    [
        {},
        {"type": "object"},
        {"type": "array", "items": {"type": "number"}, "maxItems": 2},
        {"enum": ["a", 1, None]},
        {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-c]{1,3}$"}]},
        {"type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "integer"}}},
        {"type": "string", "pattern": "("},
        {"not": {}},
        {"$ref": "#"},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": ["string", "integer"], "minimum": 5, "maxLength": 3},
        {"enum": ["a", 1, None], "maxLength": 0},
        {"oneOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
        {"type": "string", "pattern": "^[[&~]\\d.$|b"},
    ]
) | st.dictionaries(
    st.sampled_from(KEYWORDS),
    ODD | st.lists(st.dictionaries(st.sampled_from(KEYWORDS), ODD, max_size=2), max_size=2),
    max_size=3,
)
COMMON = {
    "temperature": st.floats(0, 2) | st.sampled_from([0, 1e6]),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 5000),
    "min_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**64 - 1),
    "stop": TEXT | st.lists(TEXT, max_size=3),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.01, 3) | st.sampled_from([1e-300, 100]),
    "logit_bias": st.dictionaries(st.integers(0, 4200).map(str), st.floats(-100, 100), max_size=3),
    "spec": st.sampled_from([True, False, "on", "off"]),
    "stream": st.booleans(),
    "stream_options": st.just({"include_usage": True}),
}
CHAT = {
    **COMMON,
    "logprobs": st.booleans(),
    "top_logprobs": st.integers(0, 20),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}, JSON_FORMAT])
    | SCHEMAS.map(lambda schema: {"type": "json_schema", "json_schema": {"schema": schema}}),
    "tools": st.just(TOOLS)
    | SCHEMAS.map(lambda schema: [{"type": "function", "function": {"name": "f", "parameters": schema}}])
    | SCHEMAS.map(
        lambda schema: [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"p": schema}}}}]
    ),
    "tool_choice": st.sampled_from(["none", "auto", "required", NAMED]),
    "parallel_tool_calls": st.booleans(),
    "chat_template_kwargs": st.dictionaries(st.sampled_from(["enable_thinking", "x"]), ODD, max_size=2),
    "reasoning_effort": st.sampled_from(["none", "low", "high"]),
    "max_completion_tokens": st.integers(0, 12),
}
COMPLETION = {**COMMON, "logprobs": st.integers(0, 20), "echo": st.just(False)}


@pytest.fixture(scope="module")
def server(exported: Callable[[str], Exported]) -> Iterator[Running]:
    session = open_trained(exported("trained"), spec_type="auto", context_size=CONTEXT)
    with serving_session(session, ServiceOptions(num_sequences=2, timeout_s=WAIT_S)) as running:
        yield running
        running.idle()
        assert running.service.scheduler.failed is None


@st.composite
def requests(draw: st.DrawFn, fields: dict[str, st.SearchStrategy[Any]], given_: dict[str, Any]) -> dict[str, Any]:
    """A few fields with values that may do, and now and then one that will not."""
    names = draw(st.lists(st.sampled_from(sorted(fields)), max_size=6, unique=True))
    body = {"max_tokens": draw(st.integers(0, 12)), **{name: draw(fields[name]) for name in names}}
    body |= {name: draw(strategy) for name, strategy in given_.items()}
    if draw(st.integers(0, 3)) == 0:
        body[draw(st.sampled_from(sorted(body)) | TEXT)] = draw(ODD)
    return body


def check(server: Running, path: str, body: dict[str, Any]) -> None:
    reply = server.http.post(path, content=json.dumps(body).encode(), headers={"Content-Type": "application/json"})
    if reply.status_code != 200:
        assert reply.status_code in (400, 404), (body, reply.text)
        assert reply.json()["error"]["message"], body
    elif "text/event-stream" in reply.headers["Content-Type"]:
        *events, last = [line for line in reply.text.split("\n") if line.startswith("data: ")]
        assert last == "data: [DONE]"
        assert not [event for event in events if "error" in json.loads(event.removeprefix("data: "))], body
    else:
        assert reply.json()["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls")


FUZZ = settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.slow
@FUZZ
@given(requests(CHAT, {"messages": st.lists(MESSAGE, min_size=1, max_size=4)}))
@example(
    {"max_tokens": None, "response_format": ENDLESS, "messages": [{"role": "user", "content": "What does len do?"}]}
)
def test_chats(server: Running, body: dict[str, Any]) -> None:
    check(server, "/v1/chat/completions", body)


@pytest.mark.slow
@FUZZ
@given(requests(COMPLETION, {"prompt": TEXT | st.lists(st.integers(0, 4095), min_size=1, max_size=6)}))
def test_completions(server: Running, body: dict[str, Any]) -> None:
    check(server, "/v1/completions", body)


@FUZZ
@given(st.sampled_from(["/tokenize", "/detokenize", "/v1/completions", "/v1/chat/completions"]), ODD)
def test_anything(server: Running, path: str, body: Any) -> None:
    reply = server.http.post(path, content=json.dumps(body).encode(), headers={"Content-Type": "application/json"})
    assert reply.status_code in (200, 400, 404), (path, body, reply.text)
