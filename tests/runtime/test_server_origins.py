"""Which tokens of a reply were drafted, and the counters of a reply that still runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.exported import Exported
from tests.runtime.server import USER, Running, serving, text_of

ASKED = {"temperature": 0, "token_origins": True, "timings_per_token": True}


@pytest.fixture(scope="module")
def server(exported: Callable[[str], Exported]) -> Iterator[Running]:
    with serving(exported("trained")) as running:
        yield running


def origins(events: list[dict[str, Any]], field: str = "content") -> list[dict[str, Any]]:
    choices = [choice for event in events for choice in event["choices"]]
    return [each for choice in choices for each in choice.get("token_origins", {}).get(field, ())]


def test_not_unless_asked_for(server: Running) -> None:
    events = server.events(temperature=0)
    assert origins(events) == [] and sum("timings" in event for event in events) == 1
    assert "token_origins" not in server.chat(temperature=0)["choices"][0]


def test_every_chunk_says_where_its_text_is_from(server: Running) -> None:
    events = server.events(**ASKED)
    for event in events:
        delta = event["choices"][0]["delta"]
        told = event["choices"][0].get("token_origins", {})
        assert "".join(each["text"] for each in told.get("content", ())) == (delta.get("content") or "")
    timings = events[-1]["timings"]
    drafted = sum(each["draft"] for each in origins(events))
    # Drafts of the last round are counted, too, from an end token on; the first token is never a draft.
    assert 0 < drafted <= timings["draft_n_accepted"] <= drafted + 3
    assert not origins(events)[0]["draft"]
    assert len(origins(events)) == timings["predicted_n"]


def test_a_reply_in_one_piece_says_it_too(server: Running) -> None:
    choice = server.chat(**ASKED)["choices"][0]
    told = choice["token_origins"]["content"]
    assert "".join(each["text"] for each in told) == choice["message"]["content"] and any(e["draft"] for e in told)


def test_without_drafting_nothing_is_drafted(server: Running) -> None:
    told = origins(server.events(**ASKED, spec="off"))
    assert told and not any(each["draft"] for each in told)


def test_thinking_has_origins_of_its_own(server: Running) -> None:
    events = server.events(**ASKED, chat_template_kwargs={"enable_thinking": True}, max_tokens=20)
    told = origins(events, "reasoning_content")
    assert told and "".join(each["text"] for each in told) == text_of(events, "reasoning_content")
    assert "".join(each["text"] for each in origins(events)) == text_of(events)


def test_text_that_was_held_back_for_a_stop_string_keeps_its_order(server: Running) -> None:
    whole = server.chat(temperature=0)["choices"][0]["message"]["content"]
    events = server.events(**ASKED, stop=[whole[10:18] + "\N{SNOWMAN}", whole[-6:]])
    assert "".join(each["text"] for each in origins(events)) == text_of(events) == whole[:-6]


def test_the_counters_grow_with_the_reply(server: Running) -> None:
    events = server.events(**ASKED, messages=USER, max_tokens=30)
    counted = [event["timings"]["predicted_n"] for event in events]
    assert counted == sorted(counted) and counted[0] >= 1
    assert {"draft_n", "draft_n_accepted", "predicted_per_second", "prompt_n", "cache_n"} <= set(events[0]["timings"])
