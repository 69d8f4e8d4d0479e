"""`runtime.bench` over TensorRT engines, on stand-ins: device times, read bandwidth, memory, clocks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from engines.errors import EngineError
from runtime.bench import main
from runtime.benchmark.gpu import read_gb_per_s
from runtime.benchmark.machine import GpuWatch
from tests.runtime.command import Outcome, run_main
from tests.runtime.fake_engines import VOCAB
from tests.runtime.fake_passes import CONTEXT, MAX_ROWS
from tests.runtime.fake_tensorrt import FakeGpu, install, toy_manifest, write_engines

LIBRARY = Path("/library/libnextn_plugins.so")


class ToyTokenizer:
    end_token_ids = ()

    def encode(self, text: str, most: int | None = None) -> list[int]:
        return [ord(letter) % VOCAB for letter in text]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    monkeypatch.setattr("runtime.benchmark.gpu.find_library", lambda: LIBRARY)
    monkeypatch.setattr("runtime.session.Tokenizer", lambda folder, info: ToyTokenizer())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # no NVML
    return install(monkeypatch)


def run(folder: Path, *flags: object) -> tuple[dict[str, Any], Outcome]:
    toy_manifest().save(folder)
    write_engines(folder, toy_manifest())
    (folder / "prompt.txt").write_text("to be read\n")
    path = folder / "report.json"
    given = ("-f", folder / "prompt.txt", "-n", 9, "--repeats", 1, "--prefill", "", "--json", path)
    outcome = run_main(main, folder, *given, *flags)
    assert outcome.code == 0, outcome.err
    return json.loads(path.read_text()), outcome


def test_what_only_a_gpu_has(gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    report, outcome = run(tmp_path, "--spec-draft-n-max", 3, "--depths", "0,10", "--fill")
    assert [each["rows"] for each in report["device_passes"]] == [1, 2, 3, 4]
    assert [each["drafts"] for each in report["device_drafts"]] == [1, 2, 3]
    assert all(each["ms"]["median"] > 0 and each["gb_per_s"] > 0 for each in report["device_passes"])
    passes = report["device_passes"]
    assert [each["over_plain"] for each in passes] == [
        pytest.approx(each["ms"]["median"] / passes[0]["ms"]["median"], rel=1e-2) for each in passes
    ]
    # Drafts of a round read the head once each.
    assert report["device_drafts"][2]["bytes"] == 3 * report["device_drafts"][0]["bytes"]
    assert report["gpu"]["tensorrt"] == "tensorrt_rtx 1.6.1.120"
    assert report["gpu"]["engines"]["context"] == CONTEXT
    assert "neither the package nvidia-ml-py nor a working nvidia-smi" in report["gpu"]["watch"]["absent"]
    assert report["bandwidth"]["gb_per_s"] > 0 and "kernel" in report["bandwidth"]["source"]
    assert report["memory"]["planned_bytes"]["weights"] > 0 and report["memory"]["total_bytes"] == 1 << 34
    assert [entry["depth"] for entry in report["depths"]] == [0, 10, CONTEXT - 9 - 10]
    for words in (
        "on the device alone",
        "Fake GPU",
        "planned",
        "clocks, temperature and power of the GPU are not known",
    ):
        assert words in outcome.out
    # A cache row of one head of four float16 values, twice.
    near, far = (entry["passes"][0]["bytes"] for entry in report["depths"][:2])
    assert far - near == 10 * 16


def test_the_most_drafts_follow_the_engines(gpu: FakeGpu, tmp_path: Path) -> None:
    report, _ = run(tmp_path, "--spec-draft-n-max", 60, "--depths", "0", "--bandwidth", 1)
    assert [each["rows"] for each in report["device_passes"]] == list(range(1, MAX_ROWS + 1))
    outcome = run_main(main, tmp_path, "-f", tmp_path / "prompt.txt", "--spec-draft-n-max", 60, "--drafts", "2,9")
    outcome.refused(2, "--drafts 9", "at most 5")


def test_a_library_that_cannot_read(gpu: FakeGpu) -> None:
    gpu.kernels.status = 98
    with pytest.raises(EngineError, match=r"reading could not be started: .*\(CUDA error 98\)"):
        read_gb_per_s(LIBRARY)


def test_clocks_by_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = iter([1500, 1600, 1980])

    class NVMLError(Exception):
        pass

    nvml = ModuleType("pynvml")
    nvml.__dict__.update(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByPciBusId=lambda name: name,
        nvmlDeviceGetClockInfo=lambda handle, kind: next(clocks) if kind == 1 else 2600,
        nvmlDeviceGetTemperature=lambda handle, kind: 40,
        nvmlDeviceGetPowerUsage=lambda handle: 350_000,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace() if name == "pynvml" else None)
    now = [0.0]
    watch = GpuWatch("0000:0A:00.0", clock=lambda: now[0])
    for step in (0.0, 0.1, 1.0, 1.0):  # the second comes too soon
        now[0] += step
        watch.sample()
    assert watch.facts() == {
        "sm_mhz": {"least": 1500, "median": 1600, "most": 1980},
        "memory_mhz": {"least": 2600, "median": 2600, "most": 2600},
        "celsius": {"least": 40, "median": 40, "most": 40},
        "watts": {"least": 350, "median": 350, "most": 350},
    }

    def lost(handle: str) -> int:
        raise NVMLError("GPU is lost")

    nvml.__dict__["nvmlDeviceGetPowerUsage"] = lost
    clocks = iter([1500])
    watch = GpuWatch("0000:0A:00.0")
    watch.sample()
    assert watch.facts() == {"absent": "NVML: GPU is lost"}


def test_clocks_by_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\ntest "$2" = 0000:0A:00.0 && echo "1755, 2619, 33, 120.5"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    watch = GpuWatch("0000:0A:00.0")
    watch.sample()
    assert watch.facts()["sm_mhz"]["median"] == 1755 and watch.facts()["watts"]["most"] == 120.5
    tool.write_text("#!/bin/sh\necho '[N/A], [N/A], 33, 120'\n")
    watch = GpuWatch("0000:0A:00.0")
    watch.sample()
    assert "nvidia-smi" in watch.facts()["absent"]
