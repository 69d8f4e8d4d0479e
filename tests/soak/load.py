"""Clients that ask for everything at once: whole and in streams, leaving early, reading slowly, asking nonsense."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.soak.kinds import (
    CHAT,
    COMPLETIONS,
    ENDLESS,
    KNOWN,
    REFUSED,
    Request,
    can_go_on,
    joined,
    question,
    second_turn,
    seen,
    spoken,
)

WAIT_S = 120.0  # for one reply: whoever waits longer is stuck
FULL = "told to come back"
_KEPT = 40  # replies that are asked for again, alone, when all is quiet


class WrongError(AssertionError):
    """A reply that is not the one of its own run."""


def whole(http: httpx.Client, request: Request, **fields: Any) -> Any:
    """`seen` of a reply; None when the server is full. Raises WrongError."""
    reply = http.post(request[0], json={**request[1], **fields})
    if reply.status_code == 503 and int(reply.headers["Retry-After"]) > 0:
        return None
    if reply.status_code != 200:
        raise WrongError(f"{request}: {reply.status_code} {reply.text}")
    return seen(reply.json())


@dataclass
class Load:
    """known: requests and their replies. Threads add to the rest."""

    url: str
    known: list[tuple[Request, Any]]
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    once: list[tuple[Request, Any]] = field(default_factory=list)  # asked for once, compared afterwards
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, seconds: float, num_clients: int, watch: Callable[[], None] = lambda: None, least: int = 0) -> None:
        """For so long, and longer if that is less than ``least`` requests, up to ``WAIT_S`` more; ``watch`` is called
        about once a second meanwhile."""
        until = time.monotonic() + seconds

        def go_on() -> bool:
            now = time.monotonic()
            with self.lock:
                return now < until or (now < until + WAIT_S and sum(self.counts.values()) < least)

        clients = [threading.Thread(target=self._client, args=(go_on, i), daemon=True) for i in range(num_clients)]
        for client in clients:
            client.start()
        while any(client.is_alive() for client in clients):
            watch()
            time.sleep(1.0)
            if time.monotonic() > until + (2 if least else 1) * WAIT_S:
                self.failures.append("a client never got its answer")
                return

    def compare_afterwards(self) -> None:
        """Each reply that was asked for once, again and alone."""
        with httpx.Client(base_url=self.url, timeout=WAIT_S) as http:
            for request, reply in self.once[-_KEPT:]:
                if whole(http, request) != reply:
                    self.failures.append(f"not the reply of its own run: {request}")
                self.counts["asked again alone"] += 1

    def _client(self, go_on: Callable[[], bool], seed: int) -> None:
        chance = random.Random(seed)
        acts: Sequence[Callable[[httpx.Client, random.Random], str]] = (
            *[self._ask_whole] * 5,
            *[self._ask_stream] * 4,
            *[self._ask_once] * 2,
            self._leave_stream,
            self._leave_whole,
            self._ask_nonsense,
            self._read_slowly,
        )
        try:
            with httpx.Client(base_url=self.url, timeout=WAIT_S) as http:
                while not self.failures and go_on():
                    what = chance.choice(acts)(http, chance)
                    self._count(what)
                    if what == FULL:
                        time.sleep(0.5)
        except Exception as error:  # whatever it is, it is a finding
            with self.lock:
                self.failures.append(f"{type(error).__name__}: {error}"[:2000])

    def _count(self, what: str) -> None:
        with self.lock:
            self.counts[what] += 1

    def _ask_whole(self, http: httpx.Client, chance: random.Random) -> str:
        request, want = chance.choice(self.known)
        got = whole(http, request, spec=chance.choice(["on", "off"]))
        if got is None:
            return FULL
        if got != want:
            raise WrongError(f"{request}: {got} instead of {want}")
        return "whole"

    def _ask_stream(self, http: httpx.Client, chance: random.Random) -> str:
        request, want = chance.choice(self.known)
        events = self._events(http, request, 0.0)
        if events is None:
            return FULL
        if joined(events) != spoken(want):
            raise WrongError(f"{request}: {joined(events)} instead of {spoken(want)}")
        return "streamed"

    def _read_slowly(self, http: httpx.Client, chance: random.Random) -> str:
        request, want = chance.choice(self.known)
        events = self._events(http, request, 0.02)
        if events is not None and joined(events) != spoken(want):
            raise WrongError(f"{request}: {joined(events)} instead of {spoken(want)}")
        return "read slowly" if events is not None else FULL

    def _events(self, http: httpx.Client, request: Request, pause_s: float) -> list[dict[str, Any]] | None:
        with http.stream("POST", request[0], json={**request[1], "stream": True}) as reply:
            if reply.status_code == 503:
                return None
            lines = []
            for line in reply.iter_lines():
                if line.startswith("data: "):  # others keep the connection alive
                    lines.append(line.removeprefix("data: "))
                time.sleep(pause_s)
        if reply.status_code != 200 or lines.pop() != "[DONE]":
            raise WrongError(f"{request}: {reply.status_code}, {lines[-1:]}")
        return [json.loads(line) for line in lines]

    def _ask_once(self, http: httpx.Client, chance: random.Random) -> str:
        """What nobody asked before, so that kept state comes and goes."""
        words = " ".join(str(chance.randrange(1000)) for _ in range(chance.choice([3, 10, 100])))
        body = {"messages": [{"role": "user", "content": words}], "temperature": 0.8, "seed": chance.randrange(99)}
        request = CHAT, {**body, "max_tokens": 20, "logit_bias": ENDLESS}
        reply = whole(http, request)
        if reply is None:
            return FULL
        with self.lock:
            self.once.append((request, reply))
        return "asked once"

    def _leave_stream(self, http: httpx.Client, chance: random.Random) -> str:
        body = {"messages": question(chance.randrange(9)), "stream": True, "logit_bias": ENDLESS}
        with http.stream("POST", CHAT, json=body) as reply:
            lines = reply.iter_lines()
            for _ in range(chance.randrange(6)):
                next(lines, None)
        return "left a stream"

    def _leave_whole(self, _: httpx.Client, chance: random.Random) -> str:
        body = {"messages": question(chance.randrange(9)), "logit_bias": ENDLESS}
        with httpx.Client(base_url=self.url, timeout=chance.uniform(0.01, 0.3)) as http:
            try:
                http.post(CHAT, json=body)
            except httpx.TimeoutException:
                return "left"
        return FULL

    def _ask_nonsense(self, http: httpx.Client, chance: random.Random) -> str:
        path, body = chance.choice(REFUSED)
        reply = http.post(path, json=body)
        if reply.status_code != 400 or not reply.json()["error"]["message"]:
            raise WrongError(f"{path}: {reply.status_code} {reply.text}"[:300])
        return "refused"


def fill(url: str, num_sequences: int, context: int) -> None:
    """Texts as long as the context, one in each sequence, and more of them than are kept: a server's memory then has
    the size that it is to keep."""

    def ask(i: int) -> None:
        ids = [300 + i + place % 50 for place in range(context - 20)]
        httpx.post(
            f"{url}{COMPLETIONS}", json={"prompt": ids, "logit_bias": ENDLESS}, timeout=WAIT_S
        ).raise_for_status()

    with ThreadPoolExecutor(num_sequences) as pool:
        list(pool.map(ask, range(num_sequences)))


def known_replies(url: str) -> list[tuple[Request, Any]]:
    """Each of `KNOWN`, and second turns of those that have one, asked alone, without drafting."""
    with httpx.Client(base_url=url, timeout=WAIT_S) as http:
        known = [(request, whole(http, request, spec="off")) for request in KNOWN]
        turns = [second_turn(request, reply) for request, reply in known if can_go_on(request, reply)]
        return known + [(request, whole(http, request, spec="off")) for request in turns]
