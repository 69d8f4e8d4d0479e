"""Calls that must be made: their arguments are valid under the tool's schema, or the schema is refused by the path of
what cannot be followed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.grammar import GrammarCompiler
from runtime.grammar_state import GrammarError
from runtime.server.tool_calls import BEGIN, END, ToolCallReader
from runtime.server.tool_grammar import CallsGrammar, calls_grammar, tag_names
from runtime.server.tool_schemas import PathError
from runtime.session import Session
from tests.exported import Exported
from tests.runtime.server import Running, serving
from tests.runtime.serving import grammar_compiler, open_trained
from tests.runtime.test_server_fuzz import KEYWORDS, ODD

Export = Callable[[str], Exported]
TEXT = {"type": "string"}
TREE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#/properties/tree"}}},
    "required": ["v"],
    "additionalProperties": False,
}
ROOT = {
    "type": "object",
    "properties": {"tree": TREE},
    "additionalProperties": False,
    "$defs": {"color": {"type": "string", "enum": ["red"]}, "loop": {"$ref": "#/$defs/loop"}},
}
# A parameter's schema; texts that are to be taken, texts that are not.
VALUES: list[tuple[Any, list[str], list[str]]] = [
    (TEXT, ["", "a", "\n", "a\nb\n", "<b>", "</param", '"x"', "{", "12"], ["a</parameter>b", "</tool_call>"]),
    ({}, ["", "a", '{"a":1}'], ["</parameter>"]),
    ({**TEXT, "maxLength": 3}, ["abc", "", "é😀x"], ["abcd"]),
    ({**TEXT, "minLength": 2, "maxLength": 3}, ["ab", "abc"], ["a", "abcd"]),
    ({**TEXT, "pattern": "^[a-c]{2}$"}, ["ab"], ["abc", "a", "ad"]),
    ({**TEXT, "pattern": "b+"}, ["abba", "b", "xby", "\nb"], ["", "aaa"]),
    ({**TEXT, "pattern": "^a|b$"}, ["ax", "xb", "a", "b"], ["xa", "bx"]),
    ({**TEXT, "pattern": "^(a|b)$"}, ["a", "b"], ["ab", ""]),
    ({**TEXT, "pattern": "^\\d+\\.\\w$"}, ["12.a"], ["12xa", "x.a", "٣.a", "1.é"]),
    ({**TEXT, "pattern": "^[/a\\D]/.$"}, ["//x", "a/y"], ["3/x", "//\n"]),
    ({**TEXT, "pattern": "^[[&~]\\$$"}, ["[$", "&$", "~$"], ["a$"]),
    ({**TEXT, "pattern": "a", "maxLength": 2}, ["ba"], ["bba", "bb"]),
    ({**TEXT, "format": "date"}, ["2024-02-29"], ["2024-13-01", "x"]),
    ({**TEXT, "format": "date-time"}, ["2024-02-29T01:02:03.5Z"], ["2024-02-29"]),
    ({**TEXT, "format": "email"}, ["a.b@c.de"], ["a@b", "@b.c"]),
    ({**TEXT, "format": "uri"}, ["http://a/b?c=[1]#d"], ["a b", "//x"]),
    ({**TEXT, "format": "ipv4"}, ["10.0.255.1"], ["256.0.0.1"]),
    ({"enum": ["a", "b c", "\x7f\x01\\"]}, ["a", "b c", "\x7f\x01\\"], ["c", '"a"']),
    ({"enum": ["a", 1, None, {"x": [1]}, True]}, ["a", "1", "null", '{"x": [1]}', "true"], ["2", "b"]),
    ({"const": "x"}, ["x"], ["y", ""]),
    ({"const": 3}, ["3"], ["4"]),
    ({**TEXT, "enum": ["abc", "abcdef", 3], "maxLength": 4}, ["abc"], ["abcdef", "3"]),
    ({"type": ["string", "null"], "maxLength": 3}, ["abc", "null"], ["abcd"]),
    ({"type": ["string", "integer"], "minimum": 5, "maxLength": 3}, ["abc", "7"], ["3", "-1", "abcd", "4a"]),
    ({"anyOf": [{**TEXT, "maxLength": 2}, {"type": "integer", "maximum": 9}]}, ["ab", "5"], ["10", "abc", "12"]),
    ({"anyOf": [TEXT, TREE]}, ["ab", '{"v":1}', "x{"], ['{"b":1}', "{", "{x"]),
    ({"type": "integer", "minimum": 3, "maximum": 5}, ["3", "5"], ["6", "x", '"3"']),
    ({"type": "array", "items": {"enum": ["a"]}, "maxItems": 2}, ['["a"]', "[]"], ['["b"]', '["a","a","a"]']),
    ({"properties": {"a": {"type": "integer"}}}, ['{"a": 1}'], ['{"a": "x"}', "abc"]),
    ({"oneOf": [TEXT, {"type": "integer"}]}, ["a", "1"], []),
    ({"allOf": [TEXT, {"maxLength": 3}], "minLength": 1}, ["abc"], ["abcd", ""]),
    ({"type": "boolean"}, ["true", "false"], ["yes"]),
    ({"type": "null"}, ["null"], ["x"]),
    (TREE, ['{"v":1}', '{"v":1,"kids":[{"v":2}]}'], ['{"v":1,"kids":[{"x":2}]}']),
    ({"type": "array", "items": {"$ref": "#"}}, ['[{"tree":{"v":1},"x":[]}]'], ["[[]]", '[{"v":1}]']),
    ({"$ref": "#/$defs/color"}, ["red"], ["blue"]),
    ({"anyOf": [{"$ref": "#/$defs/color"}, {"type": "null"}]}, ["red", "null"], ["blue"]),
    ({"type": "object", "properties": {"c": {"$ref": "#/$defs/color"}}, "required": ["c"]}, ['{"c":"red"}'], ["{}"]),
]
X = "tools[4].function.parameters.properties.x"
REFUSED: list[tuple[Any, str]] = [
    ({**TEXT, "format": "zebra"}, ".format"),
    ({**TEXT, "not": {"enum": ["a"]}}, ".not"),
    ({"not": {}}, ".not"),
    ({**TEXT, "minLength": 5, "maxLength": 3}, ".maxLength"),
    ({**TEXT, "maxLength": -1}, ".maxLength"),
    ({**TEXT, "pattern": 3}, ".pattern"),
    ({**TEXT, "if": {"maxLength": 3}}, ".if"),
    ({"enum": ["1", 1]}, ".enum[0]"),
    ({"enum": ["c", "a</parameter>b"]}, ".enum[1]"),
    ({"enum": ["a"], "pattern": "b"}, ".pattern"),
    ({"enum": "a"}, ".enum"),
    ({"enum": ["a"], "minLength": "x"}, ".minLength"),
    ({"enum": [1], "maximum": "x"}, ".maximum"),
    ({"enum": [1], "type": {}}, ".type"),
    ({"allOf": 5}, ".allOf"),
    ({"allOf": [5]}, ".allOf"),
    ({"anyOf": [5]}, ".anyOf[0]"),
    ({"const": "</tool_call>"}, ".const"),
    ({"oneOf": [TEXT, {**TEXT, "maxLength": 3}]}, ".oneOf"),
    ({"allOf": [{**TEXT, "maxLength": 4}, {"maxLength": 3}]}, ".allOf"),
    ({"anyOf": 5}, ".anyOf"),
    ({"anyOf": [TEXT, {"type": "what"}]}, ".anyOf[1].type"),
    ({"$ref": "#/$defs/nowhere"}, ".$ref"),
    ({"$ref": "#/$defs/loop"}, ".$ref"),
    ({"$ref": "https://example.com/x"}, ".$ref"),
    ({"type": 3}, ".type"),
    (False, ""),
    (5, ""),
    ({**TEXT, "enum": []}, ""),
    # These the library refuses.
    ({**TEXT, "pattern": "(?=a)b"}, ""),
    ({**TEXT, "pattern": "a\\bb"}, ""),
    ({**TEXT, "pattern": "("}, ""),
    ({**TEXT, "pattern": "a^b"}, ""),
    ({"type": "array", "uniqueItems": True}, ""),
    ({"type": "integer", "not": {"const": 3}}, ""),
    ({"type": "integer", "minimum": 5, "maximum": 3}, ""),
    ({"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}, ""),
]


@pytest.fixture(scope="module")
def session(exported: Export) -> Session:
    return open_trained(exported("trained"))


@pytest.fixture(scope="module")
def compiler(session: Session) -> Iterator[GrammarCompiler]:
    with grammar_compiler(session) as made:
        yield made


@pytest.fixture(scope="module")
def server(exported: Export) -> Iterator[Running]:
    with serving(exported("trained")) as running:
        yield running


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.fixture(scope="module")
def tags(session: Session) -> tuple[str, str]:
    return tag_names({tag: session.tokenizer.encode(tag, bos=False)[0] for tag in (BEGIN, END)})


def grammar_of(schema: Any, tags: tuple[str, str] = ("B", "E")) -> CallsGrammar:
    """Of calls with a parameter x."""
    parameters = {**ROOT, "properties": {"tree": TREE, "x": schema}, "required": ["x"]}
    return calls_grammar({4: tool(parameters)}, tags, False)


def call(text: str) -> str:
    return f"{BEGIN}\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n{END}"


def takes(compiler: GrammarCompiler, session: Session, source: str, text: str) -> bool:
    """Whether a text may be written and end there."""
    state = compiler.lark(source).start()
    try:
        for token in session.tokenizer.encode(text, bos=False):
            if not state.allowed()[token]:
                return False
            state.push(token)
        return bool(state.allowed()[sorted(session.tokenizer.end_token_ids)].any())
    finally:
        state.close()


@pytest.mark.parametrize(("schema", "good", "bad"), VALUES, ids=lambda each: json.dumps(each)[:60])
def test_values(
    compiler: GrammarCompiler, session: Session, tags: tuple[str, str], schema: Any, good: list[str], bad: list[str]
) -> None:
    """What is taken is valid as it is read, and what is valid is taken."""
    source = grammar_of(schema, tags).source
    reader = ToolCallReader([tool({**ROOT, "properties": {"x": schema}})])
    validator = jsonschema.Draft202012Validator({**ROOT, "properties": {"tree": TREE, "x": schema}, "required": ["x"]})
    for text in good:
        assert takes(compiler, session, source, call(text)), text
        read = reader.read(call(text).removeprefix(BEGIN).removesuffix(END))
        assert read is not None
        validator.validate(json.loads(read.arguments))
    for text in bad:
        assert not takes(compiler, session, source, call(text)), text


@pytest.mark.parametrize(("schema", "path"), REFUSED, ids=lambda each: json.dumps(each)[:60])
def test_what_cannot_be_followed_is_named(compiler: GrammarCompiler, schema: Any, path: str) -> None:
    with pytest.raises((PathError, GrammarError)) as refused:
        made = grammar_of(schema)
        for where, source in made.parts.items():
            compiler.lark(source, where)
    error = refused.value
    assert (error.path if isinstance(error, PathError) else error.field) == X + path


P = "tools[4].function.parameters"


@pytest.mark.parametrize(
    ("parameters", "path"),
    [
        ({"type": "string"}, ".type"),
        ({"properties": []}, ".properties"),
        ({"required": "x"}, ".required"),
        ({"required": [1]}, ".required"),
        ({"required": ["x"], "additionalProperties": False}, ".required"),
        ({"properties": {"x": False}, "required": ["x"]}, ".properties.x"),
        ({"anyOf": [{"required": ["x"]}]}, ".anyOf"),
        ({"if": {}}, ".if"),
        ({"not": {}}, ".not"),
        ({"dependentRequired": {"a": ["b"]}}, ".dependentRequired"),
        ({"patternProperties": {"^a": False}}, ".patternProperties"),
        ({"minProperties": 1, "properties": {"x": {}}}, ".minProperties"),
        ({"maxProperties": 0, "properties": {"x": {}}}, ".maxProperties"),
        ({"properties": {"": {}}}, ".properties."),
        ({"properties": {"a>b": {}}}, ".properties.a>b"),
        ({"properties": {"a\nb": {}}}, ".properties.a\nb"),
        ({"$ref": "#/$defs/none"}, ".$ref"),
        ([], None),
    ],
)
def test_parameters_that_cannot_be_followed_are_named(parameters: Any, path: str | None) -> None:
    if path is None:  # none at all
        assert calls_grammar({4: tool(parameters)}, ("B", "E"), False).parts == {}
        return
    with pytest.raises(PathError) as refused:
        calls_grammar({4: tool(parameters)}, ("B", "E"), False)
    assert refused.value.path == P + path


@settings(deadline=None, max_examples=400, suppress_health_check=list(HealthCheck))
@given(
    st.recursive(
        ODD | st.dictionaries(st.sampled_from(KEYWORDS), ODD, max_size=2),
        lambda inner: st.dictionaries(
            st.sampled_from(KEYWORDS),
            inner | st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["x", "y"]), inner, max_size=2),
            max_size=4,
        ),
        max_leaves=12,
    )
)
def test_whatever_it_is_it_is_followed_or_refused_by_path(schema: Any) -> None:
    for parameters in (schema, {"properties": {"p": schema, "q": {"$ref": "#/properties/p"}}, "required": ["p"]}):
        try:
            calls_grammar({4: tool(parameters)}, ("B", "E"), False)
        except PathError as error:
            assert error.path.startswith(P)


@pytest.mark.parametrize("key", [" x ", "a b", "a<b", "a=b", "&lt;", "é", "</parameter", '"'])
def test_odd_names(compiler: GrammarCompiler, session: Session, tags: tuple[str, str], key: str) -> None:
    parameters = {"properties": {key: {"type": "integer"}}, "required": [key]}
    made = calls_grammar({0: tool(parameters)}, tags, False)
    text = f"{BEGIN}\n<function=f>\n<parameter={key}>\n12\n</parameter>\n</function>\n{END}"
    assert takes(compiler, session, made.source, text)
    read = ToolCallReader([tool(parameters)]).read(text.removeprefix(BEGIN).removesuffix(END))
    assert read is not None and json.loads(read.arguments) == {key: 12}


def test_names_that_are_required_alone(compiler: GrammarCompiler, session: Session, tags: tuple[str, str]) -> None:
    """They are what additionalProperties says."""
    parameters = {"required": ["x"], "additionalProperties": {"type": "integer"}}
    source = calls_grammar({0: tool(parameters)}, tags, False).source
    assert takes(compiler, session, source, call("12")) and not takes(compiler, session, source, call("a"))
    assert not takes(compiler, session, source, f"{BEGIN}\n<function=f>\n</function>\n{END}")


STRICT = {
    "type": "object",
    "properties": {
        "word": {"type": "string", "pattern": "^[a-z]{1,6}$"},
        "mode": {"enum": ["fast", 2, None]},
        "size": {"type": ["string", "integer"], "minimum": 1, "maxLength": 5},
        "point": {"$ref": "#/$defs/point"},
        "kind": {"const": "k"},
    },
    "required": ["word", "mode", "size", "point", "kind"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "integer", "maximum": 99}, "s": {"type": "string", "maxLength": 4}},
            "required": ["x", "s"],
            "additionalProperties": False,
        }
    },
}


@pytest.mark.parametrize("stream", [True, False])
def test_replies_are_valid(server: Running, stream: bool) -> None:
    """Whatever is chosen, with drafting and without."""
    seen = set()
    for seed in range(2):
        fields = {
            "tools": [tool(STRICT)],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "temperature": 1.0,
            "seed": seed + 2 * stream,
            "max_tokens": 800,
            "spec": ["on", "off"][seed],
        }
        if stream:
            deltas = [e["choices"][0]["delta"] for e in server.events(**fields) if e["choices"]]
            parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
            arguments = "".join(part["function"]["arguments"] for part in parts)
        else:
            (made,) = server.chat(**fields)["choices"][0]["message"]["tool_calls"]
            arguments = made["function"]["arguments"]
        jsonschema.validate(json.loads(arguments), STRICT)
        seen.add(arguments)
    assert len(seen) > 1


@pytest.mark.parametrize(("schema", "path"), [REFUSED[0], REFUSED[-1], REFUSED[8]])
def test_a_request_is_refused_by_path(server: Running, schema: Any, path: str) -> None:
    for fields in ({"tool_choice": "required"}, {"tool_choice": {"type": "function", "function": {"name": "f"}}}):
        others = [{"type": "function", "function": {"name": f"g{i}"}} for i in range(4)]
        status, error = server.refusal(tools=[*others, tool({"properties": {"x": schema}})], **fields)
        assert (status, error["param"]) == (400, X + path) and error["message"].startswith(X)


def test_masks_of_a_long_pattern_end(server: Running) -> None:
    status, error = server.refusal(
        tools=[tool({"properties": {"x": {**TEXT, "pattern": "^(a{1000}){1000}$"}}, "required": ["x"]})],
        tool_choice="required",
        max_tokens=400,
        temperature=0,
    )
    assert status == 400 and error["param"].startswith("tools")
