"""A reply as it comes: thinking, answer and tool calls told apart, however the pieces of text are cut."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.chat_template import END_THINK, THINK
from runtime.server.partial import held_back
from runtime.server.tool_calls import BEGIN, END, ToolCall, ToolCallReader


@dataclass
class Parts:
    """What a piece of text added."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class ReplyParts:
    """Splits a generated text. The joined parts are what `runtime.chat_template.split_reasoning` makes of it whole,
    with tool calls taken out of the answer, each when it is complete: of one that is cut off nothing is given out."""

    def __init__(self, prompt_ends_in_think: bool, reader: ToolCallReader | None, split_reasoning: bool = True) -> None:
        """reader: of the tools that were offered. split_reasoning False: all is answer."""
        self._reader = reader
        self._text = ""  # not dealt with yet
        self._state = "content"
        if split_reasoning:
            self._state = "reasoning" if prompt_ends_in_think else "begin"
        self._reasoned = False  # some reasoning was given out
        self._answered = False  # the answer's beginning was given out
        self._looked = 0  # so far no call ends in the text
        self.num_calls = 0

    def push(self, text: str) -> Parts:
        self._text += text
        parts = Parts()
        while getattr(self, f"_{self._state}")(parts):
            pass
        return parts

    def finish(self) -> Parts:
        """What is left at the end of the text."""
        parts, rest = Parts(), self._text
        self._text = ""
        if self._state == "reasoning":
            parts.reasoning = (rest if self._reasoned else rest.lstrip("\n")).rstrip("\n")
        elif self._state in ("begin", "content"):
            alone = self._reader is not None and (self.num_calls or not self._answered)
            parts.content = rest.rstrip() if alone else rest  # what would have led to a call is no answer
        elif self._state == "after_think":
            parts.content = rest.lstrip("\n")
        return parts

    def _begin(self, parts: Parts) -> bool:
        """Does the text itself open a think block?"""
        inner = self._text.lstrip()
        if inner.startswith(THINK):
            self._text, self._state = inner[len(THINK) :], "reasoning"
            return True
        if THINK.startswith(inner):
            return False
        self._state = "content"
        return True

    def _reasoning(self, parts: Parts) -> bool:
        if not self._reasoned:
            self._text = self._text.lstrip("\n")
        at = self._text.find(END_THINK)
        closed = at >= 0
        shown = self._text[:at] if closed else self._text[: len(self._text) - held_back(self._text, (END_THINK,))]
        given = shown.rstrip("\n")  # line ends before the tag are not shown
        self._text = self._text[at + len(END_THINK) :] if closed else self._text[len(given) :]
        parts.reasoning += given
        self._reasoned = self._reasoned or bool(given)
        if closed:
            self._state = "after_think"
        return closed

    def _after_think(self, parts: Parts) -> bool:
        self._text = self._text.lstrip("\n")
        if not self._text:
            return False
        self._state = "content"
        return True

    def _content(self, parts: Parts) -> bool:
        if self._reader is None:
            parts.content += self._text
            self._text = ""
            return False
        at = self._text.find(BEGIN)
        if at >= 0:
            self._give(self._text[:at].rstrip(), parts)
            self._text, self._state = self._text[at + len(BEGIN) :], "call"
            return True
        shown = self._text[: len(self._text) - held_back(self._text, (BEGIN,))]
        given = shown.rstrip()  # space before a call is not shown
        self._text = self._text[len(given) :]
        self._give(given, parts)
        return False

    def _give(self, text: str, parts: Parts) -> None:
        """Text of the answer; between and after calls, line ends alone are none."""
        parts.content += text if self.num_calls == 0 or self._answered else text.lstrip()
        self._answered = self._answered or bool(text.strip())

    def _call(self, parts: Parts) -> bool:
        assert self._reader is not None
        while (at := self._text.find(END, self._looked)) >= 0:
            body = self._text[:at]
            if not self._reader.goes_on(body):
                self._text, self._state, self._looked = self._text[at + len(END) :], "content", 0
                self._give_call(body, parts)
                return True
            self._looked = at + len(END)
        self._looked = max(self._looked, len(self._text) - len(END) + 1)
        return False

    def _give_call(self, body: str, parts: Parts) -> None:
        assert self._reader is not None
        call = self._reader.read(body)
        if call is None:  # not a call that anybody could make: shown as it is
            parts.content += f"{BEGIN}{body}{END}"
        else:
            parts.calls.append(call)
            self.num_calls += 1
