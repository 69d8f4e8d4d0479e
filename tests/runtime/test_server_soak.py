"""Mixed load from many clients: each reply is that of its own run, no place stays taken, memory does not grow."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from runtime.server.service import ServiceOptions
from tests.exported import Exported
from tests.memory import needs_peak, reset_peak
from tests.runtime.server import Running, serving
from tests.runtime.test_server_openai import JSON_FORMAT, NAMED, TOOLS

NUM_CLIENTS, NUM_REQUESTS = 8, 12  # of each
GROWTH_MAX = 24 << 20  # bytes from the middle on: allocators keep some, leaked states would be tens of MiB
ENDLESS = {"4089": -100, "4091": -100}


def question(i: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"What does {('len', 'map', 'zip', 'iter', 'sum')[i % 5]} do?" + " Say." * (i % 3)}
    ]


# What clients ask for; every one's answer is known from asking it alone.
KINDS: list[dict[str, Any]] = [
    {"messages": question(0), "temperature": 0, "max_tokens": 30},
    {"messages": question(1), "temperature": 0.9, "seed": 4, "max_tokens": 40, "frequency_penalty": 0.5},
    {"messages": question(2), "temperature": 0.8, "seed": 5, "max_tokens": 40, "response_format": JSON_FORMAT},
    {"messages": question(3), "temperature": 0.7, "seed": 6, "max_tokens": 60, "tools": TOOLS, "tool_choice": NAMED},
    {"messages": question(4), "temperature": 0, "max_tokens": 50, "reasoning_effort": "low"},
    {"messages": question(5), "temperature": 1, "seed": 7, "max_tokens": 60, "logit_bias": ENDLESS, "spec": "off"},
    {
        "messages": [*question(0), {"role": "assistant", "content": "A length."}, *question(1)],
        "temperature": 0,
        "max_tokens": 20,
    },
    {"messages": question(0) * 20, "temperature": 0, "max_tokens": 10, "stop": ["the"]},
]


def seen(reply: dict[str, Any]) -> Any:
    """What does not change from one time to the next."""
    (choice,) = reply["choices"]
    for call in choice["message"].get("tool_calls", ()):
        call.pop("id")
    return choice, reply["usage"]["completion_tokens"]


class _Client(threading.Thread):
    """Asks, and sometimes leaves in the middle, asks nonsense, or waits for no answer."""

    def __init__(self, server: Running, known: list[Any], seed: int) -> None:
        super().__init__(daemon=True)
        self._server, self._known, self._random = server, known, random.Random(seed)
        self.failure: BaseException | None = None
        self.num_right = 0

    def run(self) -> None:
        try:
            with httpx.Client(base_url=self._server.url, timeout=120.0) as http:
                for _ in range(NUM_REQUESTS):
                    self._ask(http)
        except BaseException as error:
            self.failure = error

    def _ask(self, http: httpx.Client) -> None:
        act, kind = self._random.random(), self._random.randrange(len(KINDS))
        if act < 0.1:
            assert http.post("/v1/chat/completions", json={**KINDS[kind], "n": 3}).status_code == 400
        elif act < 0.25:
            body = {**KINDS[kind], "stream": True, "max_tokens": 400, "logit_bias": ENDLESS, "stop": None}
            with http.stream("POST", "/v1/chat/completions", json=body) as reply:
                assert reply.status_code in (200, 503)
                lines = reply.iter_lines()
                for _ in range(self._random.randrange(4)):
                    next(lines, None)
        else:
            reply = http.post("/v1/chat/completions", json=KINDS[kind])
            if reply.status_code == 503:
                assert int(reply.headers["Retry-After"]) > 0
                return
            assert reply.status_code == 200, reply.text
            assert json.dumps(seen(reply.json())) == json.dumps(self._known[kind])
            self.num_right += 1


@needs_peak
@pytest.mark.slow
def test_soak(exported: Callable[[str], Exported]) -> None:
    options = ServiceOptions(num_sequences=4, queue_limit=4, cache_bytes=64 << 20)
    with serving(exported("trained"), options) as server:
        known = [seen(server.chat(**kind)) for kind in KINDS]
        sizes = []
        for half in range(2):
            clients = [_Client(server, known, seed=10 * half + i) for i in range(NUM_CLIENTS)]
            for client in clients:
                client.start()
            for client in clients:
                client.join()
            assert [client.failure for client in clients] == [None] * NUM_CLIENTS
            assert sum(client.num_right for client in clients) > NUM_CLIENTS * NUM_REQUESTS / 3
            server.idle()
            sizes.append(reset_peak())  # what is resident now
        assert server.service.prefixes is not None and server.service.prefixes.nbytes <= 64 << 20
        assert server.service.scheduler.failed is None
        assert sizes[1] - sizes[0] < GROWTH_MAX
