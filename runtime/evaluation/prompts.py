"""Prompts by category, from JSON lines.

A line is an object with `category` and one of `prompt` (a text), `messages` (of a chat), `turns` (a conversation's user
messages, as SPEED-Bench and Spec-Bench have them: the first is taken, as later ones go on from a reply).

`prompts.jsonl`, which is used where no file is given, was written for this project (Apache-2.0, like all of it).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from engines.errors import UsageError
from engines.given_files import given_text

MOST_PROMPTS = 100_000  # of a file: all are taken in before the first is run
_CURE = "give a file of JSON lines"
_KINDS = "prompt (a text), messages (a list), turns (a list of texts)"


@dataclass(frozen=True)
class Prompt:
    """messages: of a chat; a plain text is one message of a user. place: where it came from, for errors."""

    category: str
    messages: tuple[dict[str, Any], ...]
    place: str

    @property
    def text(self) -> str:
        """The one message, for a model without a chat template. Raises UsageError when there are more."""
        if len(self.messages) != 1:
            raise UsageError(f"{self.place}: has {len(self.messages)} messages, which need a model's chat template")
        return str(self.messages[0]["content"])


def load_prompts(files: list[Path], per_category: int = 0) -> list[Prompt]:
    """Of all files, or the set of this package. per_category: so many of each category, the first; 0: all.

    Raises UsageError naming file and line."""
    if files:
        prompts = [prompt for file in files for prompt in _parse(given_text("--prompts", file, _CURE), str(file))]
    else:
        text = resources.files("runtime.evaluation").joinpath("prompts.jsonl").read_text(encoding="utf-8")
        prompts = _parse(text, "prompts.jsonl")
    kept, seen = [], dict[str, int]()
    for prompt in prompts:
        seen[prompt.category] = seen.get(prompt.category, 0) + 1
        if not per_category or seen[prompt.category] <= per_category:
            kept.append(prompt)
    if not kept:
        raise UsageError(f"{', '.join(map(str, files))}: no prompt in there; give a JSON object a line")
    return kept


def _parse(text: str, name: str) -> list[Prompt]:
    lines = enumerate(text.split("\n"), start=1)
    return [_prompt(line, f"{name}:{number}") for number, line in lines if line.strip()]


def _prompt(line: str, place: str) -> Prompt:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{place}: not JSON ({error})") from None
    category = row.get("category", "") if isinstance(row, dict) else None
    if not isinstance(category, str) or not category.isprintable():
        raise UsageError(f"{place}: wanted an object whose category is a text of one line")
    given = [kind for kind in ("prompt", "messages", "turns") if kind in row]
    if len(given) != 1:
        raise UsageError(f"{place}: has {' and '.join(given) or 'none of them'}; wanted one of {_KINDS}")
    value = row[given[0]]
    if given[0] == "turns" and isinstance(value, list) and value:
        value = value[0]
    messages = value if given[0] == "messages" else [{"role": "user", "content": value}]
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise UsageError(f"{place}: wanted {_KINDS}, and none of them empty")
    try:
        for message in messages:
            message["content"].encode()
    except UnicodeEncodeError:
        raise UsageError(f"{place}: {given[0]} has a lone surrogate; give valid Unicode") from None
    return Prompt(category or "all", tuple(messages), place)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(
        isinstance(message.get(key), str) and message[key] for key in ("role", "content")
    )
