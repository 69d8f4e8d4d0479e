"""Grammars of tool calls, for requests that want one: a function that exists, parameters it has, values of their types.

Parameters come in the order of the tool's schema; required ones must be there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from engines.errors import UsageError
from runtime.server.tool_calls import BEGIN, END, resolved, schema_types

_SPACE = "SPACE: /[ \\n]{1,4}/\n"
_BORDER = "\n</parameter>\n"


def calls_grammar(tools: Sequence[Mapping[str, Any]], tags: tuple[str, str], several: bool, before: str = "") -> str:
    """Lark source of one call, or ``several``, to any of ``tools`` ({"function": {...}} each).

    tags: how the grammar names BEGIN and END, text or special token. before: source of rules that define ``other``,
    what the text may be instead. Raises UsageError for names or schemas that cannot be written so."""
    begin, end = tags
    rules = [f"start: SPACE? calls{' | SPACE? other' if before else ''}", _SPACE.strip()]
    rules.append(f"calls: call{' (SPACE? call)*' if several else ''}")
    names = [f"function_{i}" for i in range(len(tools))]
    rules.append(f'call: {begin} "\\n" ({" | ".join(names)}) "\\n" {end}')
    for name, tool in zip(names, tools, strict=True):
        rules += _function_rules(name, tool["function"])
    return "\n".join([*rules, before, ""])


def tag_names(tokens: Mapping[str, int | None]) -> tuple[str, str]:
    """BEGIN and END as the grammar is to name them: special tokens where the vocabulary has them. tokens: their ids."""

    def name(tag: str) -> str:
        return json.dumps(tag) if tokens[tag] is None else f"<[{tokens[tag]}]>"

    return name(BEGIN), name(END)


def _function_rules(rule: str, function: Mapping[str, Any]) -> list[str]:
    schema = function.get("parameters") or {}
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise UsageError(f"the parameters of {function['name']} are no JSON schema of an object")
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    parts, rules = [], []
    for i, (key, each) in enumerate(properties.items()):
        if not key or any(letter in key for letter in ">\n"):
            raise UsageError(f"parameter {key!r} of {function['name']}: such a name cannot be written in a call")
        parts.append(f"{rule}_{i}" + ("" if key in required else "?"))
        opening = json.dumps(f"<parameter={key}>\n", ensure_ascii=False)
        rules.append(f"{rule}_{i}: {opening} {rule}_{i}_value")
        rules += _value_rules(f"{rule}_{i}_value", resolved(each, schema), shared)
    opening = json.dumps(f"<function={function['name']}>\n")
    return [f'{rule}: {opening} {" ".join(parts)} "</function>"', *rules]


def _value_rules(rule: str, schema: Any, shared: Mapping[str, Any]) -> list[str]:
    """Text up to the border for strings, else JSON."""
    if isinstance(schema, dict) and isinstance(schema.get("enum"), list) and schema_types(schema) == {"string"}:
        values = [json.dumps(value + _BORDER, ensure_ascii=False) for value in schema["enum"] if isinstance(value, str)]
        if values:
            return [f"{rule}: {' | '.join(values)}"]
    types = schema_types(schema)
    says_more = isinstance(schema, dict) and ("type" in schema or "$ref" in schema)
    if "string" in types or not (types or says_more):
        return [f"{rule}[suffix={json.dumps(_BORDER)}]: /(?s:.*)/"]
    whole = {**shared, **schema} if isinstance(schema, dict) else schema
    return [f"{rule}: {rule}_json {json.dumps(_BORDER)}", f"{rule}_json: %json {json.dumps(whole)}"]
