"""`python -m runtime.chat MODEL` or `--url SERVER`: a chat in the terminal, or on a pipe, a message a line.

Answers go to stdout, statistics and errors to stderr. Exit codes are those of `runtime.generate`; on a pipe that of the
first message or command that failed, on a terminal 0.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from engines.errors import DeviceLostError, NextnError, UsageError
from runtime.command_line import (
    EXIT_INTERRUPTED,
    Parser,
    add_model_arguments,
    add_sampling_arguments,
    add_spec_arguments,
    interrupt_flag,
    read_api_key,
    run_command,
    session_of,
)
from runtime.terminal.commands import Commands, names
from runtime.terminal.conversation import Conversation
from runtime.terminal.local import LocalModel
from runtime.terminal.model import ChatModel, Reply, Settings
from runtime.terminal.remote import RemoteModel
from runtime.terminal.screen import MOST_CHARACTERS, MessageTooLong, Screen

_MIB = 1 << 20
_SERVERS = ("ctx_size", "threads", "backend", "cache_dir", "spec_type", "spec_draft_n_max", "cache_ram")


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    settings = _settings(options)
    model = _model(options, parser)
    screen = Screen(names())
    chat = Conversation(model, settings, screen, options.system or "")
    if screen.asks:
        screen.note(f"{model.name}. /help lists the commands; Ctrl-C stops a reply, Ctrl-D leaves.")
    return _run(chat)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m runtime.chat", description="Chat with a Qwen3.5-family model.")
    add_model_arguments(parser, optional=True)
    parser.add_argument("--url", metavar="URL", help="talk to this server instead: runtime.serve or one of its kind")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="the server's key, in a file")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--thinking", choices=("auto", "on", "off"), default="auto", help="auto: the template's default"
    )
    parser.add_argument("-n", "--predict", type=int, default=-1, metavar="N", help="most tokens of a reply; -1: any")
    parser.add_argument(
        "--cache-ram", type=int, default=1024, metavar="MIB", help="for state of earlier turns (default: %(default)s)"
    )
    add_spec_arguments(parser)
    add_sampling_arguments(parser)
    # Whatever is not given stays with the model's side, which may be a server with other defaults.
    parser.set_defaults(temp=None, top_k=None, top_p=None, min_p=None, seed=None)
    return parser


def _settings(options: argparse.Namespace) -> Settings:
    """Raises UsageError."""
    settings = Settings(
        options.temp,
        options.top_k,
        options.top_p,
        options.min_p,
        None if options.seed == -1 else options.seed,
        thinking={"on": True, "off": False}.get(options.thinking),
    )
    settings.sampling().validate()
    if options.predict != -1:
        settings.set("max_tokens", str(options.predict))
    return settings


def _model(options: argparse.Namespace, parser: argparse.ArgumentParser) -> ChatModel:
    if (options.model is None) == (options.url is None):
        raise UsageError("wanted MODEL, or --url of a server")
    if options.url is None:
        if options.api_key_file:
            raise UsageError("--api-key-file is for --url")
        if options.cache_ram < 0:
            raise UsageError(f"--cache-ram {options.cache_ram}: wanted 0 or more")
        return LocalModel(session_of(options, kept_bytes=options.cache_ram * _MIB), options.cache_ram * _MIB)
    for name in _SERVERS:
        if getattr(options, name) != parser.get_default(name):
            raise UsageError(f"--{name.replace('_', '-')} is the server's to set, not with --url")
    return RemoteModel(options.url, read_api_key(options.api_key_file) if options.api_key_file else "")


def _run(chat: Conversation) -> int:
    """Until /quit or the end of the input: the exit code."""
    code = 0

    def ask(text: str) -> None:
        with interrupt_flag() as interrupted:
            reply = chat.ask(text, interrupted)
        chat.screen.note(_summary(reply))

    commands = Commands(chat, ask)
    while not commands.left:
        try:
            text = chat.screen.read()
            if text is None:
                break
            if text.strip():
                _take(text, ask, commands)
        except KeyboardInterrupt:  # at the prompt, or the second one in a reply
            if not chat.screen.asks:
                return EXIT_INTERRUPTED
            chat.screen.new_line()
            chat.screen.note("Ctrl-D or /quit leaves")
        except UnicodeDecodeError as error:
            raise UsageError(f"stdin: byte {error.start} is not UTF-8; give the text as UTF-8") from None
        except MessageTooLong:
            raise UsageError(f"stdin: a message of more than {MOST_CHARACTERS} characters") from None
        except DeviceLostError:
            raise
        except NextnError as error:
            chat.screen.note(f"error: {' '.join(str(error).split())}")
            code = code or error.exit_code
    return 0 if chat.screen.asks else code


def _take(text: str, ask: Callable[[str], None], commands: Commands) -> None:
    if text.startswith("//"):
        ask(text[1:])
    elif text.startswith("/"):
        commands.run(text)
    else:
        ask(text)


def _summary(reply: Reply) -> str:
    """The statistics of a reply in a line."""
    timings, parts = reply.timings, []
    if timings:
        parts.append(f"{timings['predicted_n']:.0f} tokens, {timings['predicted_per_second']:.1f} a second")
        if timings.get("draft_n"):
            accepted, drafted = timings["draft_n_accepted"], timings["draft_n"]
            parts.append(f"{accepted:.0f} of {drafted:.0f} drafts accepted ({accepted / drafted:.3f})")
        parts.append(f"prompt {timings['prompt_n']:.0f} tokens and {timings.get('cache_n', 0):.0f} kept")
    ends = {"length": "cut off: no more tokens left", "cancelled": "stopped"}
    if reply.finish_reason in ends:
        parts.append(ends[reply.finish_reason])
    return f"[{'; '.join(parts) or 'no statistics from this server'}]"


if __name__ == "__main__":
    run_command(main)
