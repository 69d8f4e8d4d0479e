"""`--context auto` of the engine builder: the largest context whose plan fits the GPU's memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engines.build import main
from engines.build_flags import DEFAULT_OPTIONS
from engines.description import describe
from engines.engine_manifest import load_engine_manifest
from engines.errors import ResourceError, UsageError
from engines.manifest import load_manifest
from engines.memory_plan import plan_memory
from engines.planned_engines import fitting_context
from export.exporter import export_model

Tiny = Callable[[str], Path]


def plan(model: Path, context: int):  # type: ignore[no-untyped-def]
    described = describe(model, context)
    engines = described.engines["f16"]
    return plan_memory(engines, described.geometry, engines.engines, described.activations)


@pytest.fixture(scope="module")
def exported_q4(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("auto") / "x"
    export_model(tiny("q4_k_m"), folder, target="tensorrt")
    return folder


def test_the_largest_that_fits(tiny: Tiny, exported_q4: Path) -> None:
    """What is chosen fits by its own plan, a step more does not; int8 caches leave room for more."""
    manifest = load_manifest(exported_q4)
    free = plan(tiny("q4_k_m"), 2048).total
    fits = fitting_context(exported_q4, manifest, DEFAULT_OPTIONS, free)
    assert fits == 2048
    assert plan(tiny("q4_k_m"), fits + 1).total > free
    assert fitting_context(exported_q4, manifest, replace(DEFAULT_OPTIONS, kv_cache="int8"), free) >= 3072
    assert fitting_context(exported_q4, manifest, DEFAULT_OPTIONS, 1 << 40) == manifest.geometry.context_length
    with pytest.raises(ResourceError, match="needed for all else"):
        fitting_context(exported_q4, manifest, DEFAULT_OPTIONS, 1 << 20)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--context", "most"], "'most'"),
        (["--context", "-1"], "-1"),
        (["--context", "5"], "--context 5: wanted at least --max-draft + 1 = 6"),
        (["--context", "4097"], "--context 4097: wanted 1 to 4096"),
        (["--max-draft", "8"], "--max-draft 8: wanted 0 to 7"),
        (["--max-draft", "-1"], "--max-draft -1"),
        (["--prefill-chunk", "0"], "--prefill-chunk 0: wanted 1 to 65536"),
        (["--gpu-memory", "8"], "--gpu-memory is for --context auto"),
        (["--context", "auto", "--gpu-memory", "0"], "--gpu-memory 0: wanted GB above 0"),
        (["--context", "auto", "--gpu-memory", "nan"], "--gpu-memory nan"),
        (["--context", "auto", "--gpu-memory", "inf"], "--gpu-memory inf"),
    ],
)
def test_wrong_use(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], says: str) -> None:
    assert main([str(tiny("q4_k_m")), "-o", str(tmp_path / "x"), *flags]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1) and says in said.err, said.err
    assert list(tmp_path.iterdir()) == []


def test_without_a_gpu(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Said before anything is exported."""

    def none() -> int:
        raise UsageError("no GPU here")

    monkeypatch.setattr("engines.build.free_gpu_bytes", none)
    assert main([str(tiny("q4_k_m")), "-o", str(tmp_path / "x"), "--context", "auto"]) == 2
    assert capsys.readouterr().err == "error: no GPU here\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.trt
def test_the_command_line(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gigabytes = plan(tiny("q4_k_m"), 1024).total / 1e9
    flags = ["-o", str(tmp_path / "x"), "--context", "auto", "--gpu-memory", repr(gigabytes)]
    assert main([str(tiny("q4_k_m")), *flags]) == 0
    assert "note: --context auto: 1024 of the model's 4096" in capsys.readouterr().err
    assert load_engine_manifest(tmp_path / "x").options.context == 1024
    assert main([str(tiny("q4_k_m")), "-o", str(tmp_path / "y")]) == 0
    assert load_engine_manifest(tmp_path / "y").options.context == 4096, "the model's, which is less than the default"
