"""Requests, field by field. What is not listed is refused by name; fields that change nothing are taken and let be."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from runtime.sampling import SEED_MAX, TEMPERATURE_MAX
from runtime.server.errors import bad_field

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
STOPS_MAX, STOP_CHARS_MAX, TOOLS_MAX, MESSAGES_MAX = 16, 256, 256, 4096
_SURROGATE = re.compile("[\ud800-\udfff]")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool = False  # no padding is ever sent


class Common(_Strict):
    """Of both kinds of completion."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=TEMPERATURE_MAX)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=SEED_MAX)] | None = None
    stop: (
        Annotated[str, Field(max_length=STOP_CHARS_MAX)]
        | Annotated[list[Annotated[str, Field(max_length=STOP_CHARS_MAX)]], Field(max_length=STOPS_MAX)]
        | None
    ) = None
    n: Literal[1] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    spec: bool | Literal["on", "off"] | None = Field(None, description="drafting; never changes the text")
    # Taken, and without any effect here.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    modalities: list[Literal["text"]] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    # Of OpenAI's, too, but for what is not done here.
    audio: None = None
    functions: None = None
    function_call: None = None
    prediction: None = None
    web_search_options: None = None
    verbosity: Literal["medium"] | None = None


class CompletionRequest(Common):
    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class FunctionCall(_Strict):
    name: Name
    arguments: str


class MessageToolCall(_Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(max_length=TOOLS_MAX)] | None = None
    tool_call_id: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class Function(_Strict):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Strict):
    type: Literal["function"]
    function: Function


class _FunctionName(_Strict):
    name: Name


class NamedTool(_Strict):
    type: Literal["function"]
    function: _FunctionName


class JsonSchema(_Strict):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextFormat(_Strict):
    type: Literal["text"]


class JsonObjectFormat(_Strict):
    type: Literal["json_object"]


class JsonSchemaFormat(_Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class ChatRequest(Common):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MESSAGES_MAX)]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")] | None = (
        None
    )
    tools: Annotated[list[Tool], Field(max_length=TOOLS_MAX)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    timings_per_token: bool | None = Field(None, description="timings so far in every chunk, as llama.cpp's server")
    token_origins: bool | None = Field(None, description="the text again, token by token: drafted or not")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class TokenizeRequest(_Strict):
    content: str
    add_special: bool = Field(False, description="put the model's BOS token in front, if it has one")
    parse_special: bool = Field(True, description="take control tokens spelled in the text for what they name")


class DetokenizeRequest(_Strict):
    tokens: list[TokenId]


def check_stream_options(body: Common) -> None:
    """Raises ApiError for what would have no effect."""
    if body.stream_options is not None and not body.stream:
        raise bad_field("stream_options", "only with stream: true")


def check_text(body: BaseModel) -> None:
    """Raises ApiError naming the first text that is no Unicode, a field's name or a value."""
    left: list[tuple[str, Any]] = [("", body.model_dump(by_alias=True))]
    while left:
        path, value = left.pop()
        if isinstance(value, str):
            found = _SURROGATE.search(value)
            if found is not None:
                named = f"U+{ord(found[0]):04X}, at character {found.start()}"
                raise bad_field(path, f"has a lone surrogate, {named}; give valid Unicode")
        elif isinstance(value, dict):
            for key, inner in reversed(value.items()):
                shown = key.encode("utf-8", "backslashreplace").decode()
                where = f"{path}.{shown}" if path else shown
                left += [(where, inner), (where, key)]
        elif isinstance(value, list):
            left += [(f"{path}[{i}]", inner) for i, inner in reversed(list(enumerate(value)))]
