"""What README.md and docs/*.md show is what happens: commands run, links lead somewhere, flags and codes are real."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from engines.command import EXIT_INTERRUPTED, EXIT_PIPE_CLOSED, EXIT_TERMINATED
from engines.errors import NextnError
from export.exporter import export_model
from runtime import check, generate
from tests.documented import (
    ON_GPU,
    PAGES,
    POLYGRAPHY,
    ROOT,
    documented_commands,
    fenced,
    needs_gpu,
    variables_and_words,
)
from tests.runtime.test_eval import fake_server
from tests.runtime.test_generate_cli import JSON_KEYS
from tests.runtime.test_profile import engines_and_profile
from tests.vocabulary_files import TRAINED_MODEL

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
    "engines.accuracy": "--backend oracle",
    "runtime.profile": "",
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


def run(command: list[str], folder: Path, expect: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run in the repository root with a cache of its own; asserts that it goes well."""
    env = {name: value for name, value in os.environ.items() if name not in MAKE_VARIABLES}
    env |= {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT), **variables}
    ran = subprocess.run(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert ran.returncode == expect, f"{shlex.join(command)}: exit code {ran.returncode}\n{ran.stderr}"
    return ran


def try_command(command: str, folder: Path, prepared: Callable[[], Path]) -> None:
    """prepared: makes the folder that the commands of docs/accuracy.md go on with."""
    variables, words = variables_and_words(command)
    if needs_gpu(words):
        return
    if words[0] == "make":
        run(["make", "--dry-run", *words[1:]], folder, **variables)
    elif words[0] == "pip":
        try_pip(words)
    elif words[0] == "llama-server":  # another project's; tests/runtime/test_eval.py runs it where it is installed
        assert words[1] == "-m"
    elif words[0] == "cmake":
        names = re.findall(r"-D(\w+)=", command)
        assert all(name in (ROOT / "plugins/CMakeLists.txt").read_text() for name in names)
    elif words[0] == "polygraphy":
        run([sys.executable, "-c", POLYGRAPHY, *in_place(words[1:], folder, prepared)], folder, **variables)
    elif words[0] == "source" or words[0].endswith(".sh"):
        script = next(iter(ROOT.glob(f"tests/gpu/{Path(words[words[0] == 'source']).name}")))
        run(["bash", "-n", str(script)], folder)
    else:
        assert words[0] in (PYTHON, "python", "python3") and words[1] == "-m", (
            f"{command}: say in this test how to try such a command"
        )
        try_module(words[2], words[3:], folder, prepared)


def try_module(module: str, words: list[str], folder: Path, prepared: Callable[[], Path]) -> None:
    assert importlib.util.find_spec(module), module
    if module == "runtime.profile":  # of a profile that trtexec has exported
        made, names = engines_and_profile(folder), [word for word in words if word.endswith(".json")]
        words = [str(made / word.split(".", 3)[-1]) if word in names else word for word in words]
        words = [str(made) if word == "DIR" else word for word in words]
    if module == "runtime.eval" and "--server" in words:
        with fake_server() as server:
            for index, word in enumerate(words):
                words[index] = server.url if word.startswith("http://") else word
            given = in_place(words, folder, None)
            run([sys.executable, "-m", module, *given, *shlex.split(RUN[module])], folder)
        return
    if module in ("runtime.check", "runtime.inspect") and "DIR" in words:
        export_model(TRAINED_MODEL, folder / "out")
    if module in RUN:
        given = in_place(words, folder, prepared if module == "engines.accuracy" and "-o" not in words else None)
        run([sys.executable, "-m", module, *given, *shlex.split(RUN[module])], folder)
    elif module == "pytest":
        assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))
    elif module.split(".")[0] in ("engines", "tests", "runtime"):
        shown = run([sys.executable, "-m", module, "--help"], folder).stdout
        known = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", shown))
        assert {word for word in words if re.match(r"--?[a-z]", word)} <= known


def in_place(words: list[str], folder: Path, prepared: Callable[[], Path] | None) -> list[str]:
    """Words of a command with real files for what they stand for."""
    places = {"MODEL": str(TRAINED_MODEL), "MODEL.gguf": str(TRAINED_MODEL), "DIR": str(folder / "out")}
    places |= {name: str(folder / name) for name in ("report.json", "texts.csv", "report.html", "profile.png")}
    if prepared is not None and any(word == "DIR" or word.startswith("DIR/") for word in words):
        places["DIR"] = str(prepared())
    words = [places.get(word, word) for word in words]
    return [places["DIR"] + word.removeprefix("DIR") if word.startswith("DIR/") else word for word in words]


def try_pip(words: list[str]) -> None:
    what = words[2]
    extras = re.findall(r"\[([\w,-]+)\]", what)
    known = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    assert words[1] == "install" and set(",".join(extras).split(",")) - {""} <= known, words
    for name in re.findall(r"cmake\.define\.(\w+)", shlex.join(words)):
        assert name in (ROOT / "plugins/CMakeLists.txt").read_text()


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
    assert shown == [0, check.EXIT_FAILED, *errors, EXIT_INTERRUPTED, EXIT_PIPE_CLOSED, EXIT_TERMINATED]
