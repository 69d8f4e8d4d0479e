"""The soak finds what it is there for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from runtime.scheduler import Scheduler
from runtime.server.service import ServiceOptions
from tests.exported import Exported
from tests.runtime.server import serving
from tests.soak.__main__ import GROWTH_MAX, growth, still_taken
from tests.soak.kinds import KNOWN, joined, seen, spoken
from tests.soak.load import Load, whole

Export = Callable[[str], Exported]
OPTIONS = ServiceOptions(num_sequences=2, queue_limit=4, cache_bytes=8 << 20)
WAIT_FOR_IT_S = 20.0  # it ends at the first failure
SHORT = [KNOWN[i] for i in (0, 3, 5, 13)]


def test_a_short_one(exported: Export) -> None:
    with serving(exported("trained"), OPTIONS) as server:
        load = Load(server.url, [(request, whole(server.http, request, spec="off")) for request in SHORT])
        load.run(5.0, 6)
        assert not load.failures and not still_taken(server.url)
        load.compare_afterwards()
        assert not load.failures
        assert load.counts["whole"] > 0 and load.counts["streamed"] > 0


def test_it_goes_on_until_there_were_so_many(exported: Export) -> None:
    with serving(exported("trained"), OPTIONS) as server:
        load = Load(server.url, [(request, whole(server.http, request, spec="off")) for request in SHORT])
        load.run(0.0, 2, least=8)
        assert not load.failures and 8 <= sum(load.counts.values()) <= 9


def test_a_wrong_text_is_found(exported: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole or streamed; also one that was asked for once."""
    with serving(exported("trained"), OPTIONS) as server:
        known = [(request, whole(server.http, request)) for request in SHORT[:1]]
        once = [(request, whole(server.http, request)) for request in SHORT[1:2]]
        true_text = server.service.tokenizer.piece
        monkeypatch.setattr(
            server.service.tokenizer, "piece", lambda *args, **kwargs: true_text(*args, **kwargs) + b"!"
        )
        load = Load(server.url, known)
        load.run(WAIT_FOR_IT_S, 1)
        assert load.failures and "instead of" in load.failures[0]
        load = Load(server.url, known, once=once)
        load.compare_afterwards()
        assert load.failures and "not the reply of its own run" in load.failures[0]


def test_a_sequence_that_stays_taken_is_found(exported: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.soak.__main__._IDLE_WITHIN_S", 0.5)
    with serving(exported("trained"), OPTIONS) as server:
        assert still_taken(server.url) == []
        with monkeypatch.context() as patch:
            patch.setattr(Scheduler, "num_active", property(lambda _: 1))
            assert still_taken(server.url) == ["still taken: nextn_sequences_active 1.0"]


@pytest.mark.parametrize(("slope", "found"), [(0, False), (GROWTH_MAX // 200, False), (GROWTH_MAX // 60, True)])
def test_growth_is_found(slope: int, found: bool) -> None:
    """Not what is taken while the server warms up, and not a peak."""
    sizes = [min(i, 25) * 10**7 + 10**8 + i * slope for i in range(120)]
    sizes[100] *= 3
    assert bool(growth(sizes)) == found
    assert growth(sizes[:3]) == ["too short to see whether memory grows"]


def test_what_a_stream_says_is_what_a_whole_reply_says(exported: Export) -> None:
    def reply(fields: dict[str, Any]) -> Any:
        return seen(server.chat(**fields))

    with serving(exported("trained"), OPTIONS) as server:
        for i in (1, 3, 6, 8):
            body = KNOWN[i][1]
            assert joined(server.events(**body)) == spoken(reply(body))
