"""The model's own chat template, rendered as transformers does, in Jinja's immutable sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.errors import EngineError, UsageError
from engines.given_files import read_bytes
from runtime.template_renderer import compiled, rendered
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
        self._source = source
        compiled(self._path, source)
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
        values = {**values, "messages": messages, "add_generation_prompt": add_generation_prompt}
        return rendered(self._source, values)


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
