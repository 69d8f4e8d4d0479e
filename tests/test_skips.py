"""--never-skip: what would be skipped has failed; --require-gpu: no test of engines is skipped for lack of TensorRT."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest

ROOT = Path(__file__).parents[1]
SKIPPING = {
    "by itself": "import pytest\ndef test(): pytest.skip('something is missing')",
    "by a mark": "import pytest\n@pytest.mark.skipif(True, reason='something is missing')\ndef test(): ...",
    "for a package": "import pytest\npytest.importorskip('nothing', reason='something is missing')\ndef test(): ...",
    "for a package, inside": "import pytest\ndef test(): pytest.importorskip('nothing', reason='something is missing')",
}


def run(test: str, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-c", "/dev/null"]
    return subprocess.run([*command, "--rootdir", folder, *flags, folder], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("how", SKIPPING)
def test_a_skip_is_a_failure(tmp_path: Path, how: str) -> None:
    assert run(SKIPPING[how], tmp_path).returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED)
    done = run(SKIPPING[how], tmp_path, "--never-skip")
    assert done.returncode in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED), done.stdout
    assert "skipped, despite --never-skip" in done.stdout and "something is missing" in done.stdout


def test_what_passes_and_what_is_known_to_fail(tmp_path: Path) -> None:
    source = "import pytest\ndef test(): ...\n@pytest.mark.xfail\ndef test_known(): assert False"
    assert run(source, tmp_path, "--never-skip").returncode == 0


@pytest.mark.parametrize(("marks", "refused"), [(("gpu",), False), (("gpu", "trt"), True)])
def test_engines_without_tensorrt(monkeypatch: pytest.MonkeyPatch, marks: tuple[str, ...], refused: bool) -> None:
    config: Any = SimpleNamespace(getoption={"--require-gpu": True, "--sample": None}.get)
    item: Any = SimpleNamespace(get_closest_marker=lambda name: name if name in marks else None)
    monkeypatch.setattr(conftest, "_installed", lambda *packages: False)
    monkeypatch.setattr(conftest, "_num_gpus", lambda: 1)
    if refused:
        with pytest.raises(pytest.UsageError, match="no TensorRT package"):
            conftest.pytest_collection_modifyitems(config, [item])
    else:
        conftest.pytest_collection_modifyitems(config, [item])
