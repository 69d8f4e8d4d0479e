"""Grammars of the values in tool calls: what a parameter's JSON schema says, for text between two tags.

Strings stand there as they are, everything else as JSON. What a schema asks for is followed whole, or refused by the
path of the keyword that cannot be.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from runtime.grammar import json_text
from runtime.server.patterns import terminal
from runtime.server.tool_calls import END, PARAMETER_END, resolved, schema_types, value_of
from runtime.server.tool_schemas import (
    KNOWN,
    NOTES,
    OF_OTHERS,
    WITH_LISTS,
    PathError,
    check_bounds,
    concerns,
    expressions,
    is_valid,
    limited_types,
    merged,
    named_types,
    overlap,
    with_root,
)

_BORDER = f"\n{PARAMETER_END}\n"
_CLOSING = (PARAMETER_END, END)
_HOLDS_A_TAG = f"(?s:.*)({'|'.join(_CLOSING)})(?s:.*)"
# How JSON of a type begins, or what is taken for it.
_OPENINGS = {"object": r"\{", "array": r"\[", "number": "[-0-9]", "boolean": "[tfTF]", "null": "[nN]"}


class ValueGrammar:
    """The rules of one parameter: `rules`, the first of them named ``rule``."""

    def __init__(self, rule: str, path: str, schema: Any, root: Mapping[str, Any]) -> None:
        """root: the schema that references are of. Raises PathError."""
        self.rule, self._root, self._num = rule, root, 0
        self._whole = resolved(schema, root)
        self._inner: list[str] = []
        choices = list(self._choices(self._whole, path))
        if not choices:
            raise PathError(path, "no value is valid")
        self.rules = [f"{rule}: {' | '.join(choices)}", *self._inner]

    def _choices(self, schema: Any, path: str) -> Iterator[str]:
        """Names of rules, or literals, that together are the texts of a schema's values."""
        schema = resolved({} if schema is True else schema, self._root)
        if schema is False:
            return
        if not isinstance(schema, Mapping):
            raise PathError(path, "is no JSON schema")
        said = {key: value for key, value in schema.items() if key not in NOTES}
        types = schema_types(schema)
        if "$ref" in said:
            raise PathError(f"{path}.$ref", "cannot be found, or leads on and on")
        if "enum" in said or "const" in said:
            yield from self._listed(said, path)
        elif types and "string" not in types and said.keys() & {"anyOf", "oneOf", "allOf"}:
            yield self._json(said)  # the library knows all of it
        elif "allOf" in said:
            yield from self._choices(merged(said, path), path)
        elif "anyOf" in said or "oneOf" in said:
            yield from self._alternatives(said, path)
        else:
            yield from self._typed(said, path)

    def _alternatives(self, said: Mapping[str, Any], path: str) -> Iterator[str]:
        key = "anyOf" if "anyOf" in said else "oneOf"
        if not isinstance(said[key], list):
            raise PathError(f"{path}.{key}", "must be a list")
        if key == "oneOf" and overlap([schema_types(resolved(each, self._root)) for each in said[key]]):
            raise PathError(f"{path}.oneOf", "a value might be valid under two of these: say anyOf")
        beside = {name: value for name, value in said.items() if name != key}
        for i, each in enumerate(said[key]):
            inner = f"{path}.{key}[{i}]"
            if beside and isinstance(each, Mapping):
                each = merged({"allOf": [beside, resolved(each, self._root)]}, inner)
            yield from self._choices(each, inner)

    def _listed(self, said: Mapping[str, Any], path: str) -> Iterator[str]:
        key = "const" if "const" in said else "enum"
        values = [said["const"]] if key == "const" else said["enum"]
        if not isinstance(values, list):
            raise PathError(f"{path}.enum", "must be a list")
        unknown = sorted(said.keys() - WITH_LISTS)
        if unknown or {"enum", "const"} <= said.keys():
            raise PathError(f"{path}.{unknown[0] if unknown else 'enum'}", f"cannot be followed beside {key}")
        check_bounds(said, path)
        for i, value in enumerate(values):
            if not is_valid(value, said):
                continue
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            back = value_of(text, self._whole)
            if any(tag in text for tag in _CLOSING) or back != value or isinstance(back, str) != isinstance(value, str):
                where = f"{path}.const" if key == "const" else f"{path}.enum[{i}]"
                raise PathError(where, "cannot be written in a call so that it is read as this value")
            yield literal(text + _BORDER)

    def _typed(self, said: Mapping[str, Any], path: str) -> Iterator[str]:
        types = named_types(said, path)
        if types is None:  # what begins as JSON does is read so, the rest as a string
            types = {name for name in ("object", "array") if said.keys() & OF_OTHERS[name]} or {"string"}
        if "string" in types:
            for key in sorted(said.keys() - KNOWN):
                raise PathError(f"{path}.{key}", "cannot be followed in a tool call")
        others = types - {"string"}
        if others:
            concerned = {key: value for key, value in said.items() if concerns(key, others)}
            yield self._json({**concerned, "type": sorted(others)})
        if "string" in types:
            yield self._string(said, path)

    def _json(self, said: Mapping[str, Any]) -> str:
        rule, schema = self._next(), with_root(said, self._root)
        self._inner += [f"{rule}: {rule}_json {literal(_BORDER)}", f"{rule}_json: {json_text(schema)}"]
        return rule

    def _string(self, said: Mapping[str, Any], path: str) -> str:
        """Text up to the border, which is not read as anything that might not be valid."""
        parts = [terminal(expression) for expression in expressions(said, path)] or ["/(?s:.*)/"]
        parts.append(f"~{terminal(_HOLDS_A_TAG)}")
        openings = "|".join(_OPENINGS[name] for name in sorted(limited_types(self._whole, self._root)))
        if openings:
            begins = rf"[ \t\n\r]*({openings})(?s:.*)"
            parts.append(f"~{terminal(begins)}")
        rule = self._next()
        name = rule.upper()
        self._inner += [f"{rule}[suffix={literal(_BORDER)}]: {name}", f"{name}: {' & '.join(parts)}"]
        return rule

    def _next(self) -> str:
        self._num += 1
        return f"{self.rule}_{self._num}"


def literal(text: str) -> str:
    """As a grammar has it."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
