"""The server on engines: its options with drafting and without, turns, several clients, a client that leaves."""

# ruff: noqa: E402 - the imports after the check need packages that a host without a package registry may lack
from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for package in ("fastapi", "llguidance", "openai", "prometheus_client", "uvicorn"):
    pytest.importorskip(package, reason="the server's packages are not installed")

from runtime.server.service import ServiceOptions
from runtime.session import Session, SpecOptions, open_session
from tests.runtime.server import USER, Running, serving_session, text_of
from tests.runtime.test_server_matrix import ENDLESS, OPTIONS, reply
from tests.runtime.test_server_openai import TOOLS

pytestmark = [pytest.mark.gpu, pytest.mark.trt]

LONG = "What does len do? " * 330


def session_of(prepared: Path) -> Session:
    return open_session(prepared / "trained", spec=SpecOptions("auto", 5), sequences=0)


@pytest.fixture(scope="module")
def server(prepared: Path) -> Iterator[Running]:
    with serving_session(session_of(prepared)) as running:
        assert running.service.scheduler.num_slots == 4
        yield running
        running.idle()
        assert running.service.scheduler.failed is None


@pytest.fixture(scope="module")
def cold(prepared: Path) -> Iterator[Running]:
    with serving_session(session_of(prepared), ServiceOptions(cache_bytes=0)) as running:
        yield running


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_same_reply_with_drafting_and_without(server: Running, name: str, temperature: float) -> None:
    fields = {"max_tokens": 48, "temperature": temperature, "seed": 11, **OPTIONS[name]}
    plain, plain_count, none_drafted = reply(server, **fields, spec="off")
    drafted, drafted_count, _ = reply(server, **fields, spec="on")
    assert (drafted, drafted_count, none_drafted) == (plain, plain_count, 0)


@pytest.mark.parametrize("spec", ["on", "off"])
def test_a_second_turn(server: Running, cold: Running, spec: str) -> None:
    fields = {"temperature": 0.8, "seed": 5, "max_tokens": 30, "spec": spec, "logprobs": True}
    first = [{"role": "user", "content": f"{spec}: {LONG}"}]
    answer = server.chat(messages=first, **fields)
    num_old = answer["usage"]["prompt_tokens"]
    assert num_old > 2000 and answer["timings"]["prompt_n"] == num_old
    said = {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
    second = [*first, said, {"role": "user", "content": "And map?"}]
    again, fresh = server.chat(messages=second, **fields), cold.chat(messages=second, **fields)
    assert again["choices"] == fresh["choices"]
    assert num_old - again["timings"]["cache_n"] < 100 and fresh["timings"]["cache_n"] == 0


def test_many_at_once_are_each_as_alone(server: Running) -> None:
    kinds: list[dict[str, Any]] = [
        {"max_tokens": 40, "temperature": 0.5 * (i % 3), "seed": i, **fields}
        for i, fields in enumerate((ENDLESS, {"tools": TOOLS, "tool_choice": "required"}, {"frequency_penalty": 1.0}))
    ]
    want = [reply(server, **kind) for kind in kinds]
    got: list[Any] = [None] * 12

    def ask(i: int) -> None:
        got[i] = reply(server, **kinds[i % 3])

    clients = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert [each[:2] for each in got] == [want[i % 3][:2] for i in range(12)]


def test_a_client_that_leaves_frees_its_place(server: Running) -> None:
    for _ in range(6):
        body = {"messages": USER, "stream": True, **ENDLESS}
        with server.http.stream("POST", "/v1/chat/completions", json=body) as reply_:
            next(reply_.iter_lines())
        server.idle()


def test_openai_client(server: Running) -> None:
    chunks = server.openai.chat.completions.create(
        model=server.model, messages=USER, stream=True, temperature=0, max_tokens=30
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == text_of(server.events(temperature=0, max_tokens=30)) != ""
