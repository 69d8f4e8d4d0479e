"""The official client against the server: chat, streams, tools, structured output, log-probabilities, errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.runtime.server import USER, Running, serving

if TYPE_CHECKING:
    from tests.exported import Exported

SCHEMA = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 8}, "count": {"type": "integer"}},
    "required": ["word", "count"],
    "additionalProperties": False,
}
JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks a word up.",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string", "enum": ["len", "map"]}, "deep": {"type": "boolean"}},
                "required": ["word", "deep"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "look_up"}}


@pytest.fixture(scope="module")
def server(exported: Callable[[str], Exported]) -> Iterator[Running]:
    with serving(exported("trained")) as running:
        yield running


@pytest.fixture(params=["on", "off"])
def ask(request: pytest.FixtureRequest, server: Running) -> Callable[..., Any]:
    """``client.chat.completions.create`` with drafting or without."""

    def create(**fields: Any) -> Any:
        extra = {"spec": request.param, **fields.pop("extra_body", {})}
        fields = {"model": server.model, "messages": USER, "temperature": 0, **fields}
        return server.openai.chat.completions.create(**fields, extra_body=extra)

    return create


def test_chat(ask: Callable[..., Any], server: Running) -> None:
    reply = ask(max_tokens=30)
    (choice,) = reply.choices
    assert (reply.object, reply.model, choice.finish_reason) == ("chat.completion", server.model, "stop")
    assert choice.message.role == "assistant" and "Return the length" in choice.message.content
    assert choice.message.tool_calls is None and choice.logprobs is None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.completion_tokens == reply.timings["predicted_n"]


def test_drafting_is_on_by_itself_and_can_be_switched_off(server: Running) -> None:
    for _ in range(10):  # whether it pays is measured: on a busy machine it may not at once
        drafted = server.chat(temperature=0, max_tokens=40)["timings"]
        if drafted["draft_n"]:
            break
    assert drafted["draft_n"] >= drafted["draft_n_accepted"] > 0
    for off in (False, "off"):
        assert server.chat(temperature=0, max_tokens=40, spec=off)["timings"]["draft_n"] == 0


def test_stream(ask: Callable[..., Any]) -> None:
    whole = ask(max_tokens=30)
    chunks = list(ask(max_tokens=30, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "stop"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-2])
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    assert set(whole.timings) == set(chunks[-2].timings)


def test_thinking(ask: Callable[..., Any]) -> None:
    fields = {"max_tokens": 60, "extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    whole = ask(**fields).choices[0]
    assert whole.message.reasoning_content and whole.message.content
    assert "think>" not in whole.message.reasoning_content + whole.message.content
    deltas = [chunk.choices[0].delta for chunk in ask(**fields, stream=True)]
    thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert thought == whole.message.reasoning_content
    assert "".join(delta.content or "" for delta in deltas) == whole.message.content
    by_effort = ask(max_tokens=60, reasoning_effort="low").choices[0].message
    assert by_effort.reasoning_content == whole.message.reasoning_content
    without = ask(max_tokens=60, reasoning_effort="none").choices[0].message
    assert not hasattr(without, "reasoning_content")


def test_thinking_that_is_cut_off(ask: Callable[..., Any]) -> None:
    (choice,) = ask(max_tokens=4, reasoning_effort="high").choices
    assert (choice.finish_reason, choice.message.content) == ("length", "")
    assert choice.message.reasoning_content


def test_structured_output(ask: Callable[..., Any]) -> None:
    for seed in range(3):
        (choice,) = ask(max_tokens=120, response_format=JSON_FORMAT, temperature=0.7, seed=seed).choices
        if choice.finish_reason == "stop":
            value = json.loads(choice.message.content)
            assert list(value) == ["word", "count"] and isinstance(value["count"], int)
        else:
            assert choice.finish_reason == "length"
    (choice,) = ask(max_tokens=200, response_format={"type": "json_object"}, temperature=0.7, seed=1).choices
    assert choice.message.content.lstrip().startswith("{")


def test_structured_output_after_thinking(ask: Callable[..., Any]) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"]}
    schema["additionalProperties"] = False
    format_ = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    (choice,) = ask(max_tokens=80, response_format=format_, reasoning_effort="low").choices
    assert choice.message.reasoning_content
    assert json.loads(choice.message.content)["n"] in (1, 2, 3)
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_tool_must_be_called(ask: Callable[..., Any], choice: Any) -> None:
    fields = {
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 0.8,
        "max_tokens": 100,
    }
    seen = set()
    for seed in range(4):
        (whole,) = ask(**fields, seed=seed).choices
        assert whole.finish_reason == "tool_calls" and not whole.message.content
        (call,) = whole.message.tool_calls
        arguments = json.loads(call.function.arguments)
        seen.add(call.function.name)
        if call.function.name == "look_up":
            assert arguments["word"] in ("len", "map") and isinstance(arguments["deep"], bool)
        else:
            assert arguments == {}
    assert "look_up" in seen and (choice == "required" or seen == {"look_up"})


def test_tool_calls_in_a_stream(ask: Callable[..., Any]) -> None:
    fields = {"tools": TOOLS, "tool_choice": NAMED, "seed": 3, "max_tokens": 100}
    (call,) = ask(**fields).choices[0].message.tool_calls
    chunks = list(ask(**fields, stream=True))
    deltas = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or ()]
    assert {delta.index for delta in deltas} == {0}
    assert [delta.function.name for delta in deltas if delta.id] == ["look_up"]
    assert "".join(delta.function.arguments for delta in deltas) == call.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


LONG_TEXT = 'Say "hello" to the world,\n and then some more: ' * 6
LONG_TOOL = {
    "type": "function",
    "function": {
        "name": "say",
        "parameters": {
            "type": "object",
            "properties": {"loud": {"type": "boolean"}, "text": {"type": "string", "enum": [LONG_TEXT]}},
            "required": ["loud", "text"],
        },
    },
}


def streamed_calls(chunks: list[Any]) -> list[Any]:
    return [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or ()]


def test_a_long_call(ask: Callable[..., Any]) -> None:
    """In a stream, it comes when it is complete."""
    fields = {"tools": [LONG_TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 400}
    (whole,) = ask(**fields).choices
    (call,) = whole.message.tool_calls
    assert json.loads(call.function.arguments)["text"] == LONG_TEXT
    chunks = list(ask(**fields, stream=True))
    opening, rest = streamed_calls(chunks)
    assert (opening.function.name, opening.function.arguments) == ("say", "") and opening.id
    assert rest.function.arguments == call.function.arguments
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason == "tool_calls"


@pytest.mark.parametrize("max_tokens", [10, 40, 100, 140])
def test_a_long_call_that_is_cut_off(ask: Callable[..., Any], max_tokens: int) -> None:
    """There is no such call, whole or in a stream, and nothing of it in the answer; the reason says why."""
    fields = {"tools": [LONG_TOOL], "tool_choice": "required", "max_tokens": max_tokens}
    chunks = list(ask(**fields, stream=True))
    assert not streamed_calls(chunks)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""
    (whole,) = ask(**fields).choices
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason == "length"
    assert whole.message.tool_calls is None and whole.message.content == ""


@pytest.mark.parametrize("max_tokens", range(1, 30, 4))
def test_a_call_that_is_cut_off(ask: Callable[..., Any], max_tokens: int) -> None:
    (choice,) = ask(tools=TOOLS, tool_choice=NAMED, max_tokens=max_tokens).choices
    if choice.finish_reason != "tool_calls":
        assert choice.finish_reason == "length"
        assert choice.message.tool_calls is None and choice.message.content == ""


def test_the_second_turn_of_a_tool_call(ask: Callable[..., Any]) -> None:
    first = ask(tools=TOOLS, tool_choice=NAMED, max_tokens=100).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "the length"}
    messages = [*USER, first.model_dump(exclude_none=True), result]
    assert ask(messages=messages, tools=TOOLS, max_tokens=10).choices[0].message.content


def test_a_choice_of_none_calls_nothing(ask: Callable[..., Any]) -> None:
    with_tools = ask(tools=TOOLS, tool_choice="none", max_tokens=30).choices[0].message.content
    assert with_tools == ask(max_tokens=30).choices[0].message.content


def test_logprobs(ask: Callable[..., Any]) -> None:
    (choice,) = ask(logprobs=True, top_logprobs=4, max_tokens=12).choices
    content = choice.logprobs.content
    assert "".join(each.token for each in content) == choice.message.content
    for each in content:
        assert bytes(each.bytes).decode() == each.token
        assert len(each.top_logprobs) == 4 and each.top_logprobs[0].logprob == each.logprob  # greedy
        values = [other.logprob for other in each.top_logprobs]
        assert values == sorted(values, reverse=True) and each.logprob <= 0
    streamed = [
        each
        for chunk in ask(logprobs=True, top_logprobs=4, max_tokens=12, stream=True)
        for each in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    assert streamed == content


def test_stop_strings_across_tokens(ask: Callable[..., Any]) -> None:
    """What is shown ends where the string begins, and so do the log-probabilities and the count."""
    whole = ask(max_tokens=30).choices[0].message.content
    for stop in ("length (", "th (the num", "the", "Return", " "):
        reply = ask(max_tokens=30, stop=["never there", stop], logprobs=True)
        (choice,) = reply.choices
        assert choice.message.content == whole[: whole.index(stop)]
        assert choice.finish_reason == "stop"
        assert "".join(each.token for each in choice.logprobs.content).startswith(choice.message.content)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in ask(max_tokens=30, stop=stop, stream=True))
        assert streamed == choice.message.content
    assert ask(max_tokens=30, stop="not in it").choices[0].message.content == whole


def test_completions(server: Running) -> None:
    for spec in ("on", "off"):
        fields: dict[str, Any] = {"model": server.model, "prompt": "The ", "temperature": 0, "max_tokens": 12}
        whole = server.openai.completions.create(**fields, logprobs=2, extra_body={"spec": spec})
        (choice,) = whole.choices
        assert choice.text and choice.finish_reason == "length" and whole.usage.completion_tokens == 12
        assert "".join(choice.logprobs.tokens) == choice.text
        assert choice.logprobs.text_offset[0] == 0 and len(choice.logprobs.top_logprobs[0]) == 2
        stream = server.openai.completions.create(**fields, stream=True, extra_body={"spec": spec})
        assert "".join(chunk.choices[0].text for chunk in stream) == choice.text
        ids = server.http.post("/tokenize", json={"content": "The "}).json()["tokens"]
        again = server.openai.completions.create(**{**fields, "prompt": ids}, extra_body={"spec": spec})
        assert again.choices[0].text == choice.text


def test_models(server: Running) -> None:
    (model,) = server.openai.models.list().data
    assert model.id == server.model
    assert server.openai.models.retrieve(server.model).id == server.model
    with pytest.raises(openai.NotFoundError):
        server.openai.models.retrieve("another")


def test_errors_have_the_classes_that_the_client_knows(server: Running) -> None:
    create = server.openai.chat.completions.create
    with pytest.raises(openai.NotFoundError) as not_found:
        create(model="gpt-4", messages=USER)
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        create(model=server.model, messages=USER, n=2)
    assert bad.value.param == "n"
    with pytest.raises(openai.BadRequestError) as long:
        create(model=server.model, messages=[{"role": "user", "content": "word " * 9000}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        next(iter(create(model=server.model, messages=USER, stream=True, top_logprobs=3)))
