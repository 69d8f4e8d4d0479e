"""The restated plugin interface stands alone, and its layout asserts bite."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HEADER = Path(__file__).resolve().parents[2] / "plugins" / "include" / "trt_plugin_abi.h"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


def compile_header(source: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = folder / "header.cpp"
    path.write_text(source, encoding="utf-8")
    command = [str(COMPILER), "-std=c++17", "-Wall", "-Wno-pragma-once-outside-header", "-fsyntax-only", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_compiles_alone(tmp_path: Path) -> None:
    done = compile_header(HEADER.read_text(encoding="utf-8"), tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ("int64_t d[MAX_DIMS];\n};\nusing", "int32_t d[MAX_DIMS];\n};\nusing"),
        ("TensorFormat format; float scale;", "TensorFormat format; double scale;"),
        ("Dims min, max, opt;", "Dims min, max;"),
        ("int32_t length = 0;", "int64_t length = 0;"),
    ],
)
def test_a_changed_layout_does_not_compile(tmp_path: Path, was: str, becomes: str) -> None:
    source = HEADER.read_text(encoding="utf-8")
    assert source.count(was) == 1
    done = compile_header(source.replace(was, becomes), tmp_path)
    assert done.returncode != 0 and "static assertion failed" in done.stderr
