"""The commands that README.md and docs/*.md show: a line of a fenced block of sh, or of an indented block, each."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# What the command `polygraphy` runs, wherever it was installed.
POLYGRAPHY = "import sys; from polygraphy.tools import main; sys.exit(main())"
# Shown for a machine with a GPU; `tests/gpu/test_documented.py` runs them there.
ON_GPU = {"runtime.generate DIR", "runtime.bench DIR", "runtime.profile DIR", "polygraphy --trt"}
_ASSIGNMENT = re.compile(r"[A-Z_]+=.*")


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def indented(text: str) -> list[str]:
    """The lines of indented blocks, outside fences and lists."""
    without = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    blocks = re.findall(r"(?:^|\n\n)((?:    \S.*\n)+)", without)
    return [line for block in blocks for line in block.splitlines()]


def documented_commands() -> list[str]:
    """All, comments left out, ``&&`` apart, in the order of the pages."""
    lines: list[str] = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        lines += [line for block in fenced(text, "sh") for line in block.replace("\\\n", " ").splitlines()]
        lines += indented(text)
    found = []
    for line in lines:
        words = shlex.split(line, comments=True)
        while "&&" in words:
            found.append(words[: words.index("&&")])
            words = words[words.index("&&") + 1 :]
        found.append(words)
    return list(dict.fromkeys(shlex.join(words) for words in found if words))


def variables_and_words(command: str) -> tuple[dict[str, str], list[str]]:
    """``NAME=value`` before a command, and the command."""
    words, variables = shlex.split(command), {}
    while words and _ASSIGNMENT.fullmatch(words[0]):
        name, value = words.pop(0).split("=", 1)
        variables[name] = value
    return variables, words


def needs_gpu(words: list[str]) -> bool:
    """Whether a command is one of ON_GPU."""
    if words[0] == "polygraphy":
        return "--trt" in words
    return words[0].endswith(("python", "python3")) and " ".join(words[2:4]) in ON_GPU and "--trtexec" not in words
