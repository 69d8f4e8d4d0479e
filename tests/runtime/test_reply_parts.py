"""Thinking, answer, tool calls and stop strings: the same however the text is cut into pieces."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.chat_template import split_reasoning
from runtime.server.partial import StopStrings
from runtime.server.reply_parts import Parts, ReplyParts
from runtime.server.tool_calls import ToolCallReader, value_of

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "write",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "lines": {"type": "integer"},
                    "options": {"type": "object"},
                    "force": {"type": ["boolean", "null"]},
                    "note": {"anyOf": [{"type": "string"}, {"type": "number"}]},
                    "free": {},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
WRITE = (
    "<tool_call>\n<function=write>\n<parameter=path>\n/a b/é.txt\n</parameter>\n<parameter=lines>\n12\n</parameter>\n"
    '<parameter=options>\n{"a": [1, {"b": null}]}\n</parameter>\n</function>\n</tool_call>'
)
WRITE_ARGUMENTS = {"path": "/a b/é.txt", "lines": 12, "options": {"a": [1, {"b": None}]}}
NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
CODE = 'def f(x):\n    return "a\\n<b>"  # é \U0001f600\n' * 4
LONG_WRITE = (
    "<tool_call>\n<function=write>\n<parameter=lines>\n4\n</parameter>\n<parameter=path>\n"
    f"{CODE}\n</parameter>\n<parameter=options>\n[1]\n</parameter>\n<parameter=force>\nTrue\n</parameter>\n</function>\n"
    "</tool_call>"
)
PIECES = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<function=now>", "</function>", "\n", " ", "a", "<"]
PIECES += ["<function=write>", "<parameter=path>\n", "</parameter>", "x" * 64, '{"a": "']
SAMPLES = [
    "plain answer",
    "<think>\nhm\n\nso\n</think>\n\nanswer\n",
    "<think>never closed\n",
    "thought\n</think>\n\nanswer </think> again",
    f"I will.\n\n{WRITE}\n{NOW}\n",
    f"hm</think>\n\n{NOW}",
    "<tool_call>\nnonsense\n</tool_call> and on",
    f"{WRITE[:80]}",
    f"{NOW}\n{WRITE[:-5]}",
    f"Done: {LONG_WRITE}\n{NOW}",
    LONG_WRITE.replace("</function>", "and so on"),
    LONG_WRITE[:-90] + "</tool_call> text",
    LONG_WRITE.replace("</parameter>", ""),
]


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({cut % (len(text) + 1) for cut in cuts} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


def split(pieces: list[str], in_think: bool, reader: ToolCallReader | None) -> tuple[str, str, list[Any], ReplyParts]:
    splitter, total = ReplyParts(in_think, reader), Parts()
    for parts in [*map(splitter.push, pieces), splitter.finish()]:
        total.reasoning += parts.reasoning
        total.content += parts.content
        total.calls += parts.calls
    return total.reasoning, total.content, total.calls, splitter


texts = st.sampled_from(SAMPLES) | st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@settings(deadline=None, max_examples=300)
@given(texts, st.lists(st.integers(0, 400), max_size=12), st.booleans())
def test_reasoning_is_what_the_whole_text_says(text: str, cuts: list[int], in_think: bool) -> None:
    reasoning, content, calls, _ = split(pieces_of(text, cuts), in_think, None)
    assert (reasoning, content, calls) == (*split_reasoning(text, in_think), [])


@settings(deadline=None, max_examples=300)
@given(texts, st.lists(st.integers(0, 400), max_size=12), st.booleans())
def test_pieces_do_not_matter(text: str, cuts: list[int], in_think: bool) -> None:
    reader = ToolCallReader(TOOLS)
    assert split(pieces_of(text, cuts), in_think, reader)[:3] == split([text], in_think, reader)[:3]
    assert split(list(text), in_think, reader)[:3] == split([text], in_think, reader)[:3]


def test_calls_are_taken_out_of_the_answer() -> None:
    text = f"<think>\nhm\n</think>\n\nI will.\n\n{WRITE}\n{NOW}\n"
    reasoning, content, calls, splitter = split([text], False, ToolCallReader(TOOLS))
    assert (reasoning, content, splitter.num_calls) == ("hm", "I will.", 2)
    assert [call.name for call in calls] == ["write", "now"]
    assert [json.loads(call.arguments) for call in calls] == [WRITE_ARGUMENTS, {}]


def test_inside_a_think_block_there_are_no_calls() -> None:
    reasoning, content, calls, _ = split([f"maybe {NOW}?</think>done"], True, ToolCallReader(TOOLS))
    assert (reasoning, content, calls) == (f"maybe {NOW}?", "done", [])


def test_a_call_is_given_out_when_it_is_complete_and_not_before() -> None:
    splitter = ReplyParts(False, ToolCallReader(TOOLS))
    for letter in "So. " + WRITE[:-1]:
        assert not splitter.push(letter).calls
    (call,) = splitter.push(WRITE[-1]).calls
    assert json.loads(call.arguments) == WRITE_ARGUMENTS


@pytest.mark.parametrize("length", range(len("<tool_call>"), len(WRITE)))
def test_a_call_that_is_cut_off_leaves_nothing(length: int) -> None:
    _, content, calls, _ = split([f"So.\n{NOW}\n", WRITE[:length]], False, ToolCallReader(TOOLS))
    assert [call.name for call in calls] == ["now"]
    assert content == "So."


@given(st.text('ab<>/\n"\\é\U0001f600'), st.text("ab<>/\n"), st.lists(st.integers(0, 400), max_size=12))
def test_any_string_arrives_as_it_was_written(start: str, end: str, cuts: list[int]) -> None:
    value = start + "0" * 64 + end
    text = f"<tool_call>\n<function=write>\n<parameter=path>\n{value}\n</parameter>\n</function>\n</tool_call>"
    (call,) = split(pieces_of(text, cuts), False, ToolCallReader(TOOLS))[2]
    assert json.loads(call.arguments) == {"path": value}


@pytest.mark.parametrize("length", range(len("<tool_call>"), len(LONG_WRITE), 7))
def test_a_long_call_that_is_cut_off_leaves_nothing(length: int) -> None:
    """However far it had come."""
    _, content, calls, _ = split(list(LONG_WRITE[:length]), False, ToolCallReader(TOOLS))
    assert (content, calls) == ("", [])


TAGS_INSIDE = [
    ("options", '{"html": "</parameter>"}', {"html": "</parameter>"}),
    ("options", '{"a": "\\"</tool_call>", "b": ["</function>", 1]}', {"a": '"</tool_call>', "b": ["</function>", 1]}),
    ("options", ' {"a":\n "x"}', {"a": "x"}),
    ("free", '["</parameter>\\n</function>"]', ["</parameter>\n</function>"]),
    ("free", '"quoted" and on', '"quoted" and on'),
    ("options", '{"a": "open', '{"a": "open'),
    ("path", '{"a": "', '{"a": "'),
    ("note", '"', '"'),
]


@pytest.mark.parametrize(("key", "text", "value"), TAGS_INSIDE)
def test_tags_inside_of_json(key: str, text: str, value: Any) -> None:
    """A JSON string may hold them, one that is broken holds no more than its line."""
    written = f"<tool_call>\n<function=write>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n</tool_call>"
    for pieces in ([f"{written}\n{NOW}"], list(f"{written}\n{NOW}")):
        _, content, calls, _ = split(pieces, False, ToolCallReader(TOOLS))
        assert [call.name for call in calls] == ["write", "now"] and content == ""
        assert json.loads(calls[0].arguments) == {key: value}


def test_tags_inside_of_calls_written_as_json() -> None:
    text = '<tool_call>\n{"name": "write", "arguments": {"path": "a</tool_call>b"}}\n</tool_call>'
    (call,) = split(list(text), False, ToolCallReader(TOOLS))[2]
    assert json.loads(call.arguments) == {"path": "a</tool_call>b"}


@pytest.mark.parametrize("key", [" x ", "a b", "a<b", "x=&quot;y", "é", "</parameter"])
def test_odd_names_of_parameters(key: str) -> None:
    """As they were offered."""
    parameters = {"properties": {key: {"type": "string"}, "x": {"type": "integer"}}}
    reader = ToolCallReader([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    text = (
        f"<tool_call>\n<function=f>\n<parameter={key}>\n1\n</parameter>\n<parameter= x>\n1\n</parameter>\n</function>"
    )
    (call,) = split([text + "\n</tool_call>"], False, reader)[2]
    assert json.loads(call.arguments) == {key: "1", "x": 1}


def test_without_tools_nothing_is_a_call() -> None:
    assert split([f"x {NOW}"], False, None)[:3] == ("", f"x {NOW}", [])


@pytest.mark.parametrize(
    "body",
    [
        "nonsense",
        "<function=unknown>\n</function>",
        "<function=now>\nstray\n</function>",
        "{broken",
        '{"name": "now", "arguments": []}',
        '{"name": 1}',
        "[" * 5000,
        "{" + '"a":{' * 5000,
    ],
)
def test_what_is_no_call_stays_text(body: str) -> None:
    _, content, calls, _ = split([f"<tool_call>{body}</tool_call>"], False, ToolCallReader(TOOLS))
    assert (content, calls) == (f"<tool_call>{body}</tool_call>", [])


def test_calls_written_as_json() -> None:
    text = '<tool_call>\n{"name": "write", "arguments": {"path": "x", "lines": 3}}\n</tool_call>'
    (call,) = split([text], False, ToolCallReader(TOOLS))[2]
    assert (call.name, json.loads(call.arguments)) == ("write", {"path": "x", "lines": 3})


def test_values_keep_their_inner_lines() -> None:
    text = "<tool_call>\n<function=write>\n<parameter=path>\n\n  a\n\nb  \n\n</parameter>\n</function>\n</tool_call>"
    (call,) = split([text], False, ToolCallReader(TOOLS))[2]
    assert json.loads(call.arguments) == {"path": "\n  a\n\nb  \n"}


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("12", {"type": "string"}, "12"),
        ("12", {"type": "integer"}, 12),
        ("12.0", {"type": "integer"}, 12),
        ("12.5", {"type": "number"}, 12.5),
        ("twelve", {"type": "integer"}, "twelve"),
        ("true", {"type": "boolean"}, True),
        ("True", {"type": "boolean"}, True),
        ("true", {"type": "integer"}, "true"),
        ("null", {"type": ["string", "null"]}, None),
        ("None", {"type": ["string", "null"]}, None),
        ("x", {"type": ["string", "null"]}, "x"),
        ('"x"', {"enum": ["x", "y"]}, '"x"'),
        ("2", {"enum": [1, 2]}, 2),
        ("[1, 2]", {"type": "array"}, [1, 2]),
        ('{"a": 1}', None, {"a": 1}),
        ("{a", None, "{a"),
        ("7", None, "7"),
        ("NaN", {"type": "number"}, "NaN"),
        ("-Infinity", {"type": "number"}, "-Infinity"),
        ("1e400", {"type": "number"}, "1e400"),
        ('{"a": -1e999}', {"type": "object"}, '{"a": -1e999}'),
        ("zebra", {"const": "zebra"}, "zebra"),
        ("3", {"const": 3}, 3),
        ("3", {"allOf": [{"type": "integer"}], "default": 1}, 3),
        ("3", {"anyOf": 5}, "3"),
        ("3", {"type": [["x"], "integer"]}, 3),
        ("3", {"anyOf": [{"type": "string"}, {"type": "number"}]}, 3),
        ("", {"type": "string"}, ""),
        ("", {"type": "object"}, ""),
    ],
)
def test_values(text: str, schema: Any, value: Any) -> None:
    found = value_of(text, schema)
    assert found == value and type(found) is type(value)


REFERENCES = {
    "$defs": {
        "Color": {"type": "string", "enum": ["red", "blue"]},
        "Size": {"$ref": "#/$defs/Inner~1Size"},
        "Inner/Size": {"type": "integer"},
        "Loop": {"$ref": "#/$defs/Loop"},
    },
    "properties": {
        "color": {"$ref": "#/$defs/Color", "default": "red"},
        "size": {"$ref": "#/$defs/Size"},
        "maybe": {"anyOf": [{"$ref": "#/$defs/Size"}, {"type": "null"}]},
        "loop": {"$ref": "#/$defs/Loop"},
        "nowhere": {"$ref": "#/$defs/None/at/all"},
        "elsewhere": {"$ref": "https://example.com/schema"},
    },
}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("color", "red", "red"),
        ("color", "12", "12"),
        ("size", "4", 4),
        ("maybe", "4", 4),
        ("maybe", "null", None),
        ("loop", "4", "4"),
        ("nowhere", "4", "4"),
        ("elsewhere", "4", "4"),
    ],
)
def test_references_of_a_tools_schema(key: str, text: str, value: Any) -> None:
    """What pydantic writes for enumerations and models."""
    reader = ToolCallReader([{"type": "function", "function": {"name": "f", "parameters": REFERENCES}}])
    call = reader.read(f"\n<function=f>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n")
    assert call is not None and json.loads(call.arguments) == {key: value}


def test_references_that_branch_end_soon() -> None:
    many = {"anyOf": [{"$ref": "#/properties/a"}] * 2000}
    reader = ToolCallReader(
        [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": many}}}}]
    )
    assert set(reader.properties("f") or {}) == {"a"}


@pytest.mark.parametrize("number", ["1e999", "NaN", "-Infinity"])
def test_calls_written_as_json_with_numbers_that_are_none(number: str) -> None:
    reader = ToolCallReader([{"type": "function", "function": {"name": "f"}}])
    assert reader.read(f'{{"name": "f", "arguments": {{"x": {number}}}}}') is None


@settings(deadline=None, max_examples=300)
@given(
    st.text("ab<|é\n", max_size=30),
    st.lists(st.text("ab<|é\n", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 30), max_size=10),
)
def test_stop_strings(text: str, stops: list[str], cuts: list[int]) -> None:
    """Of several, the one that begins first, as soon as it is complete."""
    found = StopStrings(stops)
    shown, end = "", 0
    for piece in pieces_of(text, cuts):
        end += len(piece)
        shown += found.push(piece)
        complete = [text[:end].find(stop) for stop in stops if stop in text[:end]]
        assert found.found == bool(complete)
        if complete:
            assert shown == text[: min(complete)]
            return
        assert text[:end].startswith(shown)
    assert shown + found.finish() == text
