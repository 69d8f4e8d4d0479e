"""Lines in, replies out: on a terminal with a prompt, line editing and dimmed thinking; on pipes plain."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Sequence

_DIM, _PLAIN = "\x1b[2m", "\x1b[22m"
MOST_CHARACTERS = 8 << 20  # of a message
# What a terminal would act on: control characters but tab and line end, and the C1 ones.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class MessageTooLong(Exception):
    """What comes next on stdin is the rest of it, which is no message."""


class Screen:
    """Answers go to stdout, everything else to stderr."""

    def __init__(self, commands: Sequence[str] = ()) -> None:
        """commands: words that Tab completes."""
        self.asks = sys.stdin.isatty()
        self._shows = sys.stdout.isatty()
        colour = os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("NO_COLOR")
        self._dims = self._shows and colour
        self._dims_notes = sys.stderr.isatty() and colour
        self._part = ""  # "", "reasoning" or "content": what the last of the reply was
        self._at_line_end = True
        if self.asks and self._shows:
            _edit_lines(commands)

    def read(self) -> str | None:
        """The next message; a line that ends in a backslash goes on in the next. None: there are no more.
        Raises KeyboardInterrupt, UnicodeDecodeError for a pipe that is not UTF-8, MessageTooLong."""
        lines: list[str] = []
        while True:
            line = self._line("... " if lines else "> ")
            if line is None:
                return "\n".join(lines) if lines else None
            if sum(map(len, lines)) + len(line) > MOST_CHARACTERS:
                raise MessageTooLong
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])

    def _line(self, prompt: str) -> str | None:
        if self.asks and self._shows:
            try:
                return input(prompt)
            except EOFError:
                self.new_line()
                return None
        line = sys.stdin.readline(MOST_CHARACTERS + 1)
        return line.rstrip("\r\n") if line else None

    def begin(self) -> None:
        """A reply begins."""
        self._part, self._at_line_end = "", True

    def reasoning(self, text: str) -> None:
        """On terminals only: whoever reads a pipe wants the answer."""
        if not text or not self._shows:
            return
        if self._part != "reasoning":
            self._part = "reasoning"
            self._write(_DIM if self._dims else "[thinking]\n")
        self._write(self._safe(text))

    def content(self, text: str) -> None:
        if not text:
            return
        if self._part == "reasoning":
            self._leave_reasoning("\n\n")
        self._part = "content"
        self._write(self._safe(text))
        self._at_line_end = text.endswith("\n")

    def end(self) -> None:
        """The reply is over: the next output begins a line."""
        if self._part == "reasoning":
            self._leave_reasoning("\n")
        elif self._part == "content" and not self._at_line_end:
            self._write("\n")
        self._part = ""

    def note(self, text: str) -> None:
        """Something for the person, not of the model."""
        sys.stdout.flush()
        shown = without_controls(text) if sys.stderr.isatty() else text
        print(f"{_DIM}{shown}{_PLAIN}" if self._dims_notes else shown, file=sys.stderr, flush=True)

    def new_line(self) -> None:
        self._write("\n")

    def _leave_reasoning(self, line_ends: str) -> None:
        self._write((_PLAIN if self._dims else "\n[answer]") + line_ends)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def _safe(self, text: str) -> str:
        return without_controls(text) if self._shows else text


def without_controls(text: str) -> str:
    """What may go to a terminal: a model must not move the cursor, set titles or fill the clipboard."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


def _edit_lines(commands: Sequence[str]) -> None:
    """Line editing, the lines so far on the arrow keys, and Tab for commands, where Python has readline."""
    if importlib.util.find_spec("readline") is None:
        return
    import readline

    def complete(text: str, state: int) -> str | None:
        found = [command for command in commands if text.startswith("/") and command.startswith(text)]
        return found[state] if state < len(found) else None

    readline.set_completer_delims(" \t\n")
    readline.set_completer(complete)
    libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")
