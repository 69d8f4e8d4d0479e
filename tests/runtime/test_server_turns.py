"""A second turn goes on where the first one ended, and says the same as a server that has not seen the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from runtime.server.service import ServiceOptions
from tests.exported import Exported
from tests.runtime.server import Running, serving, text_of

LONG = "What does len do? " * 330


@pytest.fixture(scope="module")
def warm(exported: Callable[[str], Exported]) -> Iterator[Running]:
    with serving(exported("trained")) as running:
        yield running


@pytest.fixture(scope="module")
def cold(exported: Callable[[str], Exported]) -> Iterator[Running]:
    with serving(exported("trained"), ServiceOptions(cache_bytes=0)) as running:
        yield running


def message(reply: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": reply["choices"][0]["message"]["content"]}


@pytest.mark.parametrize("spec", ["on", "off"])
def test_the_second_turn_of_a_long_chat(warm: Running, cold: Running, spec: str) -> None:
    first = [{"role": "user", "content": f"{spec}: {LONG}"}]
    fields = {"temperature": 0.8, "seed": 5, "max_tokens": 30, "spec": spec, "logprobs": True}
    reply = warm.chat(messages=first, **fields)
    num_old = reply["usage"]["prompt_tokens"]
    assert num_old > 2000 and reply["timings"]["prompt_n"] == num_old
    second = [*first, message(reply), {"role": "user", "content": "And map?"}]
    again = warm.chat(messages=second, **fields)
    fresh = cold.chat(messages=second, **fields)
    assert again["choices"] == fresh["choices"]
    assert fresh["timings"]["cache_n"] == 0
    # Old prompt that is processed again: at most the opening of the first answer.
    timings = again["timings"]
    assert num_old - timings["cache_n"] < 20
    assert (
        timings["cache_n"] + timings["prompt_n"] == again["usage"]["prompt_tokens"] == fresh["usage"]["prompt_tokens"]
    )
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == timings["cache_n"]


def test_another_question_about_the_same_text(warm: Running, cold: Running) -> None:
    """They part in the middle of a message: the last interval before that is taken up."""
    fields = {"temperature": 0, "max_tokens": 10}
    warm.chat(messages=[{"role": "user", "content": LONG + "One."}], **fields)
    other = [{"role": "user", "content": LONG + "Two."}]
    again, fresh = warm.chat(messages=other, **fields), cold.chat(messages=other, **fields)
    assert again["choices"] == fresh["choices"]
    assert again["timings"]["prompt_n"] < fresh["timings"]["prompt_n"] / 2


def test_turns_in_a_stream_and_of_several_chats(warm: Running, cold: Running) -> None:
    chats = {
        i: [{"role": "user", "content": f"Chat {i}: what does {name} do?"}] for i, name in enumerate(("len", "map"))
    }
    for turn in range(3):
        for i, chat in chats.items():
            fields = {"messages": chat, "temperature": 0.7, "seed": turn, "max_tokens": 12}
            events = warm.events(**fields)
            text = text_of(events)
            assert text == message(cold.chat(**fields))["content"]
            timings = next(event["timings"] for event in events if "timings" in event)
            assert timings["cache_n"] > 0 or turn == 0
            chats[i] = [*chat, {"role": "assistant", "content": text}, {"role": "user", "content": f"More of {turn}."}]
