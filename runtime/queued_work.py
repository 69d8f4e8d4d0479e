"""Work that the device does while the host goes on: one piece at a time, of all sequences of a pair of engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from engines.errors import NextnError

T = TypeVar("T")


class Queued(Generic[T]):
    """A piece of work that is under way, or its outcome."""

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._outcome: list[T] = []
        self._error: NextnError | None = None

    def settle(self) -> None:
        """Wait for it. What goes wrong is told to who asks for the outcome, for another may have had to wait."""
        finish, self._finish = self._finish, None
        if finish is None:
            return
        try:
            self._outcome.append(finish())
        except NextnError as error:
            self._error = error

    def outcome(self) -> T:
        """Wait for it. Raises what went wrong."""
        self.settle()
        if self._error is not None:
            raise self._error
        (outcome,) = self._outcome
        return outcome


class UnderWay:
    """Guards what queued work reads and writes: whoever is about to use that settles first."""

    def __init__(self) -> None:
        self._queued: Queued[object] | None = None

    def settle(self) -> None:
        queued, self._queued = self._queued, None
        if queued is not None:
            queued.settle()

    def begin(self, finish: Callable[[], T]) -> Queued[T]:
        """Note that work has been queued, after `settle`; finish: waits for it and gives its outcome."""
        assert self._queued is None
        queued = Queued(finish)
        self._queued = queued  # type: ignore[assignment]
        return queued
