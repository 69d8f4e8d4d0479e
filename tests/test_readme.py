"""What README.md and docs/*.md show is what happens: commands run, links lead somewhere, flags and codes are real."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from engines.errors import NextnError
from runtime import check, generate
from runtime.command_line import EXIT_INTERRUPTED, EXIT_PIPE_CLOSED
from tests.runtime.test_generate_cli import JSON_KEYS
from tests.vocabulary_files import TRAINED_MODEL

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README = PAGES[0].read_text(encoding="utf-8")
PYTHON = ".venv/bin/python"
# Commands that are run, with flags that make them quick. Of other modules the flags are looked up, see `try_command`.
RUN = {
    "runtime.generate": "-n 8",
    "runtime.check": "--n-prompts 1 -n 8",
    "runtime.inspect": "",
    "runtime.eval": "--per-category 1 -n 4 --temps 0",
    "runtime.bench": "-n 4 --repeats 1 --depths 0 --prefill 16 --spec-draft-n-max 1",
    "export": "",
}
# What `make test` hands down, and what the Makefile takes from the environment.
MAKE_VARIABLES = {
    "MAKEFLAGS",
    "MAKELEVEL",
    "MFLAGS",
    "MAKEOVERRIDES",
    "PYTHON",
    "VENV",
    "MODEL",
    "PROMPT",
    "OUT",
    "DRAFT_HEAD",
}


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """One entry per line of the fenced sh blocks, its comment left out."""
    lines = [line for page in PAGES for block in fenced(page.read_text("utf-8"), "sh") for line in block.splitlines()]
    return [shlex.join(words) for line in lines if (words := shlex.split(line, comments=True))]


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run in the repository root with a cache of its own; asserts that it goes well."""
    env = {name: value for name, value in os.environ.items() if name not in MAKE_VARIABLES}
    env["XDG_CACHE_HOME"] = str(folder / "cache")
    ran = subprocess.run(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert ran.returncode == 0, f"{shlex.join(command)}: exit code {ran.returncode}\n{ran.stderr}"
    return ran


def try_command(words: list[str], folder: Path) -> None:
    if words[0] == "make":
        run(["make", "--dry-run", *words[1:]], folder)
        return
    assert words[:2] == [PYTHON, "-m"], f"{shlex.join(words)}: say in this test how to try such a command"
    module = words[2]
    assert importlib.util.find_spec(module), module
    if module in RUN:
        places = {"MODEL": str(TRAINED_MODEL), "MODEL.gguf": str(TRAINED_MODEL), "DIR": str(folder / "out")}
        places |= {name: str(folder / name) for name in ("report.json", "texts.csv", "report.html")}
        given = [places.get(word, word) for word in words[3:]]
        run([sys.executable, "-m", module, *given, *shlex.split(RUN[module])], folder)
    elif module.split(".")[0] == "engines" or module in ("runtime.chat", "runtime.serve", "runtime.serve_ray"):
        known = set(re.findall(r"(?<!\S)--?[a-z][a-z-]*", run([sys.executable, "-m", module, "--help"], folder).stdout))
        assert {word for word in words[3:] if word.startswith("-")} <= known


@pytest.mark.parametrize("command", commands())
def test_commands_run(command: str, tmp_path: Path) -> None:
    try_command(shlex.split(command), tmp_path)


def test_every_part_has_its_command() -> None:
    shown = {" ".join(shlex.split(command)[:3]) for command in commands()}
    assert {"make demo", "make test", *(f"{PYTHON} -m {module}" for module in RUN)} <= shown


def test_a_command_that_fails_is_noticed(tmp_path: Path) -> None:
    for wrong in (
        "make no-such-target",
        f"{PYTHON} -m no_such_module",
        f"{PYTHON} -m runtime.generate MODEL -p x --no-such-flag",
        "curl localhost",
    ):
        with pytest.raises(AssertionError):
            try_command(shlex.split(wrong), tmp_path)


def test_the_demo_prints_what_is_shown(tmp_path: Path) -> None:
    (shown,) = fenced(README, "text")
    last_line = run(["make", "--dry-run", "demo"], tmp_path).stdout.splitlines()[-1]
    python, *words = shlex.split(last_line)
    assert python == PYTHON
    ran = run([sys.executable, *words], tmp_path)
    text, statistics = shown.strip().split("\n\n")
    assert ran.stdout.split() == text.split()
    assert [steady(line) for line in ran.stderr.strip().splitlines()] == [steady(s) for s in statistics.splitlines()]


def steady(line: str) -> str:
    """A line of statistics without what depends on the clock: times, and with them how many drafts pay."""
    if line.startswith("drafts:"):
        return re.sub(r"#( #)+", "#", re.sub(r"[\d.]+", "#", line))
    return re.sub(r"\d+ ms|[\d.]+ a second", "#", line)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = [target for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []
    modules = re.findall(r"`python -m ([\w.]+)", text)
    assert [module for module in modules if not importlib.util.find_spec(module)] == []
    paths = re.findall(r"`((?:export|runtime|engines|plugins|tests|docs)/[\w./-]*)`", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []


def flag_rows() -> list[tuple[list[str], str, str]]:
    """(flags, meaning, default) of every row of the table of flags."""
    (table,) = re.findall(r"^\| flag of `runtime.generate` .*\n\|[-|]+\n((?:\|.*\n)+)", README, re.MULTILINE)
    rows = [re.split(r"(?<!\\)\|", line.strip().strip("|")) for line in table.splitlines()]
    return [(re.findall(r"(?<=`)--?[a-z][a-z-]*", flags), meaning, default.strip()) for flags, meaning, default in rows]


def parser_actions() -> dict[str, argparse.Action]:
    actions = dict(generate._parser()._option_string_actions)
    return {flag: action for flag, action in actions.items() if flag not in ("-h", "--help")}


def has_default(action: argparse.Action) -> bool:
    return action.default is not None and action.default is not False


def test_the_table_has_every_flag_once() -> None:
    shown = [flag for flags, _, _ in flag_rows() for flag in flags]
    assert sorted(shown) == sorted(parser_actions())


def test_the_table_has_the_real_defaults_and_choices() -> None:
    actions = parser_actions()
    num_checked = 0
    for flags, _, default in flag_rows():
        row = list(dict.fromkeys(actions[flag] for flag in flags))
        values = [action.default for action in row if has_default(action)]
        if not values:
            continue
        shown = default.split(", ")
        assert [float(s) if isinstance(v, (int, float)) else s for s, v in zip(shown, values, strict=True)] == values
        num_checked += len(values)
        for action in row:
            assert not action.choices or "\\|".join(action.choices) in README
    assert num_checked == sum(has_default(action) for action in set(actions.values()))


def test_the_keys_of_json_are_the_real_ones() -> None:
    (meaning,) = [meaning for flags, meaning, _ in flag_rows() if flags == ["--json"]]
    assert set(re.findall(r"`(\w+)`", meaning)) == JSON_KEYS


def test_exit_codes_are_the_real_ones() -> None:
    (sentence,) = re.findall(r"Exit codes: (.*?)\. ", README.replace("\n", " "))
    shown = [int(code) for code in re.findall(r"(?:^|, )(\d+) ", sentence)]
    errors = [error.exit_code for error in NextnError.__subclasses__()]
    assert shown == [0, check.EXIT_FAILED, *errors, EXIT_INTERRUPTED, EXIT_PIPE_CLOSED]
