"""Commands that README.md and docs/*.md show, run with real files for what they name and with quicker flags."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from engines.description import describe
from export.exporter import export_model
from tests.documented import POLYGRAPHY, ROOT, needs_gpu, variables_and_words
from tests.runtime.test_eval_servers import fake_server
from tests.runtime.test_profile import engines_and_profile
from tests.vocabulary_files import TRAINED_MODEL

PYTHON = ".venv/bin/python"
# Commands that are run, with flags that make them quick. Of other modules the flags are looked up, see `try_command`.
RUN = {
    "runtime.generate": "-n 8",
    "runtime.check": "--n-prompts 1 -n 8",
    "runtime.inspect": "",
    "runtime.eval": "--per-category 1 -n 4 --temps 0",
    "runtime.bench": "-n 4 --repeats 1 --depths 0 --prefill 16 --spec-draft-n-max 1",
    "export": "",
    "engines.accuracy": "--backend oracle --tokens 12",
    "runtime.profile": "",
    "runtime.chat": "",  # nothing is typed
    "runtime.serve": "",
    "engines.trtexec": "",
}
# Of TensorRT, where it and the plugins are.
BUILD = {"engines.build": "--max-draft 3 --context 256"}
LIBRARY = ROOT / "build/plugins/libnextn_plugins.so"
# Of llama.cpp, where it is installed.
PEER = {"tests.bench.trunk_vs_llamacpp": "--texts 1 --tokens 8"}
_tried: set[str] = set()
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
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env |= {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": path, **variables}
    ran = subprocess.run(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert ran.returncode == expect, f"{shlex.join(command)}: exit code {ran.returncode}\n{ran.stderr}"
    return ran


def try_command(command: str, folder: Path, prepared: Callable[[], Path]) -> None:
    """prepared: makes the folder that the commands of docs/accuracy.md go on with."""
    variables, words = variables_and_words(command)
    if needs_gpu(words):
        return
    if words[0] == "make":
        shown = run(["make", "--dry-run", *words[1:]], folder, **variables).stdout.replace("\\\n", " ")
        try_lines_of_make(shown.splitlines(), folder, prepared)
    elif words[0] == "pip":
        try_pip(words)
    elif words[0] == "llama-server":  # another project's; test_eval_servers.py runs it where it is installed
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


def try_lines_of_make(lines: list[str], folder: Path, prepared: Callable[[], Path]) -> None:
    """What a target runs of this project; profiles need the GPU. Targets that come to the same are tried once."""
    for line in filter(str.strip, lines):
        python, *words = shlex.split(line)
        if python != PYTHON or words[0] != "-m" or words[1] not in {*RUN, *PEER, *BUILD} - {"runtime.profile"}:
            continue
        words = [re.sub("^engines/built/.*", "DIR", word) for word in words]
        words = ["MODEL.gguf" if word.endswith(".gguf") else word for word in words]
        known = shlex.join(re.sub("^build/accuracy-.*", "build/accuracy", word) for word in words)
        if known not in _tried:
            _tried.add(known)
            try_module(words[1], words[2:], folder, prepared)


def try_module(module: str, words: list[str], folder: Path, prepared: Callable[[], Path]) -> None:
    assert importlib.util.find_spec(module), module
    if module == "runtime.profile":  # of a profile that trtexec has exported
        made, names = engines_and_profile(folder), [word for word in words if word.endswith(".json")]
        words = [str(made / word.split(".", 3)[-1]) if word in names else word for word in words]
        words = [str(made) if word == "DIR" else word for word in words]
    if any(word.startswith("http://") for word in words):
        with fake_server() as server:
            given = in_place([server.url if word.startswith("http://") else word for word in words], folder, None)
            run([sys.executable, "-m", module, *given, *shlex.split(RUN[module])], folder)
        return
    if module in ("runtime.check", "runtime.inspect") and "DIR" in words:
        export_model(TRAINED_MODEL, folder / "out")
    if module == "engines.trtexec":
        (folder / "out").mkdir(exist_ok=True)
        engines = describe(TRAINED_MODEL).engines["f16"]
        options = replace(engines.options, embed_weights=True)
        replace(engines, options=options, tensorrt="tensorrt_rtx").save(folder / "out")
        (folder / "lib.so").touch()
        words = [*words, "--plugins", str(folder / "lib.so")]
    if module == "runtime.serve":
        serve_until_told(words, folder)
        return
    if module in PEER:
        if importlib.util.find_spec("llama_cpp_py_sync"):
            (folder / "text.txt").write_text("Return the length of an object.", encoding="utf-8")
            run([sys.executable, "-m", module, *in_place(words, folder, None), *shlex.split(PEER[module])], folder)
        return
    if module in BUILD and importlib.util.find_spec("tensorrt_rtx") and LIBRARY.is_file():
        run([sys.executable, "-m", module, *in_place(words, folder, None), *shlex.split(BUILD[module])], folder)
        return
    if module in RUN:
        given = in_place(words, folder, prepared if module == "engines.accuracy" and "-o" not in words else None)
        run([sys.executable, "-m", module, *given, *shlex.split(RUN[module])], folder)
    elif module == "pytest":
        assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))
    elif module.split(".")[0] in ("engines", "tests", "runtime"):
        shown = run([sys.executable, "-m", module, "--help"], folder).stdout
        known = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", shown))
        assert {word for word in words if re.match(r"--?[a-z]", word)} <= known


def serve_until_told(words: list[str], folder: Path) -> None:
    """On any free port, until it listens."""
    port = words.index("--port") if "--port" in words else len(words)
    words = [*words[:port], "--port", "0", *words[port + 2 :]]
    env = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, "-m", "runtime.serve", *in_place(words, folder, None)]
    with subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        lines = []
        for line in server.stderr:
            lines.append(line)
            if line.startswith("listening on http://"):
                server.terminate()
        assert any(line.startswith("listening on http://") for line in lines), lines


def in_place(words: list[str], folder: Path, prepared: Callable[[], Path] | None) -> list[str]:
    """Words of a command with real files for what they stand for."""
    places = {"MODEL": str(TRAINED_MODEL), "MODEL.gguf": str(TRAINED_MODEL), "DIR": str(folder / "out")}
    places |= {"model.gguf": str(TRAINED_MODEL), "text.txt": str(folder / "text.txt")}
    places |= {name: str(folder / name) for name in ("report.json", "texts.csv", "report.html", "profile.png")}
    if prepared is not None and any(word == "DIR" or word.startswith("DIR/") for word in words):
        places["DIR"] = str(prepared())
    words = [places.get(word, word) for word in words]
    words = [str(folder / word.removeprefix("build/")) if word.startswith("build/") else word for word in words]
    return [places["DIR"] + word.removeprefix("DIR") if word.startswith("DIR/") else word for word in words]


def try_pip(words: list[str]) -> None:
    what = words[2]
    extras = re.findall(r"\[([\w,-]+)\]", what)
    known = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    assert words[1] == "install" and set(",".join(extras).split(",")) - {""} <= known, words
    for name in re.findall(r"cmake\.define\.(\w+)", shlex.join(words)):
        assert name in (ROOT / "plugins/CMakeLists.txt").read_text()
