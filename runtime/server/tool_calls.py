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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION_BEGIN = re.compile(r"\s*<function=([^>\n]+)>")
_FUNCTION = re.compile(FUNCTION_BEGIN.pattern + r"(.*?)(?:</function>\s*)?\Z", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)\n?</parameter>", re.DOTALL)
_TYPES: dict[str, tuple[type, ...]] = {
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
        properties = self.properties(name) or {}
        values: dict[str, Any] = {}
        position = 0
        while parameter := _PARAMETER.match(inner, position):
            key = parameter[1].strip()
            values[key] = value_of(parameter[2].removeprefix("\n"), properties.get(key))
            position = parameter.end()
        return ToolCall(name, _dumps(values)) if not inner[position:].strip() else None


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
        isinstance(value, _TYPES[name]) and (name == "boolean" or not isinstance(value, bool))
        for name in wanted & _TYPES.keys()
    )
    return value if fits else text


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
        return {_type_name(value) for value in schema["enum"]}
    named = schema.get("type")
    types = {name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)}
    if "const" in schema and not types:
        types = {_type_name(schema["const"])}
    for key in _ALTERNATIVES:
        for each in schema[key] if isinstance(schema.get(key), list) else ():
            types |= schema_types(each)
    return types


def _type_name(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    return next((name for name, types in _TYPES.items() if isinstance(value, types)), "string")


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
