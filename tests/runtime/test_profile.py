"""`runtime.profile`: layers told apart by name, their bytes, reports, what trtexec exports, and what needs a GPU."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.description import describe
from engines.engine_manifest import EngineManifest, load_engine_manifest
from engines.manifest import Geometry
from export.exporter import export_model
from runtime.profile import main
from runtime.profiling.kinds import LAYERS, OTHER, LayerKinds, Pass, node_of
from runtime.profiling.report import GraphTimes, pass_entry, table
from tests.runtime.command import Outcome, run_main
from tests.vocabulary_files import TRAINED_MODEL

Tiny = Callable[[str], Path]
# As TensorRT-RTX 1.6.1 reports them for the trained model, with times of a pass of one token in ms.
REPORTED = [
    ("Reformatting CopyNode for Network Input position", 0.0),
    ("__mye34_0_myl2_0", 0.0013),
    ("__myl_Move_myl2_1", 0.0039),
    ("rope_myl2_2", 0.0041),
    ("token_embd_U1_myl2_3", 0.0049),
    ("blk.7.parameters", 0.0),
    *((f"blk.{layer}/layer", 0.02) for layer in range(8)),
    ("output_norm_myl19_2", 0.004),
    ("__myl_Gath_myl19_3", 0.002),
    ("output_myl19_4", 0.01),
]


def engines_and_profile(folder: Path) -> Path:
    """An export with an engines.json as if engines had been built, and profile.json and layers.json as if timed."""
    folder = folder / "engines"
    export_model(TRAINED_MODEL, folder, target="tensorrt")
    describe(TRAINED_MODEL).engines["f16"].save(folder)
    exported(folder / "profile.json", REPORTED)
    exported_layers(folder / "layers.json", [name for name, _ in REPORTED], detailed=True)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, EngineManifest, Geometry]:
    folder = engines_and_profile(tmp_path_factory.mktemp("profile"))
    return folder, load_engine_manifest(folder), describe(TRAINED_MODEL).geometry


def kinds_of(trained: tuple[Path, EngineManifest, Geometry], role: str = "trunk") -> LayerKinds:
    _, engines, geometry = trained
    return LayerKinds(engines, engines.engines[role], geometry)


def test_layers_are_told_apart(trained: tuple[Path, EngineManifest, Geometry]) -> None:
    kinds = kinds_of(trained)
    found = {node_of(name): kinds.kind(name) for name, _ in REPORTED}
    assert found["rope"] == "rope tables" and found["token_embd"] == "embedding"
    assert found["output_norm"] == "norms" and found["output"] == "LM head"
    assert [found[f"blk.{i}/layer"] for i in (2, 3, 7)] == [
        LAYERS["delta net"],
        LAYERS["attention"],
        LAYERS["attention"],
    ]
    assert all(found[name] == OTHER for name in found if name.startswith(("__my", "Reform", "blk.7.par")))


def test_bytes_are_the_weights_and_the_state(trained: tuple[Path, EngineManifest, Geometry]) -> None:
    _, engines, _ = trained
    kinds, one = kinds_of(trained), Pass(1, 100)
    place = engines.weights
    state = 4 * (4 * 128 * 128 + 3 * 1024)  # of the first slot: recurrent state and window
    step = 4 * (4 * 4 * 192 + 3 * 1024)  # of another: how the state changes, and a window
    assert kinds.nbytes("blk.0/layer", one) == place["blk.0.weights"].nbytes + 2 * state
    assert kinds.nbytes("blk.0/layer", Pass(4, 100)) == place["blk.0.weights"].nbytes + 2 * state + 3 * step
    row = 2 * 2 * 256 * 2  # keys and values of two heads, float16
    assert kinds.nbytes("blk.3/layer", one) == place["blk.3.weights"].nbytes + 102 * row
    assert kinds.nbytes("output_myl19_4", one) == place["output.weight"].nbytes
    assert kinds.nbytes("token_embd_U1_myl2_3", Pass(3, 0)) == 3 * place["token_embd.weight"].nbytes // 4096
    assert kinds.nbytes("__myl_Move_myl2_1", one) == 0
    # All weights but the embedding's, and every state, once.
    whole = sum(kinds.nbytes(name, one) for name, _ in REPORTED)
    read = describe(TRAINED_MODEL).reads["trunk"]
    padding = 9 * 8 * 256  # packs round each matrix up
    assert 0 <= whole - (read + 6 * 2 * state + 2 * 102 * row + place["token_embd.weight"].nbytes // 4096) < padding


def test_single_ops(trained: tuple[Path, EngineManifest, Geometry]) -> None:
    """Of engines built with --lowering ops, whose weights are the tensors themselves."""
    _, engines, geometry = trained
    place = replace(engines.weights["output.weight"], shape=(10, 1, 16), pieces=())
    names = ["attn_qkv", "attn_gate", "ssm_alpha", "ssm_out", "ffn_gate", "ffn_up", "ffn_down"]
    weights = {f"blk.0.{name}.weight": place for name in names} | {"blk.3.attn_output.weight": place}
    engine = replace(engines.engines["trunk"], weights=tuple(weights))
    kinds = LayerKinds(replace(engines, weights=weights), engine, geometry)
    one = Pass(1, 0)
    joined = "blk.0/attn_qkv+blk.0/attn_gate+blk.0/ssm_alpha"
    assert (kinds.kind(joined), kinds.nbytes(joined, one)) == ("input products", 3 * 160)
    assert (kinds.kind("blk.0/gdn.1"), kinds.kind("blk.3/attention.1")) == ("delta net", "attention")
    assert (kinds.kind("blk.0/swiglu"), kinds.nbytes("blk.0/swiglu", one)) == ("ffn gate and up", 320)
    assert (kinds.kind("blk.0/ffn_residual"), kinds.nbytes("blk.0/ffn_residual", one)) == ("ffn down", 160)
    assert [kinds.nbytes(f"blk.{i}/mixer_residual", one) for i in (0, 3)] == [160, 160]


def test_the_report(trained: tuple[Path, EngineManifest, Geometry]) -> None:
    graph = GraphTimes(0.15, 88, 2)
    entry = pass_entry("trunk", Pass(1, 0), kinds_of(trained), REPORTED, 100.0, graph)
    total = sum(ms for _, ms in REPORTED)
    assert entry["layers_ms"] == pytest.approx(total)
    assert entry["graph"]["gap_ms"] == pytest.approx(0.15 - total)  # below 0: kernels overlap
    assert (entry["graph"]["launches"], entry["graph"]["copies"]) == (88, 2)
    assert sum(kind["ms"] for kind in entry["kinds"]) == pytest.approx(total)
    assert sum(kind["share"] for kind in entry["kinds"]) == pytest.approx(1)
    layers = next(kind for kind in entry["kinds"] if kind["kind"] == LAYERS["delta net"])
    assert layers["layers"] == 6
    assert layers["roofline"] == pytest.approx(layers["bytes"] / 1e6 / layers["ms"] / 100)
    assert entry["kinds"][-1]["kind"] == OTHER and entry["kinds"][-1]["roofline"] is None
    shown = table({"model": "m", "gpu": "g", "bandwidth": {"gb_per_s": 100, "source": "as given"}, "passes": [entry]})
    assert "88 launches, 2 copies, overlap" in shown and "delta net layers" in shown


# ---------------------------------------------------------------- what the SDK's tools export
def exported(path: Path, entries: list[tuple[str, float]], median: bool = True) -> Path:
    """A file laid out as --exportProfile writes it (samples/common/sampleReporting.cpp of TensorRT's sources, and the
    profiles that come with its engine explorer): commas first, six digits; older versions know no medians."""
    total = sum(ms for _, ms in entries) or 1.0
    lines = ['  { "count" : 50 }']
    for name, ms in entries:
        of_all, average = 50 * ms, 2 * ms if median else ms
        more = f', "medianMs" : {ms:g}' if median else ""
        share = f'"percentage" : {100 * ms / total:g}'
        lines.append(f', {{ "name" : "{name}", "timeMs" : {of_all:g}, "averageMs" : {average:g}{more}, {share} }}')
    path.write_text("\n".join(["[", *lines, "]", ""]))
    return path


def exported_layers(path: Path, names: list[str], detailed: bool) -> Path:
    """A file laid out as --exportLayerInfo writes it: names alone or, at detailed verbosity, an object a layer."""
    layers = [
        json.dumps(
            {"Name": name, "LayerType": "PluginV3", "Inputs": [], "Outputs": [], "StreamId": 0, "Metadata": ""}
            if detailed
            else name
        )
        for name in names
    ]
    path.write_text('{"Layers": [' + "\n,".join(layers) + '\n],\n"Bindings": ["tokens"\n,"logits"\n]}\n')
    return path


def profile(*arguments: object) -> Outcome:
    return run_main(main, *arguments)


@pytest.mark.parametrize("median", [True, False])
def test_a_profile_of_trtexec(trained: tuple[Path, EngineManifest, Geometry], tmp_path: Path, median: bool) -> None:
    pytest.importorskip("matplotlib")
    file, report, chart = exported(tmp_path / "p.json", REPORTED, median), tmp_path / "r.json", tmp_path / "r.png"
    info = exported_layers(tmp_path / "layers.json", [name for name, _ in REPORTED], detailed=median)
    flags = ("--gpu", "RTX 4090", "--json", report, "--chart", chart, "--layer-info", info)
    outcome = profile(trained[0], "--trtexec", file, "--rows", 1, *flags)
    assert (outcome.code, outcome.err) == (0, "")
    assert "RTX 4090 (p.json); memory 1008 GB/s (peak of its data sheet)" in outcome.out
    found = json.loads(report.read_text())
    (entry,) = found["passes"]
    assert entry["layers_ms"] == pytest.approx(sum(ms for _, ms in REPORTED)) and entry["graph"] is None
    assert {kind["kind"] for kind in entry["kinds"]} >= {"LM head", "embedding", LAYERS["attention"]}
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_other_files_are_refused(trained: tuple[Path, EngineManifest, Geometry], tmp_path: Path) -> None:
    folder = trained[0]
    profile(folder, "--trtexec", tmp_path / "none.json").refused(2, "none.json: cannot be read (No such file")
    (tmp_path / "text.json").write_text("[1]")
    profile(folder, "--trtexec", tmp_path / "text.json").refused(2, "not what --exportProfile writes")
    (tmp_path / "empty.json").write_text('[{"count": 3}]')
    profile(folder, "--trtexec", tmp_path / "empty.json").refused(2, "has no layers")
    file, info = exported(tmp_path / "p.json", REPORTED), tmp_path / "layers.json"
    info.write_text('{"Layers": ["other"]}')
    profile(folder, "--trtexec", file, "--layer-info", info).refused(2, "they are of two engines")
    info.write_text("[]")
    profile(folder, "--trtexec", file, "--layer-info", info).refused(2, "not what --exportLayerInfo writes")
    profile(folder, "--layer-info", info).refused(2, "belongs to a profile")
    profile(folder, "--trtexec", file, "--gpu", "Voodoo 2").refused(2, "not in the table")
    profile(folder, "--trtexec", file, "--rows", "0").refused(2, "--rows")
    profile(folder, "--trtexec", file, "--json", tmp_path / "no" / "x").refused(2, "no such folder")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--position", 4096), "--position 4096: wanted 0 to 4095"),
        (("--position", 10**30), "wanted 0 to 4095"),
        (("--position", -1), "--position: 0 or more"),
        (("--rows", 4096, "--position", 1), "--rows 4096: the trunk engine's passes take 1 to"),
        (("--rows", "1,4"), "a profile is of one pass"),
        (("--rows", "1,"), "wanted whole numbers"),
        (("--rows", "nan"), "wanted whole numbers"),
        (
            ("--role", "draft"),
            "--role draft: the profile's layers are blk.0, blk.1, blk.2; they are the other engine's",
        ),
        (("--role", "verify"), "invalid choice"),
        (("--bandwidth", "nan"), "--bandwidth nan: wanted GB/s above 0"),
        (("--bandwidth", "inf"), "--bandwidth inf: wanted GB/s above 0"),
        (("--repeats", 0), "--repeats 0: wanted 1 to"),
        (("--repeats", 10**9), "--repeats 1000000000: wanted 1 to"),
    ],
)
def test_odd_values_are_refused_in_a_line(
    trained: tuple[Path, EngineManifest, Geometry], tmp_path: Path, flags: tuple[object, ...], said: str
) -> None:
    profile(trained[0], "--trtexec", exported(tmp_path / "p.json", REPORTED), *flags).refused(2, said)


@pytest.mark.parametrize("time", ["NaN", "Infinity", "-1", "1e999", "null", '"x"', str(10**400)])
def test_times_that_are_none_are_refused(
    trained: tuple[Path, EngineManifest, Geometry], tmp_path: Path, time: str
) -> None:
    (tmp_path / "p.json").write_text(f'[{{"count": 3}}, {{"name": "blk.0/layer", "averageMs": 1, "medianMs": {time}}}]')
    profile(trained[0], "--trtexec", tmp_path / "p.json").refused(2, "not what --exportProfile writes")


def test_profiles_of_other_engines_are_refused(trained: tuple[Path, EngineManifest, Geometry], tmp_path: Path) -> None:
    for name in ("blk.31/layer", "conv1"):
        file = exported(tmp_path / "p.json", [(name, 1.0)])
        profile(trained[0], "--trtexec", file).refused(2, "the profile is of other engines")
    file = exported(tmp_path / "p.json", [("blk.8/layer", 1.0)])
    assert profile(trained[0], "--trtexec", file, "--role", "draft").code == 0
    profile(trained[0], "--role", "draft").refused(2, "belongs to a profile that is read")


def test_without_a_gpu_it_says_so(trained: tuple[Path, EngineManifest, Geometry], monkeypatch: Any) -> None:
    from tests.runtime.fake_cuda import FakeCuda

    cuda = FakeCuda()
    cuda.errors["cudaGetDeviceCount"] = 35
    monkeypatch.setattr("runtime.cuda._api", lambda: cuda)
    outcome = profile(trained[0])
    outcome.refused(4, "no NVIDIA driver found")
    assert set(re.findall(r"--[a-z-]+", outcome.err)) <= set(re.findall(r"--[a-z-]+", profile("--help").out))
    profile("nowhere").refused(4, "no NVIDIA driver found")
