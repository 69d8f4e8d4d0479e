"""What a model file calls itself and its parts is shown on a terminal, not obeyed by it."""

from __future__ import annotations

import ast
import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

import export.__main__
from engines import cache
from engines.command import say
from engines.errors import printable
from engines.manifest import MANIFEST_NAME, load_manifest
from engines.sealed_json import write_sealed
from runtime import generate, inspect
from tests.known_text import RingText, ring_model
from tests.runtime.command import run_main
from tests.tiny_gguf import Spec, TinyModel, build

ROOT = Path(__file__).parents[1]
# Generated text goes through runtime.terminal.screen.without_controls where it goes to a terminal.
OWN_PRINTS = {"engines/command.py", "runtime/generate.py", "runtime/terminal/screen.py", "plugins/load.py"}
EVIL = "\x1b[2J\x1b]0;owned\x07\r\nerror: all is well\u202e"


def evil_model(key: str = "general.name") -> TinyModel:
    model = build(Spec())
    model.metadata["general.name"] = EVIL
    model.metadata[key] = EVIL
    return model


def test_names_are_not_obeyed(tmp_path: Path) -> None:
    model = evil_model(f"qwen35.{EVIL}").write(tmp_path / "evil.gguf")
    runs = [
        run_main(export.__main__.main, model, "-o", tmp_path / "x"),
        run_main(inspect.main, model, "--gpu", "L4"),
        run_main(generate.main, tmp_path / "x", "--prompt-ids", "4", "-n", 1, "--spec-type", "draft-mtp", "-c", 9999),
        run_main(generate.main, model, "--cache-dir", tmp_path / "cache", "--prompt-ids", "4", "-n", 1, "--json"),
    ]
    assert [run.code for run in runs] == [0, 0, 2, 0], runs
    for run in runs:
        assert not any(control in run.out + run.err for control in "\x1b\x07\r\u202e"), run
    assert "owned" in load_manifest(tmp_path / "x").model_name


@pytest.mark.parametrize("key", ["qwen35.block_count", "general.architecture", "qwen35.rope.scaling.type"])
def test_nor_in_errors(tmp_path: Path, key: str) -> None:
    model = evil_model()
    model.metadata[key] = EVIL
    run = run_main(export.__main__.main, model.write(tmp_path / "evil.gguf"), "-o", tmp_path / "x")
    run.refused(3, "evil.gguf")
    assert not any(control in run.err for control in "\x1b\x07\r\u202e"), run


def test_nor_in_the_list_of_the_cache(tmp_path: Path) -> None:
    """Names that are put into a manifest after its export, which wrote them so that nobody obeys them."""
    model = evil_model().write(tmp_path / "evil.gguf")
    run_main(generate.main, model, "--cache-dir", tmp_path / "cache", "--prompt-ids", "4", "-n", 1)
    (folder,) = (tmp_path / "cache").iterdir()
    raw = (folder / MANIFEST_NAME).read_text()
    write_sealed(folder / MANIFEST_NAME, json.loads(raw.replace("owned", "\\u001b[2J owned")))
    run = run_main(cache.main, "--cache-dir", tmp_path / "cache")
    assert run.code == 0 and "owned" in run.out and "\x1b" not in run.out, run


def test_nor_in_names_of_folders(tmp_path: Path) -> None:
    model, folder = build(Spec()).write(tmp_path / "m\x1b[2J.gguf"), tmp_path / "x\x1b]0;owned\x07"
    for run in (
        run_main(export.__main__.main, model, "-o", folder),
        run_main(inspect.main, model, "--gpu", "L4"),
        run_main(cache.main, "--cache-dir", tmp_path / "c\x1b[2J"),
    ):
        assert run.code == 0 and not any(control in run.out + run.err for control in "\x1b\x07\r"), run


def test_what_is_printed_goes_through_one_place() -> None:
    for path in (each for name in ("export", "engines", "runtime", "plugins") for each in (ROOT / name).rglob("*.py")):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        prints = [node for node in calls if isinstance(node.func, ast.Name) and node.func.id == "print"]
        assert not prints or str(path.relative_to(ROOT)) in OWN_PRINTS, path


def test_lines_stay_lines_and_whole() -> None:
    out = io.StringIO()
    say("one\ntwo\t\x1b[31m\n" + "x" * 5000, to=out)
    assert out.getvalue() == "one\ntwo \\x1b[31m\n" + "x" * 5000 + "\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("out", [Terminal, io.StringIO])
def test_generated_text(tmp_path: Path, out: Callable[[], io.StringIO]) -> None:
    """On a pipe it is as it is; a terminal must not obey it."""
    model = ring_model(RingText((0x1B, 0x9B) * 8 + (0x07,))).write(tmp_path / "m.gguf")
    with contextlib.redirect_stdout(out()) as stdout:
        generate.main([str(model), "--cache-dir", str(tmp_path / "cache"), "--prompt-ids", "116", "--raw", "-n", "3"])
    obeyed = any(control in stdout.getvalue() for control in "\x1b\x9b\x07")
    assert stdout.getvalue() and obeyed != stdout.isatty()


def test_long_names_keep_both_ends() -> None:
    text = printable("a" * 5000 + "b" * 5000)
    assert len(text) < 2100 and text.startswith("aaa") and text.endswith("bbb")
    assert printable("é \t\n\x00") == "é   \\x00"
