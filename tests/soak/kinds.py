"""What clients of the soak ask for: requests whose replies are known from asking them alone, and requests that are
refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from tests.runtime.test_server_openai import JSON_FORMAT, LONG_TOOL, NAMED, TOOLS

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ENDLESS = {"4089": -100, "4091": -100}  # no end tokens: replies are short otherwise
Request = tuple[str, dict[str, Any]]  # path, body


def question(i: int) -> list[dict[str, str]]:
    name = ("len", "map", "zip", "iter", "sum")[i % 5]
    return [{"role": "user", "content": f"What does {name} do?" + " Say." * (i % 3)}]


def _chat(i: int, **fields: Any) -> Request:
    return CHAT, {"messages": question(i), "temperature": 0.2 * (i % 6), "seed": i, "max_tokens": 40, **fields}


KNOWN: list[Request] = [
    _chat(0),
    _chat(1, frequency_penalty=0.5, presence_penalty=0.5, logit_bias=ENDLESS),
    _chat(2, repetition_penalty=1.3, logit_bias={**ENDLESS, "300": 3.0}),
    _chat(3, response_format=JSON_FORMAT),
    _chat(4, response_format={"type": "json_object"}, max_tokens=60),
    _chat(5, tools=TOOLS, tool_choice=NAMED, max_tokens=60),
    _chat(6, tools=[LONG_TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=400),
    _chat(7, tools=TOOLS),
    _chat(8, reasoning_effort="low", max_tokens=60),
    _chat(9, logprobs=True, top_logprobs=3),
    _chat(10, top_p=0.8, top_k=20, min_p=0.05, logit_bias=ENDLESS, max_tokens=80),
    _chat(11, messages=question(0) * 20, stop=[" the"], max_tokens=20),
    _chat(12, messages=question(2) * 25, max_tokens=10),
    (COMPLETIONS, {"prompt": "def f(x):", "temperature": 0, "max_tokens": 40}),
    (COMPLETIONS, {"prompt": [300, 301, 5, 7], "temperature": 0.9, "seed": 3, "max_tokens": 40, "logprobs": 2}),
]

REFUSED: list[Request] = [
    _chat(0, n=3),
    _chat(0, temperature=-1),
    _chat(0, tool_choice="required"),
    _chat(0, response_format={"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}),
    _chat(0, messages=[{"role": "user", "content": "long " * 20_000}]),
    (CHAT, {"messages": "no list"}),
    (COMPLETIONS, {"prompt": ""}),
    ("/detokenize", {"tokens": [1 << 30]}),
]


def second_turn(request: Request, reply: Any) -> Request:
    """The chat goes on after a reply in words."""
    path, body = request
    said = {"role": "assistant", "content": reply[0]["message"]["content"]}
    return path, {**body, "messages": [*body["messages"], said, {"role": "user", "content": "And then?"}]}


def can_go_on(request: Request, reply: Any) -> bool:
    message = reply[0].get("message", {})
    return request[0] == CHAT and bool(message.get("content")) and "tools" not in request[1]


def seen(reply: dict[str, Any]) -> Any:
    """Of a whole reply, what does not change from one time to the next."""
    (choice,) = reply["choices"]
    for call in choice.get("message", {}).get("tool_calls", ()):
        call.pop("id")
    return json.loads(json.dumps([choice, reply["usage"]["completion_tokens"]]))


def joined(events: Sequence[dict[str, Any]]) -> Any:
    """Events of a stream, put together to what `spoken` has of a whole reply."""
    choices = [event["choices"][0] for event in events if event["choices"]]
    deltas = [choice["delta"] if "delta" in choice else {"content": choice["text"]} for choice in choices]
    return (
        "".join(delta.get("content") or "" for delta in deltas),
        "".join(delta.get("reasoning_content") or "" for delta in deltas),
        list(_calls(deltas)),
        choices[-1]["finish_reason"],
    )


def _calls(deltas: Sequence[dict[str, Any]]) -> Iterator[dict[str, str]]:
    calls: dict[int, dict[str, str]] = {}
    for part in (part for delta in deltas for part in delta.get("tool_calls") or ()):
        call = calls.setdefault(part["index"], {"name": "", "arguments": ""})
        call["name"] += part["function"].get("name") or ""
        call["arguments"] += part["function"]["arguments"]
    yield from calls.values()


def spoken(reply: Any) -> Any:
    """What a stream of the same reply must say."""
    choice = reply[0]
    message = choice.get("message") or {"content": choice["text"]}
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return message["content"] or "", message.get("reasoning_content", ""), calls, choice["finish_reason"]
