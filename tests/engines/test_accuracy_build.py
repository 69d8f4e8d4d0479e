"""What Polygraphy builds from a prepared folder's script, and engines for the SDK's own tool. Needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engines import build, trtexec
from engines.accuracy import compare
from engines.accuracy.inputs import DEFAULT_TEXT
from engines.accuracy.plan import Plan, load_plan
from tests.documented import POLYGRAPHY, ROOT, variables_and_words

pytestmark = pytest.mark.trt
Tiny = Callable[[str], Path]


@pytest.mark.parametrize("lowering", ["ops", "layers"])
def test_polygraphy_builds_the_marked_engine(tiny: Tiny, tmp_path: Path, lowering: str) -> None:
    """By the very flags that `--commands` prints, as `polygraphy convert` instead of run."""
    from engines.accuracy.commands import commands, use_rtx_switch

    use_rtx_switch()
    folder = tmp_path / "x"
    compare.prepare(tiny("q4_k_m"), folder, Plan(12, 3, lowering, "f16"), DEFAULT_TEXT)
    variables, words = variables_and_words(commands(folder, *load_plan(folder))[1])
    assert words[:3] == ["polygraphy", "run", str(folder / "trunk.py")]
    flags = words[3 : words.index("--data-loader-script")]
    flags.remove("--trt")
    engine = tmp_path / "trunk.engine"
    command = [sys.executable, "-c", POLYGRAPHY, "convert", words[2], *flags, "-o", str(engine)]
    env = {**os.environ, **variables, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    content = engine.read_bytes()
    matrices = os.path.getsize(folder / "lowered" / "model.gguf") // 2  # the trunk's, at the least
    assert len(content) > matrices
    assert b"blk.1/swiglu" in content or lowering == "layers"


def test_commands_for_the_sdk(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `make trtexec-cmd` does it."""
    flags = ["--embed-weights", "--context", "128", "--prefill-chunk", "32", "--max-draft", "3"]
    assert build.main([str(tiny("q4_k_m")), "-o", str(tmp_path / "x"), *flags]) == 0
    capsys.readouterr()
    assert trtexec.main([str(tmp_path / "x")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    for line in lines:
        named = dict(word.lstrip("-").partition("=")[::2] for word in line.split()[1:])
        assert Path(named["loadEngine"]).is_file() and Path(named["dynamicPlugins"]).is_file()
