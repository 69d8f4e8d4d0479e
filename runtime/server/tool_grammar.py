"""Grammars of tool calls, for requests that want one: functions that exist, their parameters, values that are valid.

Parameters come in the order of the tool's schema; required ones must be there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from runtime.server.tool_calls import BEGIN, END, FUNCTION_END, resolved, schema_types
from runtime.server.tool_schemas import NOTES, PathError
from runtime.server.value_grammar import ValueGrammar, literal

_SPACE = "SPACE: /[ \\n]{1,4}/\n"
_OF_CALLS = frozenset(("type", "properties", "required", "additionalProperties", "minProperties", "maxProperties"))


@dataclass(frozen=True)
class CallsGrammar:
    """source: in the library's dialect of Lark. parts: of the path of each parameter's schema, a source of its own."""

    source: str
    parts: Mapping[str, str]


def calls_grammar(
    tools: Mapping[int, Mapping[str, Any]], tags: tuple[str, str], several: bool, before: str = ""
) -> CallsGrammar:
    """Of one call, or ``several``, to any of ``tools`` ({"function": {...}} each, by their places in the request).

    tags: how the grammar names BEGIN and END, text or special token. before: source of rules that define ``other``,
    what the text may be instead. Raises PathError for what cannot be written so."""
    begin, end = tags
    rules = [f"start: SPACE? calls{' | SPACE? other' if before else ''}", _SPACE.strip()]
    rules.append(f"calls: call{' (SPACE? call)*' if several else ''}")
    names = [f"function_{i}" for i in tools]
    rules.append(f'call: {begin} "\\n" ({" | ".join(names)}) "\\n" {end}')
    parts: dict[str, str] = {}
    for name, (i, tool) in zip(names, tools.items(), strict=True):
        inner = []
        for path, key, required, value in _values(name, tool["function"], f"tools[{i}].function.parameters"):
            parts[path] = "\n".join([f"start: {name}_value", f"{name}_value: {value.rule}", *value.rules, ""])
            opening = literal(f"<parameter={key}>\n")
            rules += [f"{value.rule}_named: {opening} {value.rule}", *value.rules]
            inner.append(f"{value.rule}_named" + ("" if required else "?"))
        opening = literal(f"<function={tool['function']['name']}>\n")
        rules.append(f"{name}: {opening} {' '.join(inner)} {literal(FUNCTION_END)}")
    return CallsGrammar("\n".join([*rules, before, ""]), parts)


def tag_names(tokens: Mapping[str, int | None]) -> tuple[str, str]:
    """BEGIN and END as the grammar is to name them: special tokens where the vocabulary has them. tokens: their ids."""

    def name(tag: str) -> str:
        return json.dumps(tag) if tokens[tag] is None else f"<[{tokens[tag]}]>"

    return name(BEGIN), name(END)


def _values(rule: str, function: Mapping[str, Any], path: str) -> Iterator[tuple[str, str, bool, ValueGrammar]]:
    """(path, name, whether it must be there, grammar) of each parameter."""
    schema = resolved(function.get("parameters") or {}, function.get("parameters") or {})
    properties, required = _parameters(schema, path)
    for i, (key, each) in enumerate(properties.items()):
        where = f"{path}.properties.{key}" if key in schema.get("properties", {}) else f"{path}.required"
        if not key or any(letter in key for letter in ">\n"):
            raise PathError(where, f"parameter {key!r}: such a name cannot be written in a call")
        if each is False and key not in required:
            continue
        yield where, key, key in required, ValueGrammar(f"{rule}_{i}", where, each, schema)


def _parameters(schema: Any, path: str) -> tuple[dict[str, Any], list[str]]:
    """Schemas by name, and the names of those that must be there. Raises PathError for what would not be kept to."""
    if not isinstance(schema, Mapping):
        raise PathError(path, "must be a JSON schema of an object")
    for key in schema:
        if key not in NOTES and key not in _OF_CALLS:
            raise PathError(f"{path}.{key}", "cannot be followed in a tool call")
    if "type" in schema and "object" not in schema_types(schema):
        raise PathError(f"{path}.type", "must be object: a call has named parameters")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping):
        raise PathError(f"{path}.properties", "must be an object")
    if not isinstance(required, list) or any(not isinstance(key, str) for key in required):
        raise PathError(f"{path}.required", "must be a list of names")
    others = schema.get("additionalProperties", True)
    properties = {**properties, **{key: others for key in required if key not in properties}}
    for keyword, refused in (
        ("minProperties", lambda n: n > len(set(required))),
        ("maxProperties", lambda n: n < len(properties)),
    ):
        bound = schema.get(keyword)
        if bound is not None and (not isinstance(bound, int) or refused(bound)):
            raise PathError(f"{path}.{keyword}", "cannot be followed in a tool call: name the parameters as required")
    return properties, required
