"""From the messages of a request to token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from engines.errors import UsageError
from runtime.chat_template import ChatPrompt, ChatTemplate, chat_prompt
from runtime.server.errors import bad_field
from runtime.server.schema import ChatRequest, Message
from runtime.server.tool_calls import BEGIN, END
from runtime.tokenizer import Tokenizer

_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")
_PROBE = {"type": "function", "function": {"name": "probe_of_tools", "description": "", "parameters": {}}}
# For templates that know nothing of tools, in the words of those that do.
_TOOLS_HEAD = "# Tools\n\nYou have access to the following functions:\n\n<tools>"
_TOOLS_TAIL = (
    "\n</tools>\n\nIf you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
    f"{BEGIN}\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
    f"<parameter=example_parameter_2>\nvalue_2\n</parameter>\n</function>\n{END}"
)


class ChatPrompts:
    """Renders requests with a model's chat template. May be shared by threads."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, context_size: int) -> None:
        self._template, self._tokenizer, self._context_size = template, tokenizer, context_size
        self._knows_tools = self._probe_tools()

    def prompt(self, request: ChatRequest, tools: Sequence[Mapping[str, Any]]) -> ChatPrompt:
        """Raises ApiError naming a message's field, UsageError when the template refuses."""
        options = _template_options(request)
        messages = [_message(message, f"messages[{i}]") for i, message in enumerate(request.messages)]
        if not self._knows_tools:
            messages = _with_tools_as_text(messages, tools)
        elif tools:
            options["tools"] = list(tools)
        return chat_prompt(self._template, self._tokenizer, messages, self._context_size, **options)

    def _probe_tools(self) -> bool:
        """Whether the template says anything about tools."""
        messages = [{"role": "user", "content": "x"}]
        try:
            return _PROBE["function"]["name"] in self._template.render(messages, tools=[_PROBE])  # type: ignore[index]
        except UsageError:
            return False


def _template_options(request: ChatRequest) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if request.reasoning_effort is not None:
        options["enable_thinking"] = request.reasoning_effort != "none"
        options["reasoning_effort"] = request.reasoning_effort
    for name, value in (request.chat_template_kwargs or {}).items():
        if name in _RESERVED or not name.isidentifier():
            raise bad_field(f"chat_template_kwargs.{name}", "cannot be set this way")
        options[name] = value
    return options


def _message(message: Message, where: str) -> dict[str, Any]:
    """As templates take it: text in one piece, arguments of calls as objects."""
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content or ())
    if content is None and message.role != "assistant":
        raise bad_field(f"{where}.content", f"a {message.role} message needs text")
    out: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": text}
    if message.reasoning_content is not None:
        out["reasoning_content"] = message.reasoning_content
    for name in ("name", "tool_call_id"):
        if getattr(message, name) is not None:
            out[name] = getattr(message, name)
    if message.tool_calls:
        if message.role != "assistant":
            raise bad_field(f"{where}.tool_calls", "only assistant messages have calls")
        out["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments, where, i)},
            }
            for i, call in enumerate(message.tool_calls)
        ]
    return out


def _arguments(text: str, where: str, index: int) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise bad_field(f"{where}.tool_calls[{index}].function.arguments", "must be a JSON object, as text")
    return value


def _with_tools_as_text(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools in a system message, calls as the model writes them, results as user messages."""
    out: list[dict[str, Any]] = []
    for message in messages:
        message = dict(message)
        calls = message.pop("tool_calls", None) or ()
        if message["role"] == "tool":
            message = {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        elif calls:
            message["content"] = "\n".join(filter(None, [message["content"], *map(_call_text, calls)]))
        out.append(message)
    if tools:
        listed = _TOOLS_HEAD + "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools) + _TOOLS_TAIL
        if out[0]["role"] == "system":
            out[0] = {**out[0], "content": f"{listed}\n\n{out[0]['content']}".rstrip()}
        else:
            out.insert(0, {"role": "system", "content": listed})
    return out


def _call_text(call: Mapping[str, Any]) -> str:
    lines = [BEGIN, f"<function={call['function']['name']}>"]
    for key, value in call["function"]["arguments"].items():
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines += [f"<parameter={key}>", shown, "</parameter>"]
    return "\n".join([*lines, "</function>", END])
