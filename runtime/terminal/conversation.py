"""The messages so far, and one reply after another."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engines.errors import ResourceError, UsageError
from engines.given_files import given_text, real_path
from runtime.terminal.model import ChatModel, Reply, Settings
from runtime.terminal.screen import Screen

_ROLES = ("system", "user", "assistant")


class Conversation:
    """messages: {"role", "content"} and, of replies that were thought about, "reasoning_content"; without the system
    message, which is ``system``."""

    def __init__(self, model: ChatModel, settings: Settings, screen: Screen, system: str = "") -> None:
        self.model, self.settings, self.screen, self.system = model, settings, screen, system
        self.messages: list[dict[str, str]] = []
        self._own_files: set[Path] = set()  # may be written again

    def all_messages(self) -> list[dict[str, str]]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.messages]

    def ask(self, text: str, stopped: Callable[[], bool]) -> Reply:
        """Show the reply to ``text`` as it comes. A reply that fails, or is stopped before it says anything, leaves no
        trace; one that is stopped later is kept as far as it came. Raises what the model raises."""
        self.messages.append({"role": "user", "content": text})
        reply = Reply()
        try:
            self._show(reply, stopped)
        except BaseException:
            self.messages.pop()
            raise
        finally:
            self.screen.end()
        if reply.finish_reason == "cancelled" and not reply.content:
            self.messages.pop()
            return reply
        thought = {"reasoning_content": reply.reasoning} if reply.reasoning else {}
        self.messages.append({"role": "assistant", "content": reply.content, **thought})
        return reply

    def _show(self, reply: Reply, stopped: Callable[[], bool]) -> None:
        self.screen.begin()
        for delta in self.model.reply(self.all_messages(), self.settings, reply, stopped):
            reply.reasoning += delta.reasoning
            reply.content += delta.content
            self.screen.reasoning(delta.reasoning)
            self.screen.content(delta.content)

    def take_back(self) -> str:
        """Drop the last message and its reply: the message. Raises UsageError when there is none."""
        if len(self.messages) < 2:
            raise UsageError("there is no message yet")
        del self.messages[-1]
        return self.messages.pop()["content"]

    def save(self, path: Path) -> None:
        """Write the chat as JSON. A file that is not from this chat is never written over. Raises UsageError,
        ResourceError."""
        if os.path.lexists(path) and real_path(path) not in self._own_files:
            raise UsageError(f"{path}: exists already; give another name")
        text = json.dumps({"model": self.model.name, "messages": self.all_messages()}, ensure_ascii=False, indent=1)
        try:
            with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
                try:
                    file.write(text + "\n")
                    file.close()
                    os.replace(file.name, path)
                except BaseException:
                    os.unlink(file.name)
                    raise
        except (OSError, ValueError) as error:  # NUL in the path
            reason = getattr(error, "strerror", None) or error
            raise ResourceError(f"{path}: cannot be written ({reason})") from None
        self._own_files.add(real_path(path))

    def load(self, path: Path) -> None:
        """Go on with a saved chat in place of this one. Raises UsageError, and changes nothing then."""
        try:
            messages = json.loads(given_text("", path, "give a chat that /save wrote"))["messages"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UsageError(f"{path}: is no saved chat") from None
        system = ""
        if isinstance(messages, list) and messages and _role(messages[0]) == "system":
            system = str(messages.pop(0).get("content"))
        pairs = isinstance(messages, list) and len(messages) % 2 == 0
        if not pairs or any(_role(m) != _ROLES[1 + i % 2] for i, m in enumerate(messages)):
            raise UsageError(f"{path}: wanted a chat of messages and replies in turn")
        self.system, self.messages = system, [_plain(message) for message in messages]
        self._own_files.add(real_path(path))


def _role(message: Any) -> str:
    role = message.get("role") if isinstance(message, dict) else None
    return role if role in _ROLES and isinstance(message.get("content"), str) else ""


def _plain(message: Mapping[str, Any]) -> dict[str, str]:
    kept = ("role", "content", "reasoning_content")
    return {name: message[name] for name in kept if isinstance(message.get(name), str)}
