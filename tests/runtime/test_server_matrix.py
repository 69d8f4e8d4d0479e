"""Each option of a request gives the same reply with drafting and without, for the same seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.runtime.server import Running, serving_session, text_of
from tests.runtime.serving import open_trained
from tests.runtime.test_server_openai import JSON_FORMAT, TOOLS

if TYPE_CHECKING:
    from tests.exported import Exported

THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
ENDLESS = {"logit_bias": {"4089": -100, "4091": -100}}  # replies are short otherwise
LIMITED = [
    {
        "type": "function",
        "function": {
            "name": "note",
            "parameters": {
                "type": "object",
                "properties": {
                    "word": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 9},
                    "mode": {"enum": ["fast", 2, None]},
                    "at": {"type": ["string", "integer"], "minimum": 1, "maxLength": 4},
                },
                "required": ["word", "mode", "at"],
            },
        },
    }
]
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "endless": ENDLESS,
    "top_p": {"top_p": 0.7},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.1},
    "stop": {"stop": [" of", "e le"]},
    "presence_penalty": {"presence_penalty": 1.5, **ENDLESS},
    "frequency_penalty": {"frequency_penalty": 1.2, **ENDLESS},
    "repetition_penalty": {"repetition_penalty": 1.4, **ENDLESS},
    "negative penalties": {"presence_penalty": -1.0, "frequency_penalty": -0.5, **ENDLESS},
    "logit_bias": {"logit_bias": {"300": 4.0, "301": 4, "10": -100}},
    "logprobs": {"logprobs": True, "top_logprobs": 5},
    "json_object": {"response_format": {"type": "json_object"}},
    "json_schema": {"response_format": JSON_FORMAT},
    "tools": {"tools": TOOLS},
    "required tool": {"tools": TOOLS, "tool_choice": "required"},
    "limited arguments": {"tools": LIMITED, "tool_choice": "required"},
    "one call": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    "tools or json": {"tools": TOOLS, "response_format": JSON_FORMAT},
    "thinking": THINKING,
    "json after thinking": {"response_format": JSON_FORMAT, **THINKING},
    "a few tokens": {"max_tokens": 3},
    "all": {
        "top_p": 0.9,
        "top_k": 50,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "logit_bias": {"300": 1.0},
        "logprobs": True,
        "top_logprobs": 2,
        "response_format": JSON_FORMAT,
        "stop": ["zzz"],
        **THINKING,
    },
}


@pytest.fixture(scope="module")
def server(exported: Callable[[str], Exported]) -> Iterator[Running]:
    # With a number of drafts that does not depend on how busy the machine is.
    with serving_session(open_trained(exported("trained"))) as running:
        yield running


def reply(server: Running, **fields: Any) -> tuple[Any, ...]:
    """All that a client sees of a whole reply, but for names and times."""
    whole = server.chat(**fields)
    (choice,) = whole["choices"]
    for call in choice["message"].get("tool_calls", ()):
        del call["id"]
    return choice, whole["usage"]["completion_tokens"], whole["timings"]["draft_n"]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_same_reply(server: Running, name: str, temperature: float) -> None:
    fields = {"max_tokens": 48, "temperature": temperature, "seed": 11, **OPTIONS[name]}
    plain, plain_count, none_drafted = reply(server, **fields, spec="off")
    drafted, drafted_count, some_drafted = reply(server, **fields, spec="on")
    assert (drafted, drafted_count) == (plain, plain_count)
    assert none_drafted == 0 and (some_drafted > 0 or fields["max_tokens"] == 3)
    events = server.events(**fields, spec="on")
    assert text_of(events) == (plain["message"]["content"] or "")
    assert text_of(events, "reasoning_content") == plain["message"].get("reasoning_content", "")
    assert [e["choices"][0]["finish_reason"] for e in events if e["choices"]][-1] == plain["finish_reason"]


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty", "negative penalties"])
def test_penalties_change_the_text(server: Running, name: str) -> None:
    """Else their rows of the matrix would prove nothing."""
    fields = {"max_tokens": 48, "temperature": 0.9, "seed": 11}
    assert reply(server, **fields, **OPTIONS[name])[0] != reply(server, **fields, **ENDLESS)[0]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    "name", ["nothing", "top_p", "top_k", "min_p", "stop", "repetition_penalty", "logit_bias", "logprobs"]
)
def test_the_same_completion(server: Running, name: str, temperature: float) -> None:
    options = {"logprobs": 3} if name == "logprobs" else OPTIONS[name]
    fields = {"prompt": "def f(x):", "max_tokens": 40, "temperature": temperature, "seed": 11, **options}
    plain, drafted = (
        server.http.post("/v1/completions", json={**fields, "spec": spec}).json() for spec in ("off", "on")
    )
    assert drafted["choices"] == plain["choices"] and drafted["usage"] == plain["usage"]
    assert plain["timings"]["draft_n"] == 0 < drafted["timings"]["draft_n"]
