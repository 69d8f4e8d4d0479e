"""From messages to prompts: with templates that know tools and thinking, and with those that do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.errors import UsageError
from runtime.chat_template import TEMPLATE_NAME, ChatTemplate
from runtime.server.errors import ApiError
from runtime.server.prompt import ChatPrompts
from runtime.server.schema import ChatRequest
from runtime.server.tool_calls import ToolCallReader
from runtime.tokenizer import Tokenizer
from tests.exported import Exported

CONTEXT = 4096
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]
# In the manner of Qwen3.5's: tools, calls with arguments taken apart, thinking of earlier turns left out.
KNOWING = """\
{%- if tools %}{{- '<|im_start|>system\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and m.reasoning_content is defined and loop.last %}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}{{- m.content }}
{%- for call in m.tool_calls or [] %}{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments | items %}{{- '<parameter=' + key + '>\\n' }}
{{- value if value is string else value | tojson }}{{- '\\n</parameter>\\n' }}{%- endfor %}
{{- '</function>\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}
{%- else %}{{- '<think>\\n' }}{%- endif %}{%- endif %}"""
CALL = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "len", "n": [1, 2]}'}}


@pytest.fixture(scope="module")
def tokenizer(exported: Callable[[str], Exported]) -> Tokenizer:
    model = exported("trained")
    return Tokenizer(model.folder, model.manifest.tokenizer)


@pytest.fixture
def knowing(tokenizer: Tokenizer, tmp_path: Path) -> ChatPrompts:
    (tmp_path / TEMPLATE_NAME).write_text(KNOWING)
    return ChatPrompts(ChatTemplate(tmp_path, tokenizer), tokenizer, CONTEXT)


@pytest.fixture
def plain(tokenizer: Tokenizer, exported: Callable[[str], Exported]) -> ChatPrompts:
    """The tiny model's own: roles and text alone."""
    return ChatPrompts(ChatTemplate(exported("trained").folder, tokenizer), tokenizer, CONTEXT)


def request(*messages: dict[str, Any], **fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": list(messages), **fields})


USER = {"role": "user", "content": "Hi"}
TURNS = (
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "a length"},
)
CALL_TEXT = (
    "<tool_call>\n<function=look_up>\n<parameter=word>\nlen\n</parameter>\n<parameter=n>\n[1, 2]\n</parameter>\n"
    "</function>\n</tool_call>"
)


def test_a_template_that_knows_tools(knowing: ChatPrompts, tokenizer: Tokenizer) -> None:
    prompt = knowing.prompt(request(*TURNS), TOOLS)
    text = tokenizer.decode(prompt.ids, special=True)
    assert text.startswith('<|im_start|>system\n<tools>\n{"type": "function", "function": {"name": "look_up"')
    assert f"<|im_start|>assistant\n{CALL_TEXT}<|im_end|>\n<|im_start|>tool\na length<|im_end|>" in text
    assert prompt.ends_in_think


def test_a_template_that_does_not(plain: ChatPrompts, tokenizer: Tokenizer) -> None:
    """It is told in a system message, in words that the calls' reader understands."""
    prompt = plain.prompt(request({"role": "developer", "content": "Be brief."}, *TURNS), TOOLS)
    text = tokenizer.decode(prompt.ids, special=True)
    assert text.startswith("<|im_start|>system\n# Tools\n") and text.count("<|im_start|>system") == 1
    assert '"name": "look_up"' in text and "Be brief.<|im_end|>" in text
    assert f"<|im_start|>assistant\n{CALL_TEXT}<|im_end|>" in text
    assert "<|im_start|>user\n<tool_response>\na length\n</tool_response><|im_end|>" in text
    body = CALL_TEXT.removeprefix("<tool_call>").removesuffix("</tool_call>")
    call = ToolCallReader(TOOLS).read(body)
    assert call is not None and call.name == "look_up"
    assert "# Tools" not in tokenizer.decode(plain.prompt(request(USER), []).ids)


def test_what_the_next_turn_begins_with(knowing: ChatPrompts, tokenizer: Tokenizer) -> None:
    prompt = knowing.prompt(request(USER), [])
    shown = tokenizer.decode(prompt.ids[: prompt.stable_length], special=True)
    assert shown == "<|im_start|>user\nHi<|im_end|>\n"
    later = knowing.prompt(request(USER, {"role": "assistant", "content": "Yes?"}, USER), [])
    assert later.ids[: prompt.stable_length] == prompt.ids[: prompt.stable_length]
    assert later.stable_length > prompt.stable_length


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "low"}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}, True),
    ],
)
def test_thinking(knowing: ChatPrompts, fields: dict[str, Any], thinks: bool) -> None:
    assert knowing.prompt(request(USER, **fields), []).ends_in_think == thinks


def test_reasoning_is_handed_to_the_template(knowing: ChatPrompts, tokenizer: Tokenizer) -> None:
    last = {"role": "assistant", "content": "So.", "reasoning_content": "hm"}
    text = tokenizer.decode(knowing.prompt(request(USER, last), []).ids, special=True)
    assert "<|im_start|>assistant\n<think>\nhm\n</think>\n\nSo.<|im_end|>" in text


def test_content_in_parts(plain: ChatPrompts) -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    assert plain.prompt(request({"role": "user", "content": parts}), []) == plain.prompt(request(USER), [])


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "user", "tool_calls": [CALL], "content": "x"}], "messages[0].tool_calls"),
        ([USER, {"role": "system"}], "messages[1].content"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_messages_that_make_no_sense(plain: ChatPrompts, messages: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        plain.prompt(request(*messages), [])
    assert refused.value.param == param


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "eos_token", "a b"])
def test_options_that_are_not_the_requests(plain: ChatPrompts, name: str) -> None:
    with pytest.raises(ApiError) as refused:
        plain.prompt(request(USER, chat_template_kwargs={name: 1}), [])
    assert refused.value.param == f"chat_template_kwargs.{name}"


def test_a_template_that_refuses(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / TEMPLATE_NAME).write_text("{{ raise_exception('No system message here.') }}")
    with pytest.raises(UsageError, match=r"No system message here\."):
        ChatPrompts(ChatTemplate(tmp_path, tokenizer), tokenizer, CONTEXT).prompt(request(USER), [])


def test_a_template_that_makes_a_long_text_of_a_short_one(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / TEMPLATE_NAME).write_text("{% for i in range(9000) %}{{ '<|im_start|> word ' * 50 }}{% endfor %}")
    prompts = ChatPrompts(ChatTemplate(tmp_path, tokenizer), tokenizer, CONTEXT)
    with pytest.raises(
        UsageError, match=r"^the prompt has 8100000 characters, some \d+ tokens, the context holds 4096"
    ):
        prompts.prompt(request(USER), [])
