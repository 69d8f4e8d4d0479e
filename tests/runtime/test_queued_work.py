"""Work under way: waited for once, and what goes wrong told to its owner alone."""

from __future__ import annotations

import pytest

from engines.errors import NumericError
from runtime.queued_work import UnderWay


def test_whoever_waits_first_the_owner_has_the_outcome() -> None:
    waited: list[str] = []

    def finish() -> str:
        waited.append("once")
        return "done"

    under_way = UnderWay()
    under_way.settle()
    queued = under_way.begin(finish)
    assert not waited
    under_way.settle()
    assert queued.outcome() == queued.outcome() == "done" and waited == ["once"]
    later = under_way.begin(finish)
    assert later.outcome() == "done"
    under_way.settle()
    assert waited == ["once"] * 2


def test_errors_are_the_owners() -> None:
    def finish() -> str:
        raise NumericError("not finite")

    under_way = UnderWay()
    queued = under_way.begin(finish)
    under_way.settle()
    with pytest.raises(NumericError, match="not finite"):
        queued.outcome()
    assert under_way.begin(lambda: 1).outcome() == 1
