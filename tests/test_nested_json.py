"""JSON nested so deeply that Python's reader gives up: refused like other damaged files, in a line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.accuracy.plan import PLAN_NAME, load_plan
from engines.engine_manifest import ENGINES_NAME, load_engine_manifest
from engines.errors import EngineError, UsageError
from engines.manifest import MANIFEST_NAME, load_manifest
from runtime.benchmark.expected import load_expected
from runtime.evaluation.prompts import load_prompts
from runtime.profiling.trtexec import read_profile

DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("name", "load"),
    [
        (MANIFEST_NAME, load_manifest),
        (ENGINES_NAME, load_engine_manifest),
        (PLAN_NAME, load_plan),
    ],
)
def test_files_of_a_folder(tmp_path: Path, name: str, load: Callable[[Path], Any]) -> None:
    (tmp_path / name).write_text(DEEP, encoding="utf-8")
    with pytest.raises(EngineError) as refused:
        load(tmp_path)
    assert str(tmp_path) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "load", [lambda path: load_expected(path, 8, 100), lambda path: load_prompts([path]), read_profile]
)
def test_files_of_flags(tmp_path: Path, load: Callable[[Path], Any]) -> None:
    path = tmp_path / "deep.json"
    path.write_text(DEEP, encoding="utf-8")
    with pytest.raises(UsageError) as refused:
        load(path)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)
