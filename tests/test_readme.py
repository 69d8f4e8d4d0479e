"""What README.md and docs/*.md show is what happens: commands run, links lead somewhere, flags and codes are real."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from engines.command import EXIT_HUNG_UP, EXIT_INTERRUPTED, EXIT_PIPE_CLOSED, EXIT_TERMINATED
from engines.errors import NextnError
from runtime import check, generate
from tests.documented import (
    ON_GPU,
    PAGES,
    ROOT,
    documented_commands,
    fenced,
    needs_gpu,
    variables_and_words,
)
from tests.runtime.test_generate_cli import JSON_KEYS
from tests.try_commands import PYTHON, RUN, run, try_command

README = PAGES[0].read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def prepared(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """``prepared()``: a folder of `engines.accuracy`, with what both sides gave."""

    @cache
    def make() -> Path:
        folder = tmp_path_factory.mktemp("accuracy") / "x"
        words = ["-m", "engines.accuracy", str(tiny("q4_k_m")), "-o", str(folder), "--backend", "oracle"]
        run([sys.executable, *words], folder.parent)
        return folder

    return make


@pytest.mark.parametrize("command", documented_commands())
def test_commands_run(command: str, tmp_path: Path, prepared: Callable[[], Path]) -> None:
    try_command(command, tmp_path, prepared)


def test_gpu_commands_are_those_of_the_gpu_tests() -> None:
    shown = [variables_and_words(command)[1] for command in documented_commands()]
    assert {"polygraphy --trt" if w[0] == "polygraphy" else " ".join(w[2:4]) for w in shown if needs_gpu(w)} == ON_GPU


def test_every_part_has_its_command() -> None:
    shown = {" ".join(variables_and_words(command)[1][:3]) for command in documented_commands()}
    assert {"make demo", "make test", *(f"{PYTHON} -m {module}" for module in RUN)} <= shown


def test_a_command_that_fails_is_noticed(tmp_path: Path, prepared: Callable[[], Path]) -> None:
    for wrong in (
        "make no-such-target",
        f"{PYTHON} -m no_such_module",
        f"{PYTHON} -m runtime.generate MODEL -p x --no-such-flag",
        "curl localhost",
        "python -m engines.build MODEL.gguf --no-such-flag",
        "pip install '.[no-such-extra]'",
        "cmake -S plugins -DNO_SUCH_VARIABLE=1",
        "polygraphy run --load-outputs none.json none.json",
    ):
        with pytest.raises(AssertionError):
            try_command(wrong, tmp_path, prepared)


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


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_headings(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text(encoding="utf-8"))
    inside = [(page.parent / target if target else page, anchor) for target, anchor in links if "://" not in target]
    assert [link for link in inside if link[1] not in anchors(link[0])] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_whole(page: Path) -> None:
    """Without its first two lines, as behind an empty line, GitHub shows a table as text."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = [re.sub(r"`[^`]*`", "", line).replace("\\|", "").count("|") for line in table.splitlines()]
        assert re.fullmatch(r"\|( ?-+ ?\|)+", table.splitlines()[1]) and len(set(rows)) == 1, table[:200]


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
    signals = [EXIT_HUNG_UP, EXIT_INTERRUPTED, EXIT_PIPE_CLOSED, EXIT_TERMINATED]
    assert shown == [0, check.EXIT_FAILED, *errors, *signals]
