"""`python -m runtime.chat`: on pipes, on a terminal, in this process and with a server."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime import chat
from runtime.server.security import Limits
from runtime.server.service import ServiceOptions
from tests.exported import Exported
from tests.runtime.command import Outcome, run_main
from tests.runtime.server import Running, serving
from tests.runtime.serving import WAIT_S

ROOT = Path(__file__).parents[2]
LEN = "Return the length (the number of items) of an object.\n"
Chat = Callable[..., Outcome]


@pytest.fixture(scope="module")
def talk(exported: Callable[[str], Exported]) -> Chat:
    """``talk(lines, flags...)``: a chat in this process over pipes."""

    def run(lines: str, *flags: object) -> Outcome:
        return run_main(chat.main, exported("trained").folder, "-t", 1, *flags, stdin=lines.encode())

    return run


@pytest.fixture(scope="module")
def server(exported: Callable[[str], Exported]) -> Iterator[Running]:
    with serving(exported("trained"), ServiceOptions(), Limits(api_key="abc")) as running:
        yield running


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    (tmp_path / "key").write_text("abc")
    return tmp_path / "key"


def statistics(outcome: Outcome) -> list[str]:
    return [line for line in outcome.err.splitlines() if line.startswith("[")]


def test_answers_on_stdout_and_statistics_on_stderr(talk: Chat) -> None:
    outcome = talk("What does len do?\n")
    assert (outcome.code, outcome.out) == (0, LEN)
    (line,) = statistics(outcome)
    assert re.fullmatch(
        r"\[13 tokens, [\d.]+ a second; (\d+ of \d+ drafts accepted \([01]\.\d+\); )?prompt 21 tokens and 0 kept\]",
        line,
    )


def test_drafting_changes_no_reply(talk: Chat) -> None:
    lines = "What does len do?\nAnd map?\n"
    replies = {talk(lines, *flags).out for flags in ((), ("--spec-type", "none"), ("--spec-type", "draft-mtp"))}
    replies.add(talk("/spec off\n" + lines).out)
    replies.add(talk("/spec on\n" + lines, "--cache-ram", 0).out)
    assert len(replies) == 1 and replies.pop().startswith(LEN)


def test_a_second_turn_goes_on_from_the_first(talk: Chat) -> None:
    lines = "What does len do? " * 30 + "\nAnd map?\n/undo\nAnd zip?\n"
    kept = [int(re.findall(r"(\d+) kept", line)[0]) for line in statistics(talk(lines))]
    assert kept[0] == 0 and min(kept[1:]) > 100
    cold = talk(lines, "--cache-ram", 0)
    assert all("0 kept" in line for line in statistics(cold)) and cold.out == talk(lines).out


def test_commands(talk: Chat, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    outcome = talk(
        f"/help\n/system You are brief.\nWhat does len do?\n/regenerate\n/save {file}\n/save {file}\n/clear\n/history\n"
        f"/load {file}\n/history\n/undo\n/set temp 0.5\n/set temp default\n/thinking off\n/sy\n/quit\nnot read\n"
    )
    assert outcome.code == 0, outcome.err
    first, second = outcome.out.splitlines()
    assert first == second
    saved = json.loads(file.read_text())
    assert [message["role"] for message in saved["messages"]] == ["system", "user", "assistant"]
    assert saved["messages"][2]["content"] == first
    assert outcome.err.count(f"assistant: {first}") == 1 and "taken back: What does len do?" in outcome.err
    assert "temperature 0.5  top_k default" in outcome.err and "no system message" in outcome.err
    assert all(name in outcome.err for name in ("/help ", "/regenerate ", "/quit "))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/nope", "there is no command /nope"),
        ("/s", "there is no command /s"),
        ("/set heat 1", "there is no value 'heat'"),
        ("/set temp hot", "wanted a number"),
        ("/set temp -1", "temperature"),
        ("/set max_tokens -5", "max_tokens -5"),
        ("/set temp", "wanted /set NAME VALUE"),
        ("/spec maybe", "wanted /spec on, off or auto"),
        ("/undo", "there is no message yet"),
        ("/regenerate", "there is no message yet"),
        ("/save", "a file is missing"),
        ("/save {here}/none/x", "cannot be written"),
        ("/save {here}/other", "exists already"),
        ("/load {here}/none", "cannot be read"),
        ("/load {here}/other", "is no saved chat"),
        ("/load {here}/half", "wanted a chat of messages and replies in turn"),
        ("word " * 2000, "the context holds"),
    ],
)
def test_what_goes_wrong_is_said_and_the_chat_goes_on(talk: Chat, tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "other").write_text("mine")
    (tmp_path / "half").write_text(json.dumps({"messages": [{"role": "user", "content": "x"}]}))
    outcome = talk(line.format(here=tmp_path) + "\nWhat does len do?\n", "-c", 1000)
    assert outcome.code in (2, 6) and outcome.out == LEN
    assert f"error: {message}" in outcome.err or message in outcome.err
    assert (tmp_path / "other").read_text() == "mine" and len(list(tmp_path.iterdir())) == 2


def test_wrong_use(talk: Chat, key_file: Path) -> None:
    talk("", "--url", "http://127.0.0.1:1").refused(2, "wanted MODEL, or --url")
    talk("", "--api-key-file", key_file).refused(2, "--api-key-file is for --url")
    headless = talk("/spec on\nhello\n", "--spec-type", "none")
    assert (headless.code, headless.out) == (2, "") and "runs without a draft head" in headless.err
    talk("", "--temp", -1).refused(2, "temperature")
    talk("", "-n", -2).refused(2, "max_tokens")
    run_main(chat.main).refused(2, "wanted MODEL, or --url")
    run_main(chat.main, "--url", "ftp://x").refused(2, "wanted the address of a server")
    run_main(chat.main, "--url", "http://127.0.0.1:1", "-c", 5).refused(2, "--ctx-size is the server's to set")
    run_main(chat.main, "--url", "http://127.0.0.1:1").refused(6, "no connection")


def test_a_server_says_the_same(talk: Chat, server: Running, key_file: Path) -> None:
    lines = "What does len do?\n/spec off\nAnd map?\n/set top_k 5\n/set max_tokens 3\nAnd zip?\n"
    local = talk(lines)
    flags = ("--temp", 0, "--api-key-file", key_file)
    for url in (server.url, f"{server.url}/v1/"):
        remote = run_main(chat.main, "--url", url, *flags, stdin=lines.encode())
        assert (remote.code, remote.out) == (0, local.out), remote.err
    assert len(statistics(remote)) == 3 and "cut off: no more tokens left" in statistics(remote)[2]
    run_main(chat.main, "--url", server.url).refused(2, "401", "API key")
    refused = run_main(chat.main, "--url", server.url, *flags, stdin=b"/set max_tokens 2\n" + b"word " * 30000 + b"\n")
    assert (refused.code, refused.out) == (2, "") and "400: the prompt has" in refused.err


def test_text_that_is_not_utf_8(talk: Chat, exported: Callable[[str], Exported]) -> None:
    outcome = run_main(chat.main, exported("trained").folder, "-t", 1, stdin=b"\xff\n")
    outcome.refused(2, "not UTF-8")


class Terminal:
    """A chat on a terminal of its own."""

    def __init__(self, *words: object) -> None:
        self.main, side = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT)}
        environment.pop("NO_COLOR", None)
        command = (
            "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", command, sys.executable, "-m", "runtime.chat", *map(str, words)],
            stdin=side, stdout=side, stderr=side, cwd=ROOT, env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(side)
        self.shown = ""

    def wait_for(self, text: str) -> str:
        """What was shown up to ``text``, which must come."""
        until = time.monotonic() + WAIT_S
        while text not in self.shown:
            assert time.monotonic() < until, f"{text!r} never came after {self.shown!r}"
            if select.select([self.main], [], [], 0.2)[0]:
                self.shown += os.read(self.main, 4096).decode("utf-8", "replace")
        before, _, self.shown = self.shown.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self.main, text.encode())

    def interrupt(self, text: str) -> None:
        """Press Ctrl-C until ``text`` comes: Python hears of a signal that comes just before it waits for a key only at
        the next key."""
        until = time.monotonic() + WAIT_S
        while text not in self.shown:
            assert time.monotonic() < until, f"{text!r} never came after {self.shown!r}"
            self.type("\x03")
            while text not in self.shown and select.select([self.main], [], [], 2.0)[0]:
                self.shown += os.read(self.main, 4096).decode("utf-8", "replace")
        self.wait_for(text)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.main)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def run(*words: object) -> Terminal:
        opened.append(Terminal(*words))
        return opened[-1]

    yield run
    for each in opened:
        each.close()


@pytest.mark.parametrize("where", ["here", "server"])
def test_on_a_terminal(
    terminal: Callable[..., Terminal],
    exported: Callable[[str], Exported],
    server: Running,
    key_file: Path,
    where: str,
) -> None:
    """Ctrl-C at the prompt and in a reply, line editing, Ctrl-D."""
    here = (exported("trained").folder, "-t", 1)
    shown = terminal(*(here if where == "here" else ("--url", server.url, "--api-key-file", key_file)), "--seed", 3)
    shown.wait_for("/help lists")
    shown.wait_for("> ")
    shown.type("half a li")
    shown.wait_for("half a li")
    shown.interrupt("Ctrl-D or /quit leaves")
    shown.wait_for("> ")
    shown.type("/set temp 0\rWhat does len dx\x7fo?\r")
    shown.wait_for(LEN.strip())
    shown.wait_for(" kept]")
    shown.wait_for("> ")
    shown.type("/set temp 4\rSay anything.\r")
    shown.wait_for("Say anything.")
    shown.wait_for(" ")  # of the reply, or of what comes before it
    time.sleep(0.5)
    shown.interrupt("stopped")
    shown.wait_for("> ")
    shown.type("/set temp 0\r/clear\r")
    shown.type("\x1b[A\x1b[A\x1b[A\x1b[A\x1b[A\r")  # the fifth line before: what len does
    shown.wait_for(LEN.strip())
    shown.wait_for("> ")
    shown.type("\x04")
    assert shown.process.wait(WAIT_S) == 0
    if where == "server":
        server.idle()


def test_interrupted_on_a_pipe(exported: Callable[[str], Exported]) -> None:
    words = [sys.executable, "-m", "runtime.chat", str(exported("trained").folder), "-t", "1"]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=ROOT) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write("What does len do?\n")
        process.stdin.flush()
        assert process.stdout.readline() == LEN
        process.stderr.readline()
        time.sleep(0.2)  # it waits for the next line
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130
