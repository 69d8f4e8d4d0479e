"""What a chat request's reply may look like: its tools and response format as one grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runtime.grammar import Grammar, json_text
from runtime.grammar_state import GrammarError
from runtime.server.errors import bad_field
from runtime.server.schema import ChatRequest, JsonObjectFormat, JsonSchemaFormat, NamedTool
from runtime.server.tool_grammar import calls_grammar, tag_names
from runtime.server.tool_schemas import PathError

if TYPE_CHECKING:
    from runtime.server.service import Service


def offered_tools(body: ChatRequest) -> list[dict[str, Any]]:
    """The tools that the model is told of. Raises ApiError for a choice that does not go with the tools."""
    if body.tool_choice not in (None, "none", "auto") and not body.tools:
        raise bad_field("tool_choice", "there are no tools to choose from")
    if body.tool_choice == "none" or not body.tools:
        return []
    names = [tool.function.name for tool in body.tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise bad_field(f"tools[{i}].function.name", f"there are two tools {name!r}")
    if isinstance(body.tool_choice, NamedTool) and body.tool_choice.function.name not in names:
        raise bad_field("tool_choice.function.name", f"there is no tool {body.tool_choice.function.name!r}")
    return [tool.model_dump(exclude_none=True) for tool in body.tools]


def wants_grammar(body: ChatRequest) -> bool:
    """Whether `chat_grammar` makes one."""
    return _must_call(body) or _format_schema(body) is not None


def _must_call(body: ChatRequest) -> bool:
    return body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)


def chat_grammar(service: Service, body: ChatRequest, tools: list[dict[str, Any]]) -> Grammar | None:
    """None: any text. Raises ApiError naming the field whose schema cannot be followed."""
    schema = _format_schema(body)
    must_call = _must_call(body)
    if not must_call:
        json_only = None if schema is None else service.grammars.json_schema(schema, "response_format")
        if not tools or json_only is None:
            return json_only
    wanted = dict(enumerate(tools))
    if isinstance(body.tool_choice, NamedTool):
        wanted = {i: tool for i, tool in wanted.items() if tool["function"]["name"] == body.tool_choice.function.name}
    other = "" if must_call else f"other: {json_text(schema or {})}\n"
    several = body.parallel_tool_calls is not False and not isinstance(body.tool_choice, NamedTool)
    try:
        grammar = calls_grammar(wanted, tag_names(service.tag_ids), several, other)
    except PathError as error:
        raise bad_field(error.path, str(error)) from error
    try:
        return service.grammars.lark(grammar.source, "tools")
    except GrammarError:
        if other:
            service.grammars.json_schema(schema or {}, "response_format")
        for path, source in grammar.parts.items():  # which of them is it?
            service.grammars.lark(source, path)
        raise


def _format_schema(body: ChatRequest) -> dict[str, Any] | None:
    wanted = body.response_format
    if isinstance(wanted, JsonObjectFormat):
        return {"type": "object"}
    return wanted.json_schema.schema_ if isinstance(wanted, JsonSchemaFormat) else None
