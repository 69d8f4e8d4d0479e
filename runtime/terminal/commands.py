"""Lines that begin with a slash."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engines.errors import UsageError
from engines.given_files import home_path
from runtime.terminal.conversation import Conversation

_SWITCH: dict[str, bool | None] = {"on": True, "off": False, "auto": None}
HELP = """\
/help                   this list
/clear                  forget the messages; settings and the system message stay
/system [TEXT]          set the system message, or with no TEXT remove it; takes effect with the next reply
/set [NAME VALUE]       show the sampling values, or set one: temperature, top_k, top_p, min_p, seed, max_tokens;
                        VALUE "default" takes it back
/spec on|off|auto       drafting; never changes a reply
/thinking on|off|auto   whether the model is to think first, if its template knows
/regenerate             another reply to the last message (the same one unless the temperature is above 0)
/undo                   take back the last message and its reply
/history                show the messages so far
/save FILE              write the chat to FILE as JSON
/load FILE              go on with a saved chat
/quit                   leave, as Ctrl-D does
A line that ends in \\ goes on in the next; // begins a message with a slash.
Ctrl-C stops a reply and keeps the chat."""


class Commands:
    """Runs commands on a conversation. ``ask`` is called with a message that is to be answered again."""

    def __init__(self, chat: Conversation, ask: Callable[[str], None]) -> None:
        self._chat, self._ask = chat, ask
        self.left = False
        self._table: dict[str, Callable[[str], None]] = {
            "/help": lambda rest: chat.screen.note(HELP),
            "/clear": lambda rest: chat.messages.clear(),
            "/system": self._system,
            "/set": self._set,
            "/spec": lambda rest: self._switch("spec", rest),
            "/thinking": lambda rest: self._switch("thinking", rest),
            "/regenerate": self._regenerate,
            "/undo": self._undo,
            "/history": self._history,
            "/save": lambda rest: self._file(rest, chat.save, "written"),
            "/load": lambda rest: self._file(rest, chat.load, "read"),
            "/quit": self._quit,
            "/exit": self._quit,
        }

    def run(self, line: str) -> None:
        """Raises UsageError for what is no command, and what the command raises."""
        word, _, rest = line.partition(" ")
        if word not in self._table:
            near = [name for name in self._table if name.startswith(word)] if len(word) > 1 else []
            if len(near) != 1:
                raise UsageError(f"there is no command {word}; /help lists them")
            word = near[0]
        self._table[word](rest.strip())

    def _system(self, rest: str) -> None:
        self._chat.system = rest
        self._chat.screen.note("system message set" if rest else "no system message")

    def _set(self, rest: str) -> None:
        settings, words = self._chat.settings, rest.replace("=", " ").split()
        if len(words) == 2:
            settings.set(*words)
        elif words:
            raise UsageError("wanted /set NAME VALUE")
        shown = {name: "default" if value is None else value for name, value in settings.numbers.items()}
        self._chat.screen.note("  ".join(f"{name} {value}" for name, value in shown.items()))

    def _switch(self, name: str, rest: str) -> None:
        if rest not in _SWITCH:
            raise UsageError(f"wanted /{name} on, off or auto")
        setattr(self._chat.settings, name, _SWITCH[rest])
        self._chat.screen.note(f"{name} {rest}")

    def _regenerate(self, rest: str) -> None:
        before = list(self._chat.messages)
        text = self._chat.take_back()
        num_kept = len(self._chat.messages)
        try:
            self._ask(text)
        finally:
            if len(self._chat.messages) == num_kept:  # no new reply: the old one stays
                self._chat.messages[:] = before

    def _undo(self, rest: str) -> None:
        self._chat.screen.note(f"taken back: {self._chat.take_back()}")

    def _history(self, rest: str) -> None:
        for message in self._chat.all_messages():
            self._chat.screen.note(f"{message['role']}: {message['content']}")

    def _file(self, rest: str, act: Callable[[Path], None], done: str) -> None:
        if not rest:
            raise UsageError("a file is missing")
        path = home_path(Path(rest))
        act(path)
        self._chat.screen.note(f"{path} {done}: {len(self._chat.messages)} messages")

    def _quit(self, rest: str) -> None:
        self.left = True


def names() -> list[str]:
    return [line.split()[0] for line in HELP.splitlines() if line.startswith("/")]
