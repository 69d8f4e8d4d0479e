"""Markers in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Collection


def held_back(text: str, markers: Collection[str]) -> int:
    """How many characters at the end of ``text`` may be the beginning of one of ``markers``, the rest still to come."""
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return longest


def first_of(text: str, markers: Collection[str]) -> tuple[int, str]:
    """Where the first marker in ``text`` begins, and which it is (of several there, the longest); (-1, "") if none."""
    found = [(at, -len(marker), marker) for marker in markers if (at := text.find(marker)) >= 0]
    return (min(found)[0], min(found)[2]) if found else (-1, "")


class StopStrings:
    """Ends a text before the first of some strings, wherever the borders of tokens lie."""

    def __init__(self, stops: Collection[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The text that may be shown now. Once a stop string is complete, ``found`` is set and nothing more comes."""
        if self.found:
            return ""
        text = self._held + text
        at, stop = first_of(text, self._stops)
        if stop:
            self.found, self._held = True, ""
            return text[:at]
        keep = len(text) - held_back(text, self._stops)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """What was held back at the end of a text without a stop string."""
        rest, self._held = self._held, ""
        return rest
