"""`python -m runtime.generate MODEL`: arguments, wiring, streaming print.

Exit codes: 0 done; 2 wrong use, 3 bad model file, 4 engine, 5 not a finite number, 6 out of memory or disk, each with
one line on stderr; 130 ended by Ctrl-C, after the text so far; 141 the reader of stdout went away.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from engines.errors import UsageError
from engines.given_files import given_text
from runtime.chat_template import ChatTemplate
from runtime.command_line import (
    EXIT_INTERRUPTED,
    Parser,
    add_model_arguments,
    add_sampling_arguments,
    add_spec_arguments,
    interrupt_flag,
    run_command,
    sampling_params,
    say,
    session_of,
)
from runtime.sampling import SamplingParams
from runtime.session import Session, check_prompt_ids, token_id
from runtime.speculative import MAX_TOKENS_UNLIMITED, SpecStats, token_budget
from runtime.terminal.screen import without_controls
from runtime.tokenizer import StreamDecoder


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    params = sampling_params(options)
    text, ids = _given_prompt(options)
    if options.predict < MAX_TOKENS_UNLIMITED:
        raise UsageError(f"--predict {options.predict}: wanted a number of tokens, or -1 until the context is full")
    session = session_of(options)
    prompt = ids if text is None else _encode(session, text, options)
    check_prompt_ids(prompt, session.manifest)
    token_budget(len(prompt), options.predict, session.context_size)
    return _generate(session, prompt, params, options)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m runtime.generate", description="Generate text with a Qwen3.5-family model.")
    add_model_arguments(parser)
    group = parser.add_argument_group("prompt (one of them; stdin if none)")
    source = group.add_mutually_exclusive_group()
    source.add_argument("-p", "--prompt", metavar="TEXT", help="the text itself")
    source.add_argument(
        "-f", "--file", type=Path, metavar="FILE", help="UTF-8 text; one line end at its end is left out"
    )
    source.add_argument("--prompt-ids", metavar="1,2,3", help="token ids, taken as they are")
    mode = group.add_mutually_exclusive_group()
    mode.add_argument(
        "--chat", action="store_true", help="put text into the model's chat template (default if it has one)"
    )
    mode.add_argument("--raw", action="store_true", help="continue the text as it is")
    group.add_argument("--system", metavar="TEXT", help="system message of the chat")
    group.add_argument(
        "-n",
        "--predict",
        type=int,
        default=MAX_TOKENS_UNLIMITED,
        metavar="N",
        help="most tokens to generate; 0: only read the prompt, -1: until the context is full (default)",
    )
    add_spec_arguments(parser)
    add_sampling_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of the text")
    return parser


def _given_prompt(options: argparse.Namespace) -> tuple[str | None, list[int]]:
    """(text, []) or (None, ids), read before the model is loaded. Raises UsageError for an empty or unreadable one."""
    if options.prompt_ids is not None:
        if options.chat or options.system is not None:
            raise UsageError("--prompt-ids are taken as they are: --chat and --system need a prompt of text")
        return None, _ids(options.prompt_ids)
    if options.system is not None:
        options.system = _argument_text("--system", options.system)
    text = _read_text(options.file) if options.prompt is None else _argument_text("--prompt", options.prompt)
    if not text:
        raise UsageError("the prompt is empty; give some text with -p, -f or on stdin")
    return text, []


def _ids(text: str) -> list[int]:
    """Those that --prompt-ids gives, with commas or white space between them."""
    given = text.strip()
    if not given.strip(","):
        raise UsageError("--prompt-ids: the prompt is empty; give at least one token id")
    ids = []
    for place, part in enumerate(re.split(r"\s*,\s*|\s+", given)):
        token = token_id(part)
        if token is None:
            raise UsageError(
                f"--prompt-ids: token {place} of the prompt is {part[:40]!r}; wanted plain decimal digits, as in 1,2,3"
            )
        ids.append(token)
    return ids


def _argument_text(flag: str, value: str) -> str:
    """The argument as UTF-8, which the interpreter has not decoded so where the locale is another."""
    try:
        return os.fsencode(value).decode("utf-8")
    except UnicodeError:
        raise UsageError(f"{flag}: the text is not UTF-8; give it as UTF-8, or with -f") from None


def _read_text(path: Path | None) -> str:
    """The file, or stdin, without one line end at its end."""
    if path is None and sys.stdin.isatty():
        raise UsageError("no prompt; give one with -p, -f, --prompt-ids or on stdin")
    text = given_text("--file", path, "give some text")
    return text.removesuffix("\n").removesuffix("\r")


def _encode(session: Session, text: str, options: argparse.Namespace) -> list[int]:
    """Token ids of the prompt text, put into the chat template unless that is not wanted."""
    chat = options.chat or (session.manifest.tokenizer.has_chat_template and not options.raw)
    if not chat:
        if options.system is not None:
            raise UsageError("--system needs the chat template; leave out --raw, or the model has none")
        return session.tokenizer.encode(text, most=session.context_size)
    messages = [] if options.system is None else [{"role": "system", "content": options.system}]
    messages.append({"role": "user", "content": text})
    rendered = ChatTemplate(session.folder, session.tokenizer).render(messages)
    return session.tokenizer.encode(rendered, most=session.context_size)


def _generate(session: Session, prompt: list[int], params: SamplingParams, options: argparse.Namespace) -> int:
    stats, decoder = SpecStats(), StreamDecoder(session.tokenizer)
    tokens: list[int] = []
    chunks: list[str] = []
    shows = sys.stdout.isatty()

    def put(chunk: str) -> None:
        chunks.append(chunk)
        if not options.json:
            print(without_controls(chunk) if shows else chunk, end="", flush=True)

    with interrupt_flag() as interrupted:
        for token in session.generate(prompt, params, max_tokens=options.predict, stats=stats, cancelled=interrupted):
            tokens.append(token)
            put(decoder.push(token))
    put(decoder.finish())
    text = "".join(chunks)
    if options.json:
        say(json.dumps(_result(session, prompt, tokens, text, stats, params)))
    elif shows:
        print()
    say("\n" + _summary(stats, params), to=sys.stderr)
    return EXIT_INTERRUPTED if stats.finish_reason == "cancelled" else 0


def _result(
    session: Session, prompt: list[int], tokens: list[int], text: str, stats: SpecStats, params: SamplingParams
) -> dict[str, Any]:
    return {
        "text": text,
        "tokens": tokens,
        "prompt_tokens": prompt,
        "finish_reason": stats.finish_reason,
        "backend": session.backend,
        "spec_type": session.spec_type,
        "seed": params.seed,
        "timings": stats.timings(),
    }


def _summary(stats: SpecStats, params: SamplingParams) -> str:
    """The statistics as a few lines for people."""
    lines = [
        f"prompt: {stats.prompt_n} tokens in {stats.prompt_ms:.0f} ms",
        f"text:   {stats.predicted_n} tokens in {stats.predicted_ms:.0f} ms, {stats.predicted_per_second:.1f} a second"
        f" ({stats.finish_reason})",
    ]
    if stats.draft_n:
        by_place = " ".join(f"{a / n:.2f}" for a, n in zip(stats.accepted, stats.offered, strict=True))
        lines.append(
            f"drafts: {stats.draft_n_accepted} of {stats.draft_n} accepted ({stats.acceptance_rate:.3f}; by place"
            f" {by_place}), {stats.tokens_per_step:.2f} tokens per pass"
        )
    if params.temperature > 0:
        lines.append(f"seed:   {params.seed}")
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
