"""Qwen's XML tool calls: written by the model as text, read here into names and JSON arguments.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    value, over as many lines as it takes
    </parameter>
    </function>
    </tool_call>

Values are plain text; the tool's JSON schema says what they are. Calls written as JSON inside the tags, as earlier Qwen
models do, are read, too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION_END, PARAMETER_END = "</function>", "</parameter>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*)?\Z", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?")
_PARAMETER_END = re.compile(r"\s*</parameter>")
_JSON_BEGINS = ("{", "[", '"')
TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


_ALTERNATIVES = ("anyOf", "oneOf", "allOf")
_MOST_REFERENCES = 8  # that are followed one after the other


@dataclass(frozen=True)
class ToolCall:
    """arguments: a JSON object, as text."""

    name: str
    arguments: str


class ToolCallReader:
    """Reads calls to some tools, given as in OpenAI's requests."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        functions = [tool["function"] for tool in tools]
        self._parameters = {function["name"]: function.get("parameters") or {} for function in functions}

    def properties(self, name: str) -> Mapping[str, Any] | None:
        """A tool's parameters, their JSON schemas by name; None: it was not offered."""
        if name not in self._parameters:
            return None
        schema = self._parameters[name]
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        if not isinstance(properties, Mapping):
            return {}
        return {key: resolved(each, schema) for key, each in properties.items()}

    def read(self, body: str) -> ToolCall | None:
        """The call that stands between the tags; None: not one, or of a tool that was not offered."""
        call = self._read_json(body) if body.lstrip().startswith("{") else self._read_xml(body)
        return call if call is not None and call.name in self._parameters else None

    def _read_json(self, body: str) -> ToolCall | None:
        try:
            raw = _loads(body)
        except (ValueError, RecursionError):
            return None
        if not isinstance(raw, dict) or not isinstance(raw.get("name"), str):
            return None
        arguments = raw.get("arguments", {})
        return ToolCall(raw["name"], _dumps(arguments)) if isinstance(arguments, dict) else None

    def _read_xml(self, body: str) -> ToolCall | None:
        function = _FUNCTION.match(body)
        if function is None:
            return None
        name, inner = function[1].strip(), function[2]
        values: dict[str, Any] = {}
        position = 0
        for key, text, position in self._parameters_in(name, inner):  # noqa: B007
            values[key] = value_of(text, (self.properties(name) or {}).get(key))
        return ToolCall(name, _dumps(values)) if not inner[position:].strip() else None

    def _parameters_in(self, name: str, inner: str) -> Iterator[tuple[str, str, int]]:
        """(name, text of its value, where it ends) of each that is complete."""
        properties = self.properties(name) or {}
        position = 0
        while begin := _PARAMETER.match(inner, position):
            key = begin[1] if begin[1] in properties else begin[1].strip()
            after = _json_end(inner, begin.end()) if schema_types(properties.get(key)) != {"string"} else None
            closed = None if after is None else _PARAMETER_END.match(inner, after)
            if closed is not None:  # JSON may hold the tag
                text, position = inner[begin.end() : after], closed.end()
            else:
                at = inner.find(PARAMETER_END, begin.end())
                if at < 0:
                    return
                text, position = inner[begin.end() : at].removesuffix("\n"), at + len(PARAMETER_END)
            yield key, text, position

    def goes_on(self, body: str) -> bool:
        """Whether END behind ``body`` is of a JSON string that has begun there, and no end."""
        if body.lstrip().startswith("{"):
            return _in_string(body)
        function = _FUNCTION.match(body)
        if function is None:
            return False
        name, inner, position = function[1].strip(), function[2], 0
        for _, _, position in self._parameters_in(name, inner):  # noqa: B007
            pass
        begin = _PARAMETER.match(inner, position)
        if begin is None:
            return False
        schema = (self.properties(name) or {}).get(begin[1])
        text = inner[begin.end() :]
        return schema_types(schema) != {"string"} and text.lstrip().startswith(_JSON_BEGINS) and _in_string(text)


def value_of(text: str, schema: Any) -> Any:
    """The JSON value that ``text`` stands for under a property's schema: what is of none of its types is a string."""
    wanted = schema_types(schema)
    if wanted == {"string"} or (not wanted and not text.lstrip().startswith(("{", "["))):
        return text
    try:
        value = _loads(text)
    except (ValueError, RecursionError):
        spoken = {"True": True, "False": False, "None": None}  # as Python has them, which models mix in
        if text.strip() not in spoken:
            return text
        value = spoken[text.strip()]
    if not wanted:
        return value
    if isinstance(value, float) and value.is_integer() and "integer" in wanted and "number" not in wanted:
        return int(value)
    fits = any(
        isinstance(value, TYPES[name]) and (name == "boolean" or not isinstance(value, bool))
        for name in wanted & TYPES.keys()
    )
    return value if fits else text


def _json_end(text: str, start: int) -> int | None:
    """Where an object, a list or a string in JSON that begins there ends."""
    while start < len(text) and text[start] in " \t\r\n":
        start += 1
    if not text.startswith(_JSON_BEGINS, start):
        return None
    try:
        return _DECODER.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


def _in_string(text: str) -> bool:
    """Whether ``text``, the beginning of JSON, ends within a string."""
    inside = escaped = False
    for letter in text:
        if not inside:
            inside = letter == '"'
        elif letter == "\n":  # no string of JSON
            return False
        elif escaped:
            escaped = False
        else:
            inside, escaped = letter != '"', letter == "\\"
    return inside


def resolved(schema: Any, root: Any) -> Any:
    """A property's schema with what its references within ``root``, the tool's parameters, stand for; those of its
    alternatives, too. One that leads nowhere, or on and on, is left."""
    schema = _followed(schema, root)
    if not isinstance(schema, Mapping):
        return schema
    alternatives = {key: schema[key] for key in _ALTERNATIVES if isinstance(schema.get(key), list)}
    return {**schema, **{key: [_followed(each, root) for each in value] for key, value in alternatives.items()}}


def _followed(schema: Any, root: Any) -> Any:
    for _ in range(_MOST_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        target = root
        for part in reference[2:].split("/"):
            target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        if not isinstance(target, Mapping):
            break
        schema = {**target, **{key: value for key, value in schema.items() if key != "$ref"}}
    return schema


def schema_types(schema: Any) -> set[str]:
    """The names of the JSON types that a property may have; empty if its schema does not say."""
    if not isinstance(schema, Mapping):
        return set()
    if "enum" in schema and isinstance(schema["enum"], list) and "type" not in schema:
        return {type_name(value) for value in schema["enum"]}
    named = schema.get("type")
    types = {name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)}
    if "const" in schema and not types:
        types = {type_name(schema["const"])}
    for key in _ALTERNATIVES:
        for each in schema[key] if isinstance(schema.get(key), list) else ():
            types |= schema_types(each)
    return types


def type_name(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    return next((name for name, types in TYPES.items() if isinstance(value, types)), "string")


def _loads(text: str) -> Any:
    """Raises ValueError for what is no JSON, numbers among it that no float holds."""
    return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is no number that JSON's readers could hold")
    return value


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
