"""Error classes shared by every package, one per kind of outcome, each with its process exit code.

A message is one line: what is wrong, where (file, tensor, key, flag), got, wanted, cure.
Command lines print it to stderr without a traceback and exit with ``exit_code``.
"""

from __future__ import annotations


class NextnError(Exception):
    """Base of all errors the user can cause or cure."""

    exit_code = 1


class UsageError(NextnError):
    """A flag, number or prompt that cannot be served as asked."""

    exit_code = 2


class ModelFileError(NextnError):
    """A model file that cannot be used.

    ``kind`` is ``"format"`` (the container is broken), ``"unsupported"`` (sound, but not a model for
    us) or ``"content"`` (parts missing or contradicting each other).
    """

    exit_code = 3
    kinds = ("format", "unsupported", "content")

    def __init__(self, kind: str, message: str) -> None:
        assert kind in self.kinds, kind
        super().__init__(message)
        self.kind = kind


class EngineError(NextnError):
    """An engine, exported folder or plugin library that is missing, stale or does not load."""

    exit_code = 4


class DeviceLostError(EngineError):
    """The GPU failed in a way that lasts as long as the process does."""


class NumericError(NextnError):
    """NaN or Inf where a number is needed; names the position."""

    exit_code = 5


class ResourceError(NextnError):
    """Out of memory or disk."""

    exit_code = 6


_LONGEST_LINE = 2000


def printable(text: str) -> str:
    """In one line, without characters that a terminal would obey; of very long ones the two ends."""
    if len(text) > _LONGEST_LINE:
        text = f"{text[: _LONGEST_LINE // 2]} ... {text[-_LONGEST_LINE // 2 :]}"
    return _obeyed_by_none(text)


def printable_lines(text: str) -> str:
    """Without characters that a terminal would obey, as it is else."""
    return "\n".join(map(_obeyed_by_none, text.split("\n")))


def _obeyed_by_none(text: str) -> str:
    return "".join(char if char.isprintable() else " " if char in "\n\t" else f"\\x{ord(char):02x}" for char in text)
