"""Strings that a JSON schema describes, as regular expressions of the grammar library that match them whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_ANYTHING = "(?s:.*)"
# By RFC 3339, 4122, 791, 3986 and 5321, these two without what nearly nobody writes.
_DATE = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]+)?([Zz]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = "[0-9A-Za-z]([0-9A-Za-z-]*[0-9A-Za-z])?"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": f"{_BYTE}(\\.{_BYTE}){{3}}",
    "email": f"[0-9A-Za-z_+-]+(\\.[0-9A-Za-z_+-]+)*@{_LABEL}(\\.{_LABEL})+",
    "uri": "[A-Za-z][0-9A-Za-z+.-]*:[0-9A-Za-z._~:/?#@!$&'()*+,;=%\\[\\]-]+",
}
# What JavaScript's classes hold, where the library's hold all of Unicode.
_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_"}
_LINE_ENDS = "\\n\\r\\u2028\\u2029"


class BadKeywordError(ValueError):
    """A keyword that cannot be written as an expression."""

    def __init__(self, keyword: str, reason: str) -> None:
        super().__init__(reason)
        self.keyword = keyword


def string_expressions(schema: Mapping[str, Any]) -> Iterator[str]:
    """Of each of a schema's keywords that says something of strings: a string matches them all. Raises
    BadKeywordError."""
    if "minLength" in schema or "maxLength" in schema:
        least, most = _length(schema, "minLength", 0), _length(schema, "maxLength", "")
        if isinstance(most, int) and int(least) > most:
            raise BadKeywordError("maxLength", f"is less than minLength, {least}")
        yield f"(?s:.{{{least},{most}}})"
    if "pattern" in schema:
        if not isinstance(schema["pattern"], str):
            raise BadKeywordError("pattern", "must be a string")
        yield _whole(schema["pattern"])
    if "format" in schema:
        if not isinstance(schema["format"], str) or schema["format"] not in FORMATS:
            raise BadKeywordError("format", f"only these can be followed in tool calls: {', '.join(FORMATS)}")
        yield FORMATS[schema["format"]]


def _length(schema: Mapping[str, Any], keyword: str, otherwise: int | str) -> int | str:
    value = schema.get(keyword, otherwise)
    if keyword in schema and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31):
        raise BadKeywordError(keyword, "must be a whole number, 0 or more")
    return value


def _whole(pattern: str) -> str:
    """A pattern of JSON Schema, which may match anywhere, as one that matches the whole string."""
    alternatives = []
    for pieces in _split(_pieces(pattern)):
        begins = bool(pieces) and pieces[0] == "^"
        ends = len(pieces) > begins and pieces[-1] == "$"
        inner = "".join(pieces[begins : len(pieces) - ends])
        alternatives.append(("" if begins else _ANYTHING) + f"(?:{inner})" + ("" if ends else _ANYTHING))
    return "|".join(alternatives)


def _split(pieces: list[str]) -> list[list[str]]:
    """At the | outside of all groups."""
    alternatives: list[list[str]] = [[]]
    depth = 0
    for piece in pieces:
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and depth == 0:
            alternatives.append([])
        else:
            alternatives[-1].append(piece)
    return alternatives


def _pieces(pattern: str) -> list[str]:
    """The pattern's atoms, as the library writes what JavaScript means by them. What is left is the library's to
    refuse."""
    out, i, in_class = [], 0, False
    while i < len(pattern):
        letter = pattern[i]
        if letter == "\\" and i + 1 < len(pattern):
            name, i = pattern[i + 1], i + 2
            if name in _CLASSES:
                out.append(_CLASSES[name] if in_class else f"[{_CLASSES[name]}]")
            else:
                out.append(f"[^{_CLASSES[name.lower()]}]" if name in "DW" and not in_class else f"\\{name}")
            continue
        i += 1
        if in_class and letter in "[&~":  # these mean something else to the library
            out.append(f"\\{letter}")
        elif not in_class and letter == ".":
            out.append(f"[^{_LINE_ENDS}]")
        else:
            out.append("\\n" if letter == "\n" else letter)
        in_class = letter == "[" if not in_class else letter != "]"
    return out


def terminal(expression: str) -> str:
    """As a grammar has it."""
    out, escaped = [], False
    for letter in expression:
        out.append("\\/" if letter == "/" and not escaped else "\\n" if letter == "\n" else letter)
        escaped = letter == "\\" and not escaped
    return f"/{''.join(out)}/"
