"""What a chat shows, with a model that says what it is told to say."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from engines.errors import EngineError
from runtime.terminal.commands import Commands
from runtime.terminal.conversation import Conversation
from runtime.terminal.model import Delta, Reply, Settings
from runtime.terminal.screen import Screen


class Scripted:
    """Says the given deltas; raises those that are exceptions; an empty list of deltas is a reply of nothing."""

    name = "scripted"

    def __init__(self, *replies: Sequence[Delta | Exception]) -> None:
        self._replies = list(replies)
        self.heard: list[list[Mapping[str, str]]] = []

    def reply(
        self, messages: Sequence[Mapping[str, str]], settings: Settings, reply: Reply, stopped: Callable[[], bool]
    ) -> Iterator[Delta]:
        self.heard.append([dict(message) for message in messages])
        reply.finish_reason = "cancelled"
        if self.heard[-1][-1]["content"] == "stops early":
            reply.finish_reason = "stop"
        for delta in self._replies.pop(0):
            if stopped():
                return
            if isinstance(delta, Exception):
                raise delta
            yield delta
        reply.finish_reason = "stop"


class _Out(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Callable[..., io.StringIO]:
    def make(terminal: bool, **environment: str) -> io.StringIO:
        for name in ("TERM", "NO_COLOR"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        out = _Out(terminal)
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", _Out(terminal))
        monkeypatch.setattr(sys, "stdin", _Out(False))
        return out

    return make


THOUGHT = [Delta(reasoning="Let me"), Delta(reasoning=" see."), Delta(content="It\x1b[2Jis"), Delta(content=" 4.")]


@pytest.mark.parametrize(
    ("terminal", "environment", "shown"),
    [
        (True, {"TERM": "xterm"}, "\x1b[2mLet me see.\x1b[22m\n\nIt\ufffd[2Jis 4.\n"),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, "[thinking]\nLet me see.\n[answer]\n\nIt\ufffd[2Jis 4.\n"),
        (False, {"TERM": "xterm"}, "It\x1b[2Jis 4.\n"),
    ],
)
def test_thinking_is_dimmed_and_a_terminal_is_safe(
    streams: Callable[..., io.StringIO], terminal: bool, environment: dict[str, Any], shown: str
) -> None:
    out = streams(terminal, **environment)
    chat = Conversation(Scripted(THOUGHT), Settings(), Screen())
    chat.ask("2 + 2?", lambda: False)
    assert out.getvalue() == shown
    assert chat.messages[1] == {"role": "assistant", "content": "It\x1b[2Jis 4.", "reasoning_content": "Let me see."}


def test_thinking_that_never_ends_leaves_the_terminal_plain(streams: Callable[..., io.StringIO]) -> None:
    out = streams(True, TERM="xterm")
    Conversation(Scripted([Delta(reasoning="Hm")]), Settings(), Screen()).ask("?", lambda: False)
    assert out.getvalue() == "\x1b[2mHm\x1b[22m\n"


def test_a_failed_reply_leaves_no_trace(streams: Callable[..., io.StringIO]) -> None:
    streams(False)
    model = Scripted([Delta(content="One")], [Delta(content="Tw"), EngineError("broken")], [Delta(content="Three")])
    chat = Conversation(model, Settings(), Screen(), system="Be brief.")
    chat.ask("1", lambda: False)
    with pytest.raises(EngineError):
        chat.ask("stops early", lambda: False)
    assert len(chat.messages) == 2
    chat.ask("3", lambda: False)
    assert [message["content"] for message in model.heard[2]] == ["Be brief.", "1", "One", "3"]


def test_a_stopped_reply_is_kept_as_far_as_it_came(streams: Callable[..., io.StringIO]) -> None:
    streams(False)
    model = Scripted([Delta(content="One"), Delta(content=" two")], [Delta(content="x")], [Delta(content="y")])
    chat = Conversation(model, Settings(), Screen())
    answers = iter([False, True])
    assert chat.ask("count", lambda: next(answers)).finish_reason == "cancelled"
    assert [message["content"] for message in chat.messages] == ["count", "One"]
    chat.ask("never begun", lambda: True)
    assert len(chat.messages) == 2


def test_a_regeneration_that_fails_keeps_the_old_reply(streams: Callable[..., io.StringIO]) -> None:
    streams(False)
    model = Scripted([Delta(content="One")], [EngineError("broken")], [Delta(content="Uno")])
    chat = Conversation(model, Settings(), Screen())
    commands = Commands(chat, lambda text: chat.ask(text, lambda: False) and None)
    chat.ask("1", lambda: False)
    with pytest.raises(EngineError):
        commands.run("/regenerate")
    assert [message["content"] for message in chat.messages] == ["1", "One"]
    commands.run("/regenerate")
    assert [message["content"] for message in chat.messages] == ["1", "Uno"]


def test_lines_that_go_on(streams: Callable[..., io.StringIO], monkeypatch: pytest.MonkeyPatch) -> None:
    streams(False)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\\\ntwo\r\nthree\\\n"))
    screen = Screen()
    assert [screen.read() for _ in range(3)] == ["one\ntwo", "three", None]
