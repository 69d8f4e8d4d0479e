"""JSON schemas of tools' parameters: which keywords say something of which types."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from engines.errors import UsageError
from runtime.server.patterns import BadKeywordError, string_expressions
from runtime.server.tool_calls import TYPES, resolved, schema_types, type_name

# These say nothing of what is valid.
_NOTES = """title description default examples example deprecated readOnly writeOnly $comment $id $schema $anchor $defs
    definitions nullable contentEncoding contentMediaType contentSchema strict"""
_OF_OBJECTS = """properties required additionalProperties patternProperties minProperties maxProperties propertyNames
    dependentRequired dependentSchemas dependencies unevaluatedProperties"""
_OF_ARRAYS = """items prefixItems additionalItems minItems maxItems uniqueItems contains minContains maxContains
    unevaluatedItems"""
_OF_NUMBERS = "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf"
NOTES = frozenset(_NOTES.split())
OF_STRINGS = frozenset(("minLength", "maxLength", "pattern", "format"))
OF_OTHERS = {
    "object": frozenset(_OF_OBJECTS.split()),
    "array": frozenset(_OF_ARRAYS.split()),
    "number": frozenset(_OF_NUMBERS.split()),
}
KNOWN = OF_STRINGS.union({"type"}, *OF_OTHERS.values())
WITH_LISTS = frozenset(("type", "enum", "const", "minLength", "maxLength", "minimum", "maximum"))


class PathError(UsageError):
    """A schema that cannot be followed, and the path of the part at fault."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path = path


def named_types(said: Mapping[str, Any], path: str) -> set[str] | None:
    """Those of the keyword ``type``; None without it. Raises PathError."""
    if "type" not in said:
        return None
    named = said["type"] if isinstance(said["type"], list) else [said["type"]]
    if not named or any(not isinstance(name, str) or (name != "string" and name not in TYPES) for name in named):
        raise PathError(f"{path}.type", f"must be of string, {', '.join(TYPES)}")
    return set(named)


def concerns(key: str, types: set[str]) -> bool:
    """Whether a keyword says anything of values of these types. Unknown ones do, as far as anybody knows."""
    if key in NOTES or key == "type":
        return False
    if key in OF_STRINGS:
        return "string" in types
    for name, keys in OF_OTHERS.items():
        if key in keys:
            return name in types or (name == "number" and "integer" in types)
    return True


def limited_types(schema: Any, root: Any) -> set[str]:
    """Types other than strings of which not every value is valid; "number" for integers, too."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping):
        return set()
    types = schema_types(schema) - {"string"}
    out: set[str] = set()
    beside = {key for key in schema if key not in ("anyOf", "oneOf")}
    for each in [*_listed(schema, "anyOf"), *_listed(schema, "oneOf")]:
        out |= limited_types(each, root)
    out |= {name for name in types if any(concerns(key, {name}) for key in beside)}
    return {"number" if name == "integer" else name for name in out}


def merged(said: Mapping[str, Any], path: str) -> dict[str, Any]:
    """What ``allOf`` and the keywords beside it say together. Raises PathError where two say different things."""
    if not isinstance(said["allOf"], list):
        raise PathError(f"{path}.allOf", "must be a list")
    parts = [{key: value for key, value in said.items() if key != "allOf"}, *said["allOf"]]
    out: dict[str, Any] = {}
    for part in parts:
        if not isinstance(part, Mapping):
            raise PathError(f"{path}.allOf", "must be schemas")
        for key, value in part.items():
            if key not in NOTES and out.setdefault(key, value) != value:
                raise PathError(f"{path}.allOf", f"{key} is given twice: this cannot be followed in a tool call")
    return out


def overlap(alternatives: Sequence[set[str]]) -> bool:
    """Whether a value may be of two of these sets of types; an empty one holds all."""
    as_numbers = [{"number" if name == "integer" else name for name in types} for types in alternatives]
    return any(not a or not b or a & b for a, b in itertools.combinations(as_numbers, 2))


def expressions(said: Mapping[str, Any], path: str) -> list[str]:
    """What strings have to match. Raises PathError."""
    try:
        return list(string_expressions(said))
    except BadKeywordError as error:
        raise PathError(f"{path}.{error.keyword}", str(error)) from None


def check_bounds(said: Mapping[str, Any], path: str) -> None:
    """Raises PathError for bounds beside a list that are none."""
    named_types(said, path)
    expressions({key: said[key] for key in ("minLength", "maxLength") if key in said}, path)
    for key in ("minimum", "maximum"):
        if key in said and (isinstance(said[key], bool) or not isinstance(said[key], (int, float))):
            raise PathError(f"{path}.{key}", "must be a number")


def is_valid(value: Any, said: Mapping[str, Any]) -> bool:
    """Of a listed value, by the keywords WITH_LISTS but the lists."""
    types = schema_types({"type": said["type"]}) if "type" in said else set()
    mine = {type_name(value)} | ({"number"} if type_name(value) == "integer" else set())
    if isinstance(value, float) and value.is_integer():
        mine.add("integer")
    if types and not types & mine:
        return False
    if isinstance(value, str):
        return said.get("minLength", 0) <= len(value) <= said.get("maxLength", len(value))
    if "number" in mine:
        return bool(said.get("minimum", value) <= value <= said.get("maximum", value))
    return True


def with_root(said: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """A schema on its own, with what its references stand for: they are of ``root``."""
    moved, found = _moved(said)
    return {**moved, "$defs": {"root": _moved(root)[0]}} if found else moved


def _moved(schema: Any) -> tuple[Any, bool]:
    """References as they are to a root that lies in $defs/root; whether there is one."""
    if isinstance(schema, list):
        parts = [_moved(each) for each in schema]
        return [part for part, _ in parts], any(found for _, found in parts)
    if not isinstance(schema, Mapping):
        return schema, False
    out: dict[str, Any] = {}
    any_found = False
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            out[key], found = f"#/$defs/root{value[1:]}", True
        elif key in ("enum", "const", "default", "examples"):
            out[key], found = value, False
        else:
            out[key], found = _moved(value)
        any_found = any_found or found
    return out, any_found


def _listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []
