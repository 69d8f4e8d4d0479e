"""Choosing TensorRT and loading the plugin library: every way it can fail is one clear line."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines.errors import EngineError
from plugins import load

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """As in a new process: nothing chosen, nothing loaded."""
    monkeypatch.setattr(load, "_loaded", [])
    load.tensorrt.cache_clear()
    yield monkeypatch
    load.tensorrt.cache_clear()


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Make these modules the TensorRT packages that can be imported."""
    modules = {name: SimpleNamespace(__version__=version) for name, version in versions.items()}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: modules.get(name))
    monkeypatch.setattr(load.importlib, "import_module", modules.__getitem__)


def test_no_tensorrt(fresh: pytest.MonkeyPatch) -> None:
    installed(fresh)
    with pytest.raises(EngineError, match=r"no TensorRT package found .*pip install"):
        load.tensorrt()


@pytest.mark.parametrize(
    ("versions", "name", "by_name"),
    [
        ({"tensorrt_rtx": "1.6.1.120"}, "tensorrt_rtx", False),
        ({"tensorrt_rtx": "1.7.1.116"}, "tensorrt_rtx", True),
        ({"tensorrt_rtx": "1.10.0.5"}, "tensorrt_rtx", True),
        ({"tensorrt": "10.8.0.43"}, "tensorrt", True),
        ({"tensorrt": "11.4.0.106", "tensorrt_rtx": "1.6.1.120"}, "tensorrt_rtx", False),
    ],
)
def test_choice(fresh: pytest.MonkeyPatch, versions: dict[str, str], name: str, by_name: bool) -> None:
    installed(fresh, **versions)
    assert (load.tensorrt().name, load.tensorrt().imports_by_name) == (name, by_name)


@pytest.mark.parametrize("versions", [{"tensorrt_rtx": "1.5.0.1"}, {"tensorrt": "10.3.0"}, {"tensorrt": "9.9.9"}])
def test_too_old(fresh: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    installed(fresh, **versions)
    (name,) = versions
    with pytest.raises(EngineError, match=rf"{name} {versions[name]} lacks .* install {name} >="):
        load.tensorrt()


def test_broken_tensorrt(fresh: pytest.MonkeyPatch) -> None:
    installed(fresh, tensorrt_rtx="1.7.1")

    def broken(name: str) -> Any:
        raise ImportError("libnvinfer.so: cannot open shared object file")

    fresh.setattr(load.importlib, "import_module", broken)
    with pytest.raises(EngineError, match=r"tensorrt_rtx package does not load .*libnvinfer"):
        load.tensorrt()


def test_missing_library_names_what_was_tried(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=rf"{tmp_path}/a\.so is missing; `make plugins` builds it"):
        load.load_plugins(tmp_path / "a.so")
    fresh.setattr(load, "LIBRARY_PLACES", (tmp_path / "b.so", tmp_path / "c.so"))
    with pytest.raises(EngineError, match=r"b\.so and .*c\.so are missing"):
        load.load_plugins()


def test_a_file_that_is_no_library(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed(fresh, tensorrt_rtx="1.7.1")
    (tmp_path / "a.so").write_bytes(b"not a library")
    with pytest.raises(EngineError, match=r"a\.so: the plugin library does not load"):
        load.load_plugins(tmp_path / "a.so")


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own: TensorRT keeps what it loads."""
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.trt
def test_loads_once_from_any_directory(tmp_path: Path) -> None:
    code = """
from pathlib import Path
from engines.errors import EngineError
from plugins import load
first = load.load_plugins()
assert load.load_plugins() == first == load.load_plugins(first)
copy = Path("libnextn_plugins.so")
copy.write_bytes(first.read_bytes())
try:
    load.load_plugins(copy)
except EngineError as error:
    print(error)
"""
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "are loaded already, and one process takes one library" in done.stdout


@pytest.mark.trt
def test_a_library_without_creators(tmp_path: Path) -> None:
    """Any shared library at all: one of Python's own extension modules."""
    import _ctypes

    library = Path(_ctypes.__file__)
    done = run(
        f"from pathlib import Path\nfrom plugins import load\nload.load_plugins(Path({str(library)!r}))", tmp_path
    )
    assert done.returncode != 0
    assert "EngineError" in done.stderr and "refuses the plugin library" in done.stderr
