"""The model's own chat template, rendered as transformers does, in Jinja's immutable sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import SecurityError

from engines.errors import EngineError, UsageError
from engines.given_files import read_bytes
from runtime.template_limits import BoundedEnvironment
from runtime.tokenizer import Tokenizer

TEMPLATE_NAME = "chat_template.jinja"
THINK, END_THINK = "<think>", "</think>"


class ChatTemplate:
    """`chat_template.jinja` of an exported folder, compiled."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        """Raises UsageError when the model has no template or one that Jinja cannot read."""
        self._path = folder / TEMPLATE_NAME
        try:
            source = read_bytes(self._path).decode()
        except FileNotFoundError:
            raise UsageError(f"{folder}: the model has no chat template; give the prompt as plain text") from None
        except (OSError, UnicodeDecodeError) as error:
            raise EngineError(f"{self._path}: cannot be read ({error}); run `python -m export` again") from error
        try:
            self._environment = _environment()
            self._template = self._environment.bounded(source)
        except SecurityError as error:
            raise UsageError(f"{self._path}: {error}") from error
        except jinja2.TemplateSyntaxError as error:
            raise UsageError(f"{self._path}: line {error.lineno} of the chat template: {error.message}") from error
        self._tokens = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}

    def render(
        self, messages: Sequence[Mapping[str, Any]], /, *, add_generation_prompt: bool = True, **options: Any
    ) -> str:
        """The prompt text of ``messages`` ({"role", "content", ...} each).

        ``options`` go to the template by name: enable_thinking, tools, documents, whatever it knows. One that is not
        given is undefined there, so the template's own default holds; tools and documents are then None.
        Raises UsageError with the template's own message when it refuses the messages or fails.
        """
        values = {"tools": None, "documents": None, **self._tokens, **options}
        try:
            values = {**values, "messages": messages, "add_generation_prompt": add_generation_prompt}
            return self._environment.text_of(self._template, values)
        except MemoryError:
            raise
        except Exception as error:  # a template is a program: it may fail with anything
            message = " ".join(str(error).split()) or type(error).__name__
            raise UsageError(f"the chat template cannot render these messages: {message}") from error


@dataclass(frozen=True)
class ChatPrompt:
    """stable_length: how many ids the next turn's prompt will begin with, too, as far as the template tells."""

    ids: list[int]
    ends_in_think: bool
    stable_length: int


def chat_prompt(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    most: int,
    /,
    **options: Any,
) -> ChatPrompt:
    """The prompt for an answer to ``messages``. Raises UsageError as `ChatTemplate.render` does, and as
    `Tokenizer.encode` for far more than ``most`` tokens."""
    text = template.render(messages, add_generation_prompt=True, **options)
    ids = tokenizer.encode(text, most=most)
    history = tokenizer.encode(template.render(messages, add_generation_prompt=False, **options), most=most)
    return ChatPrompt(ids, prompt_ends_in_think(text), _common_length(ids, history))


def _common_length(one: Sequence[int], other: Sequence[int]) -> int:
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return min(len(one), len(other))


def prompt_ends_in_think(prompt: str) -> bool:
    """Whether generation begins inside a think block: the prompt's last tag is an open <think>."""
    return prompt.rstrip().endswith(THINK)


def split_reasoning(text: str, prompt_ends_in_think: bool) -> tuple[str, str]:
    """(reasoning, answer) of a generated text, each without the line ends between them.

    The reasoning is what comes before </think>: from the start if the prompt left a block open, else only if the text
    itself begins with <think>. A block that is never closed is all reasoning.
    """
    if not prompt_ends_in_think:
        inner = text.lstrip()
        if not inner.startswith(THINK):
            return "", text
        text = inner[len(THINK) :]
    reasoning, _, answer = text.partition(END_THINK)
    return reasoning.strip("\n"), answer.lstrip("\n")


def _environment() -> BoundedEnvironment:
    made = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    made.filters["tojson"] = _tojson
    del made.globals["lipsum"]  # any amount of text, in one step
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = _strftime_now
    return made


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}: marks the assistant's text for training; here just its content."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's HTML escapes, which would change what the model reads."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
