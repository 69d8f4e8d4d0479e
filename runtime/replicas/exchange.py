"""What goes between the front and a replica."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

SESSION_HEADER = "x-session-id"
_OPENING_CHARS = 256  # of a prompt that is plain text


@dataclass(frozen=True)
class Asked:
    """An HTTP request. headers: as ASGI has them."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes


@dataclass(frozen=True)
class Head:
    """The beginning of an answer; bytes of its body follow."""

    status: int
    headers: list[tuple[bytes, bytes]]


def session_key(asked: Asked) -> str:
    """What the turns of a chat have in common, so that they go to the replica that has its state. The header
    X-Session-Id if there is one, else the body's prompt_cache_key, else how the chat begins: its messages up to the
    person's first one. "": no turns of anything."""
    for name, value in asked.headers:
        if name.lower().decode("latin-1") == SESSION_HEADER:
            return _digest(["header", value.decode("latin-1")])
    if asked.method != "POST" or not asked.path.startswith("/v1/"):
        return ""
    try:
        body = json.loads(asked.body)
    except (ValueError, RecursionError):  # the replica says what is wrong with it
        return ""
    if not isinstance(body, dict):
        return ""
    if isinstance(body.get("prompt_cache_key"), str):
        return _digest(["key", body["prompt_cache_key"]])
    messages = body.get("messages")
    if isinstance(messages, list):
        return _digest(["messages", *_opening(messages)])
    prompt = body.get("prompt")
    return _digest(["prompt", prompt[:_OPENING_CHARS]]) if isinstance(prompt, (str, list)) else ""


def _opening(messages: list[Any]) -> list[Any]:
    for i, message in enumerate(messages):
        if isinstance(message, dict) and message.get("role") == "user":
            return messages[: i + 1]
    return messages


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
