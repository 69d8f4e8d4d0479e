"""Fixtures and marker handling shared by all tests."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

from tests.named_inputs import write_named

if TYPE_CHECKING:
    from tests.exported import Exported

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``tiny(name)``: path of the named model file, written once a session. Do not change these files."""
    folder = tmp_path_factory.mktemp("models")

    @cache
    def path_of(name: str) -> Path:
        return write_named(name, folder)

    return path_of


@pytest.fixture(scope="session")
def exported(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    """``exported(name)``: the export of a named model file ("trained": of the trained one), made once a session."""
    # Not at the top: kernel tests run on machines without ONNX Runtime.
    from tests.exported import export
    from tests.vocabulary_files import TRAINED_MODEL

    folder = tmp_path_factory.mktemp("exported")

    @cache
    def export_of(name: str) -> Exported:
        return export(TRAINED_MODEL if name == "trained" else tiny(name), folder / name)

    return export_of


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu", action="store_true", help="fail, instead of skipping GPU tests, when there is no NVIDIA GPU"
    )
    parser.addoption(
        "--require-peer",
        action="store_true",
        help="fail, instead of skipping peer tests, when llama.cpp is not installed",
    )

    parser.addoption(
        "--require-browser",
        action="store_true",
        help="fail, instead of skipping tests of the page, when Chromium or playwright is not installed",
    )

    parser.addoption("--require-ray", action="store_true", help="fail, instead of skipping, when Ray is not installed")

    parser.addoption(
        "--never-skip", action="store_true", help="a test that is skipped, for whatever it lacks, has failed"
    )

    parser.addoption(
        "--prepared", metavar="DIR", help="what the GPU tests read, made by `python -m tests.gpu.prepare DIR`"
    )

    parser.addoption(
        "--sample", type=int, metavar="N", help="of every test function run N cases only, spread over its list of them"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--require-gpu") and not _num_gpus():
        raise pytest.UsageError("--require-gpu: no NVIDIA GPU found (no driver, or no device visible)")
    if config.getoption("--require-peer") and not _installed("llama_cpp_py_sync"):
        raise pytest.UsageError("--require-peer: llama.cpp is not installed; pip install '.[test]' (Linux on x86-64)")
    if config.getoption("--require-ray") and not _installed("ray"):
        raise pytest.UsageError("--require-ray: Ray is not installed; pip install '.[ray]'")
    if config.getoption("--require-browser") and _no_browser():
        raise pytest.UsageError(f"--require-browser: {_no_browser()}")


@pytest.hookimpl(trylast=True)  # a sample of what -k and -m have left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take the sample asked for; skip what this machine cannot run, saying what it lacks."""
    if wanted := config.getoption("--sample"):
        kept = _sample(items, wanted)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
    lacking = {
        "gpu": None if _num_gpus() else "needs an NVIDIA GPU",
        "trt": None if _installed("tensorrt", "tensorrt_rtx") else "needs a TensorRT package",
        "ray": None if _installed("ray") else "needs Ray, of the extra 'ray'",
        "browser": _no_browser(),
        "peer": None if _installed("llama_cpp_py_sync") else "needs llama.cpp, of the extra 'test' on Linux x86-64",
    }
    if config.getoption("--require-gpu") and lacking["trt"] and any(item.get_closest_marker("trt") for item in items):
        raise pytest.UsageError("--require-gpu: tests of engines are among these, and no TensorRT package is installed")
    for item in items:
        for marker, reason in lacking.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _not_skipped(item.config, (yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _not_skipped(collector.config, (yield))


def _not_skipped(config: pytest.Config, report: Report) -> Report:
    """The report, a failure where it says "skipped" and --never-skip was given."""
    if report.skipped and config.getoption("--never-skip") and not hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", f"skipped, despite --never-skip: {report.longrepr}"
    return report


def _sample(items: list[pytest.Item], n: int) -> list[pytest.Item]:
    """n of every test function's cases, the first and the last among them."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(item.nodeid.split("[")[0], []).append(item)
    steps = {name: max(1, (len(cases) - 1) / max(1, n - 1)) for name, cases in groups.items()}
    chosen = {
        id(cases[min(len(cases) - 1, round(i * steps[name]))]) for name, cases in groups.items() for i in range(n)
    }
    return [item for item in items if id(item) in chosen]


@cache
def _num_gpus() -> int:
    """CUDA devices the driver shows; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def _no_browser() -> str | None:
    """What is missing for tests in a browser."""
    if shutil.which("chromium") is None:
        return "needs chromium on PATH (apt install chromium)"
    return None if _installed("playwright") else "needs playwright, of the extra 'test'"


def _installed(*packages: str) -> bool:
    return any(importlib.util.find_spec(package) for package in packages)
