"""Every flag of every command line with values of every kind: it says in one line what is wrong, and exits with 2.

The model is none, so that a value that means something ends there, and nothing is loaded."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import pytest

from engines.command import Parser
from tests.runtime.command import run_main

# A command line, and what it needs to get as far as to look for its model.
COMMANDS: dict[str, list[str]] = {
    "engines.accuracy.__main__": ["-o", "out"],
    "engines.trtexec": [],
    "runtime.profile": ["--trtexec", "absent.json", "--rows", "1"],
    "tests.bench.trunk_vs_llamacpp": [],
    "tests.bench.cpu_vs_llamacpp": [],
    "runtime.generate": ["--prompt-ids", "1"],
    "runtime.chat": [],
    "runtime.serve": ["--port", "0"],
    "runtime.bench": ["--bandwidth", "1"],
    "runtime.eval": [],
    "runtime.inspect": ["--gpu", "L4"],
    "runtime.check": [],
    "engines.build": ["-o", "out"],
    "export.__main__": ["-o", "out"],
    "export.token_frequencies": ["absent.txt"],
}
# Of those that take a folder of engines, not a model: what is missing is an engine.
FOLDERS = {"engines.trtexec", "runtime.profile"}
VALUES = (
    "", "0", "-1", "1", "nan", "inf", "-inf", "1e400", "9" * 30, "-" + "9" * 30, "9" * 6000, "x", "é", "0x10", " 5",
    "1_000", "auto", ",", "1,,2", "3.5", "/", "/dev/null", ".", "1e-320", "\x1b[31m",
)  # fmt: skip


class Parsed(Exception):
    """Raised in place of parsing, with the parser."""


def arguments_of(main: Callable[[list[str]], int], monkeypatch: pytest.MonkeyPatch) -> list[argparse.Action]:
    def give(parser: Parser, *given: object) -> NoReturn:
        raise Parsed(parser)

    with monkeypatch.context() as patch, pytest.raises(Parsed) as caught:
        patch.setattr(Parser, "parse_args", give)
        main([])
    (parser,) = caught.value.args
    return [each for each in parser._actions if not isinstance(each, argparse._HelpAction)]


@pytest.mark.parametrize("name", COMMANDS)
def test_any_value(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    main = import_module(name).main
    base = ["absent.gguf", *COMMANDS[name]]
    flags = [each for each in arguments_of(main, monkeypatch) if each.option_strings]
    assert len(flags) > 3 or name.startswith(("export", "engines.trtexec"))
    missing = 4 if name in FOLDERS else 2
    run_main(main, *base).refused(missing, "absent.gguf")
    for flag in flags:
        given = flag.option_strings[-1]
        for value in VALUES if flag.nargs != 0 else ("",):
            outcome = run_main(main, *base, f"{given}={value}" if flag.nargs != 0 else given)
            assert outcome.code in (2, 6, missing), (given, value, outcome)
            outcome.refused(outcome.code)
            assert len(outcome.err) < 4000 and "\x1b" not in outcome.err, (given, value[:40])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [*COMMANDS, "engines.cache"])
def test_an_empty_path(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a shell makes of a variable that is not set: not the current folder."""
    monkeypatch.chdir(tmp_path)
    main = import_module(name).main
    paths = [each for each in arguments_of(main, monkeypatch) if each.type is Path]
    assert paths
    for each in paths:
        given = [f"{each.option_strings[-1]}="] if each.option_strings else [""]
        run_main(main, *given).refused(2, each.option_strings[-1] if each.option_strings else "", ": an empty path; ")


@pytest.mark.parametrize(
    ("name", "flags"),
    [("runtime.bench", ("--drafts", "--depths", "--prefill")), ("runtime.eval", ("--lengths",)),
     ("runtime.profile", ("--rows",)), ("runtime.generate", ("--prompt-ids",))],
)  # fmt: skip
def test_gaps_in_lists(name: str, flags: tuple[str, ...]) -> None:
    main = import_module(name).main
    for flag in flags:
        beyond = ("9" * 30,) if name == "runtime.bench" else ()
        for value in (",", "1,,2", "1,", ",1", "1, ,2", "1.5", *beyond):
            run_main(main, "absent.gguf", f"{flag}={value}").refused(2, flag)
