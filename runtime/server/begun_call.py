"""A tool call that is still being written: its arguments as JSON, as far as they are sure.

Most calls are short, and given out when they are complete. A long string, such as a file's content, is passed on while
it is written; from then on the call is one, and what does not belong into it is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from runtime.server.partial import first_of, held_back
from runtime.server.tool_calls import END, FUNCTION_BEGIN, ToolCallReader, schema_types, value_of

LONG = 64  # characters of a string that is not waited for
_PARAMETER_BEGIN = re.compile(r"\s*<parameter=([^>\n]+)>")
_FUNCTION_END, _PARAMETER_END = "</function>", "</parameter>"
_VALUE_ENDS = ("\n" + _PARAMETER_END, _PARAMETER_END, "\n" + END, END)


class BegunCall:
    """Reads the text between the tags, which is given again with every piece that came. ``given``: whether something
    was passed on; ``name`` is then the tool's."""

    def __init__(self, reader: ToolCallReader) -> None:
        self._reader = reader
        self._at = 0  # up to here the text is dealt with
        self._state = self._head
        self._properties: Mapping[str, Any] = {}
        self._key, self._in_string = "", False
        self._waiting = "{"  # arguments that are sure, but not passed on yet
        self.name, self.given = "", False

    def take(self, body: str, ended: bool = False) -> str:
        """What is sure now and was not before; ended: ``body`` is all there is. In all the same, however it is cut."""
        while self._state(body, ended):
            pass
        if not self.given:
            return ""
        out, self._waiting = self._waiting, ""
        return out + "}" if ended else out

    def _head(self, body: str, ended: bool) -> bool:
        """Which tool? What begins otherwise is not read here."""
        found = FUNCTION_BEGIN.match(body)
        if found is None:
            return False
        self.name = found[1].strip()
        properties = self._reader.properties(self.name)
        self._at, self._properties = found.end(), properties or {}
        self._state = self._nothing if properties is None else self._between
        return True

    def _between(self, body: str, ended: bool) -> bool:
        found = _PARAMETER_BEGIN.match(body, self._at)
        if found is not None and (ended or found.end() < len(body)):  # the line end after it is not of the value
            self._key = found[1].strip()
            self._at = found.end() + body.startswith("\n", found.end())
            self._state = self._value
            return True
        rest = body[self._at :].lstrip()
        opens = rest.startswith("<parameter=") and not set(rest[11:]) & {"\n"}
        if not opens and not any(tag.startswith(rest) for tag in ("<parameter=", _FUNCTION_END)):
            self._state = self._nothing
        return False

    def _value(self, body: str, ended: bool) -> bool:
        at, tag = first_of(body[self._at :], _VALUE_ENDS)
        closed = bool(tag) or ended
        text = body[self._at :][: at if tag else None]
        if not closed:
            text = text[: len(text) - held_back(text, _VALUE_ENDS)]
        elif not tag:
            text = text.removesuffix("\n")
        if schema_types(self._properties.get(self._key)) == {"string"}:
            self._string(text, closed)
        elif closed:
            self._add_key()
            self._waiting += _dumps(value_of(text, self._properties.get(self._key)))
        if closed:
            self._at += at + len(tag) if tag else len(body)
            self._state = self._between
        return closed

    def _string(self, text: str, closed: bool) -> None:
        """A string's text from the place where the last call of this function left off."""
        if not self._in_string and (closed or len(text) >= LONG):
            self._in_string = True
            self._add_key()
            self._waiting += '"'
            self.given = self.given or len(text) >= LONG
        if self._in_string:
            self._waiting += _dumps(text)[1:-1]
            self._at += 0 if closed else len(text)
        if closed:
            self._in_string = False
            self._waiting += '"'

    def _add_key(self) -> None:
        first = not self.given and self._waiting == "{"
        self._waiting += f"{'' if first else ', '}{_dumps(self._key)}: "

    def _nothing(self, body: str, ended: bool) -> bool:
        return False


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
