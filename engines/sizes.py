"""Numbers of bytes for people."""

from __future__ import annotations

_MOST_DIGITS = 9


def size_text(nbytes: int, beside: int | None = None) -> str:
    """With as many digits as tell it from another number, ``beside``, that stands in the same sentence."""
    if beside is None or beside == nbytes:
        return _text(nbytes, 0)
    return next(text for text, other in _texts(nbytes, beside) if text != other)


def _texts(nbytes: int, beside: int) -> list[tuple[str, str]]:
    return [(_text(nbytes, more), _text(beside, more)) for more in range(_MOST_DIGITS)]


def _text(nbytes: int, more_digits: int) -> str:
    if nbytes >= 1e9:
        return f"{nbytes / 1e9:.{2 + more_digits}f} GB"
    return f"{nbytes / 1e6:.{1 + more_digits}f} MB"
