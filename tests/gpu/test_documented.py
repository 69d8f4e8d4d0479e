"""The commands that README.md and docs show for a machine with a GPU run there."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.documented import POLYGRAPHY, documented_commands, needs_gpu, variables_and_words
from tests.gpu.test_tools import compared, run

pytestmark = [pytest.mark.gpu, pytest.mark.trt]
QUICK = {
    "runtime.generate": "-n 8",
    "runtime.bench": "-n 4 --repeats 1 --depths 0 --prefill 16",
    "runtime.profile": "--repeats 3",
}
# But for those of a model that takes minutes to write; tests/bench/test_synthetic.py has a small one.
COMMANDS = [
    command
    for command in documented_commands()
    if needs_gpu(variables_and_words(command)[1]) and "--expect" not in command.split()
]


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str, prepared: Path, tmp_path: Path) -> None:
    variables, words = variables_and_words(command)
    if words[0] == "polygraphy":
        folder = compared(prepared, tmp_path / "x")
        words = [f"{folder}{word.removeprefix('DIR')}" if word.startswith("DIR") else word for word in words]
        run("-c", POLYGRAPHY, *words[1:], **variables)
        return
    module = words[2]
    files = {name: str(tmp_path / name) for name in ("bench.json", "bench.png", "profile.json", "profile.png")}
    given = [files.get(word, str(prepared / "trained") if word == "DIR" else word) for word in words[3:]]
    given = [word for word in given if word != "--fill"]  # minutes
    run("-m", module, *given, *shlex.split(QUICK[module]))
