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
        return properties if isinstance(properties, Mapping) else {}

    def read(self, body: str) -> ToolCall | None:
        """The call that stands between the tags; None: not one, or of a tool that was not offered."""
        call = self._read_json(body) if body.lstrip().startswith("{") else self._read_xml(body)
        return call if call is not None and call.name in self._parameters else None

    def _read_json(self, body: str) -> ToolCall | None:
        try:
            raw = json.loads(body)
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
        value = json.loads(text, parse_constant=_refuse_constant)
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


def schema_types(schema: Any) -> set[str]:
    """The names of the JSON types that a property may have; empty if its schema does not say."""
    if not isinstance(schema, Mapping):
        return set()
    if "enum" in schema and isinstance(schema["enum"], list) and "type" not in schema:
        return {_type_name(value) for value in schema["enum"]}
    named = schema.get("type")
    types = {named} if isinstance(named, str) else set(named) if isinstance(named, list) else set()
    for key in ("anyOf", "oneOf"):
        for each in schema.get(key) or ():
            types |= schema_types(each)
    return {name for name in types if isinstance(name, str)}


def _type_name(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    return next((name for name, types in _TYPES.items() if isinstance(value, types)), "string")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
