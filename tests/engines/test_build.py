"""Engines of tiny models, built without a GPU: our plugins are in them, and they are rebuilt when needed, not else."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import onnx
import pytest

from engines import build, network
from engines.build import build_engines, main
from engines.draft_head import DraftHeadOptions
from engines.engine_manifest import ENGINES_NAME, Binding, EngineOptions, load_engine_manifest, pool_size
from engines.errors import EngineError, ResourceError, UsageError
from engines.manifest import load_manifest
from engines.network import load_graph
from export.exporter import export_model
from plugins import ops
from plugins.log import logger

Tiny = Callable[[str], Path]
OPTIONS = EngineOptions(max_rows=4, context=128, prefill_chunk=32, embed_weights=False)
SMALL = ["--max-draft", "3", "--context", "128", "--prefill-chunk", "32"]


@pytest.fixture
def folder(tiny: Tiny, tmp_path: Path) -> Path:
    export_model(tiny("q4_k_m"), tmp_path / "x", target="tensorrt")
    return tmp_path / "x"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"max_rows": 0}, "--max-draft -1: wanted 0 to 7"),
        ({"max_rows": 9}, "--max-draft 8: wanted 0 to 7"),
        ({"context": 0}, "--context 0: wanted 1 to 4096"),
        ({"context": 4097}, "--context 4097: wanted 1 to 4096"),
        ({"context": 3}, "--context 3: wanted at least --max-draft . 1 = 4"),
        ({"prefill_chunk": 0}, "--prefill-chunk 0: wanted 1 to"),
        ({"kv_cache": "int4"}, "--kv-cache int4: wanted f16 or int8"),
        ({"lowering": "rows"}, "--lowering rows: wanted layers or ops"),
    ],
)
def test_options_that_cannot_be_served(folder: Path, change: dict[str, int | str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        build_engines(folder, replace(OPTIONS, **change))


def test_an_export_for_another_target(tiny: Tiny, tmp_path: Path) -> None:
    export_model(tiny("f32"), tmp_path / "x")
    with pytest.raises(EngineError, match=r"exported for onnxruntime; export with .*--target tensorrt"):
        build_engines(tmp_path / "x", OPTIONS)


@pytest.mark.parametrize(
    ("op", "change"),
    [
        ("RopeTables", lambda node: node.output.append("sin")),
        ("GatedAttention", lambda node: node.input.append("sin")),
        ("KQuantMatmul", lambda node: node.input.pop()),
        ("RmsNormRows", lambda node: node.attribute.pop()),
        ("LayerNorm", lambda node: None),
    ],
)
def test_an_export_of_another_version(folder: Path, op: str, change: Callable[[onnx.NodeProto], object]) -> None:
    model = onnx.load(str(folder / "trunk.onnx"), load_external_data=False)
    node = next(node for node in model.graph.node if node.op_type == op or op == "LayerNorm")
    node.op_type, node.domain = op, ops.DOMAIN
    change(node)
    onnx.save_model(model, folder / "draft.onnx")
    with pytest.raises(EngineError, match=rf"draft\.onnx: {op} of another version.*run .python -m export. again"):
        load_graph(folder / "draft.onnx")
    load_graph(folder / "trunk.onnx")


def test_command_line_refusals(tiny: Tiny, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tiny("f32"))]) == 2
    assert "-o DIR" in capsys.readouterr().err
    assert main([str(folder), "-o", str(tmp_path / "y")]) == 2
    assert "leave -o out" in capsys.readouterr().err
    assert main([str(tmp_path / "nothing.gguf"), "-o", str(tmp_path / "y")]) == 2
    assert main([str(tmp_path)]) == 4
    assert "not an exported model" in capsys.readouterr().err


@pytest.mark.trt
@pytest.mark.parametrize("lowering", build.LOWERINGS)
@pytest.mark.parametrize("name", ["q4_k_m", "mixed_types", "tied", "split_kinds_in_pair", "f32"])
def test_plugins_are_in_the_engine(tiny: Tiny, tmp_path: Path, name: str, lowering: str) -> None:
    """Plugins with state, whole layers or their mixers, are layers of their own; other products are in the regions
    between them, which read the weights."""
    export_model(tiny(name), tmp_path / "x", target="tensorrt")
    listings: dict[str, list[str]] = {}
    options = replace(OPTIONS, lowering=lowering)
    manifest, built = build_engines(tmp_path / "x", options, layers=listings.__setitem__)
    assert built and set(listings) == {"trunk", "draft"}
    geometry = load_manifest(tmp_path / "x").geometry
    trunk = "\n".join(line for line in listings["trunk"] if "[profile 1]" not in line)
    single = {note.split(" ")[0] for engine in manifest.engines.values() for note in engine.notes}
    assert bool(single) == (lowering == "layers" and name == "split_kinds_in_pair")

    def plugin(layer: int, mixer: str) -> str:
        kind = mixer if lowering == "ops" or f"blk.{layer}" in single else "layer"
        return f"Layer(PluginV3): blk.{layer}/{kind}"

    for layer in geometry.gdn_layers:
        assert plugin(layer, "gdn") in trunk
    for layer in geometry.attention_layers:
        assert plugin(layer, "attention") in trunk
    assert geometry.draft_layer is not None
    assert plugin(geometry.draft_layer, "attention") in "\n".join(listings["draft"])
    for role, engine in manifest.engines.items():
        for weight in engine.weights:
            assert any(f"{weight} (Int8[" in line for line in listings[role]), f"{weight} is no input of {role}"
    assert not [line for line in listings["trunk"] if "Layer(Reformat)" in line or "Layer(Shuffle)" in line]


@pytest.mark.trt
def test_manifest_says_what_the_runtime_needs(folder: Path) -> None:
    manifest, _ = build_engines(folder, OPTIONS)
    assert load_engine_manifest(folder) == manifest
    trunk, draft = manifest.engines["trunk"], manifest.engines["draft"]
    geometry = load_manifest(folder).geometry
    shapes = {each.name: (each.dtype, each.shape) for each in (*trunk.inputs, *trunk.outputs)}
    pool = pool_size(geometry, OPTIONS.max_rows)
    assert shapes["blk.0.pool"] == shapes["blk.0.pool.out"] == ("float32", (pool,))
    assert shapes["blk.3.cache"] == ("float16", (2, 128, geometry.num_kv_heads, geometry.head_dim))
    assert shapes["logits"] == ("float32", ("R", geometry.vocab_size))
    assert {each.name: each.alias for each in trunk.outputs if each.alias} == {
        **{f"blk.{layer}.pool.out": f"blk.{layer}.pool" for layer in geometry.gdn_layers},
        **{f"blk.{layer}.cache.out": f"blk.{layer}.cache" for layer in geometry.attention_layers},
    }
    assert [(p.name, p.max_tokens, p.max_rows) for p in trunk.profiles] == [("decode", 4, 4), ("prefill", 32, 1)]
    assert [p.max_rows for p in draft.profiles] == [1, 8]
    assert draft.nbytes < 200_000  # no code of TensorRT's own, which takes 135 KB a profile and region
    assert {each.name for each in draft.inputs} == {"tokens", "position", "rows", "hidden", "blk.4.cache"}
    size = (folder / "model.gguf").stat().st_size
    for name in (*trunk.weights, *draft.weights):
        for piece in manifest.weights[name].pieces:
            assert piece.file == "model.gguf" and piece.offset + piece.nbytes <= size
    assert not [path for path in folder.iterdir() if path.name.endswith(".part")]


@pytest.mark.trt
@pytest.mark.parametrize("lowering", build.LOWERINGS)
@pytest.mark.parametrize("name", ["q4_k_m", "heads_256"])
def test_int8_caches(tiny: Tiny, tmp_path: Path, name: str, lowering: str) -> None:
    """In place as f16 ones are, nothing copied or converted."""
    export_model(tiny(name), tmp_path / "x", target="tensorrt")
    listings: dict[str, list[str]] = {}
    options = replace(OPTIONS, lowering=lowering, kv_cache="int8")
    manifest, _ = build_engines(tmp_path / "x", options, layers=listings.__setitem__)
    assert load_engine_manifest(tmp_path / "x").options.kv_cache == "int8"
    geometry = load_manifest(tmp_path / "x").geometry
    shape = (2, OPTIONS.context, geometry.num_kv_heads, geometry.head_dim + 16)
    for role, layers in (("trunk", geometry.attention_layers), ("draft", [geometry.draft_layer])):
        engine = manifest.engines[role]
        for layer in layers:
            before = Binding(f"blk.{layer}.cache", "int8", shape)
            assert before in engine.inputs
            assert Binding(f"blk.{layer}.cache.out", "int8", shape, before.name) in engine.outputs
            assert any(f"{before.name} (Int8[" in line for line in listings[role])
        assert not [line for line in listings[role] if "Layer(Reformat)" in line]


@pytest.mark.trt
def test_rebuilt_only_when_something_changed(folder: Path) -> None:
    def build(**changes: object) -> bool:
        _, built = build_engines(folder, replace(OPTIONS, **changes))  # type: ignore[arg-type]
        return built

    assert build() and not build()
    assert build(context=256) and not build(context=256)
    assert build(lowering="ops") and not build(lowering="ops")
    assert build(kv_cache="int8") and not build(kv_cache="int8")
    assert build(context=256) and not build(context=256)
    (folder / "draft.engine").write_bytes(b"short")
    assert build(context=256)
    (folder / "trunk.engine").unlink()
    assert build(context=256)
    (folder / ENGINES_NAME).write_text("{}")
    assert build(context=256)
    os.utime(folder / "trunk.onnx")
    assert not build(context=256), "only content counts"


@pytest.mark.trt
def test_another_exporter_or_library_or_tensorrt_builds_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_engines(folder, OPTIONS)
    chosen = build.tensorrt()
    for name, other in (
        ("exporter_version", lambda: "another"),
        ("library_digest", lambda library: "another"),
        ("tensorrt", lambda: replace(chosen, version=f"{chosen.version}.1")),
        ("_BUILDER_VERSION", 0),
    ):
        monkeypatch.setattr(build, name, other)
        assert build_engines(folder, OPTIONS)[1], name
        assert not build_engines(folder, OPTIONS)[1], name


@pytest.mark.trt
def test_a_failed_build_keeps_the_old_engines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, _ = build_engines(folder, OPTIONS)

    def disk_is_full(self: network._Output, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(network._Output, "write", disk_is_full)
    with pytest.raises(ResourceError, match="No space left"):
        build_engines(folder, replace(OPTIONS, context=256))
    assert load_engine_manifest(folder) == before
    for role in before.engines:
        assert before.file(folder, role).is_file()
    assert not [path for path in folder.iterdir() if path.name.endswith(".part")]


@pytest.mark.trt
def test_a_tensorrt_that_writes_no_streams(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As full TensorRT before 10.13: the engine comes as one piece of memory."""
    real = network.trt.Builder

    class Builder:
        def __init__(self, logger: object) -> None:
            self._real = real(logger)

        def __getattr__(self, name: str) -> object:
            if name == "build_serialized_network_to_stream":
                raise AttributeError(name)
            return getattr(self._real, name)

    monkeypatch.setattr(network.trt, "Builder", Builder, raising=False)
    manifest, _ = build_engines(folder, OPTIONS)
    for role, engine in manifest.engines.items():
        data = manifest.file(folder, role).read_bytes()
        assert len(data) == engine.nbytes > 1000
        assert blake2b(data, digest_size=20).hexdigest() == engine.digest


@pytest.mark.trt
def test_interrupted(folder: Path) -> None:
    """Ctrl-C inside a callback of TensorRT comes out as what it is, and leaves nothing."""

    def interrupt(phase: str, fraction: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_engines(folder, OPTIONS, progress=interrupt)
    assert not [path for path in folder.iterdir() if path.name.endswith((".part", ".engine"))]


@pytest.mark.trt
def test_interrupted_while_tensorrt_logs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it swallows exceptions."""
    kind = type(logger())
    real, count = kind.log, 0

    def log(self: object, severity: object, message: str) -> None:
        nonlocal count
        count += 1
        if count == 5:
            signal.raise_signal(signal.SIGINT)
        real(self, severity, message)

    monkeypatch.setattr(kind, "log", log)
    with pytest.raises(KeyboardInterrupt):
        build_engines(folder, OPTIONS)
    assert count >= 5
    assert not [path for path in folder.iterdir() if path.name.endswith((".part", ".engine"))]


@pytest.mark.trt
@pytest.mark.parametrize("lowering", build.LOWERINGS)
def test_embedded_weights(tiny: Tiny, tmp_path: Path, lowering: str) -> None:
    export_model(tiny("q4_k_m"), tmp_path / "x", target="tensorrt")
    options = replace(OPTIONS, lowering=lowering)
    inputs, _ = build_engines(tmp_path / "x", options)
    embedded, _ = build_engines(tmp_path / "x", replace(options, embed_weights=True))
    assert not list((tmp_path / "x").glob("*.packs"))
    for role, engine in embedded.engines.items():
        assert engine.weights == ()
        weights = sum(embedded.weights[name].nbytes for name in inputs.engines[role].weights)
        grown = engine.nbytes - inputs.engines[role].nbytes
        # An input costs the plan some bytes per row, so the growth is a little less than the weights.
        assert weights * 0.9 < grown < weights * 1.1, "each weight once, none widened"


@pytest.mark.trt
def test_a_tied_matrix_is_one_weight(tiny: Tiny, tmp_path: Path) -> None:
    """Embedding and head are the same input of the engine, uploaded once."""
    weights = []
    for name in ("tied", "tied_copied"):
        export_model(tiny(name), tmp_path / name, target="tensorrt")
        manifest, _ = build_engines(tmp_path / name, OPTIONS)
        weights.append(sum(place.nbytes for place in manifest.weights.values()))
    geometry = load_manifest(tmp_path / "tied").geometry
    assert weights[1] - weights[0] == geometry.vocab_size * geometry.hidden_size * 4


@pytest.mark.trt
def test_command_line_from_a_gguf(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(tiny("q4_k_m")), "-o", str(tmp_path / "x"), *SMALL]
    assert main([*arguments, "--layers"]) == 0
    out = capsys.readouterr().out
    assert "trunk: Layer(PluginV3)" in out and "trunk.engine: trunk," in out and "built" in out
    exported = (tmp_path / "x" / "manifest.json").stat().st_mtime_ns
    assert main(arguments) == 0
    assert "up to date" in capsys.readouterr().out
    assert (tmp_path / "x" / "manifest.json").stat().st_mtime_ns == exported
    assert main([*arguments, "--no-draft", "--kv-cache", "int8"]) == 0
    assert not (tmp_path / "x" / "draft.engine").exists()
    assert load_engine_manifest(tmp_path / "x").options.kv_cache == "int8"


@pytest.mark.trt
def test_command_line_says_which_layers_are_single_ops(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(tiny("split_kinds_in_pair")), "-o", str(tmp_path / "x"), *SMALL]
    for _ in ("built", "up to date"):
        assert main(arguments) == 0
        assert "note: trunk: blk." in (said := capsys.readouterr().err) and "gate and up" in said
    assert main([*arguments, "--lowering", "ops"]) == 0
    assert "single ops" not in capsys.readouterr().err


@pytest.mark.trt
def test_a_cut_draft_head(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the .gguf in one go; its rows are a weight of the draft engine, uploaded from a file of their own."""
    folder, text = tmp_path / "x", tmp_path / "text"
    arguments = [str(tiny("q4_k_m")), "-o", str(folder), *SMALL]
    assert main([*arguments, "--draft-head-rows", "290", "--draft-head-type", "q4_k"]) == 0
    assert "note: draft head: 290 of 320 rows, Q6_K as Q4_K" in capsys.readouterr().err
    manifest = load_engine_manifest(folder)
    draft, trunk = manifest.engines["draft"], manifest.engines["trunk"]
    assert next(each.shape for each in draft.outputs if each.name == "logits") == ("R", 290)
    assert next(each.shape for each in trunk.outputs if each.name == "logits") == ("R", 320)
    place = manifest.weights["blk.4.draft_head.weight"]
    (piece,) = place.pieces
    assert (piece.file, piece.offset, piece.nbytes, place.shape) == ("draft_head.bin", 0, 290 * 144, (290, 1, 144))
    assert "blk.4.draft_head.weight" in draft.weights and "output.weight" not in draft.weights
    text.write_text("the thing and the others")
    for flags, built in (
        (["--draft-head-rows", "290", "--draft-head-type", "q4_k"], False),
        (["--draft-head-rows", "290"], True),
        (["--draft-head-rows", "290", "--draft-head-text", str(text)], True),
        (["--draft-head-rows", "290", "--draft-head-text", str(text)], False),
        ([], True),
    ):
        assert main([*arguments, *flags]) == 0
        assert ("up to date" not in capsys.readouterr().out) == built, flags
    assert main([str(folder), "--draft-head-rows", "290"]) == 2
    assert "is exported already" in capsys.readouterr().err


@pytest.mark.trt
def test_an_embedded_draft_head_is_rebuilt_when_its_values_change(tiny: Tiny, tmp_path: Path) -> None:
    """Its rows are no part of the .gguf, whose key is the same."""
    keys = set()
    for folder, counts in (("x", "the the"), ("y", "and and")):
        (tmp_path / counts).write_text(counts)
        options = DraftHeadOptions(265, texts=(tmp_path / counts,))
        export_model(tiny("q4_k_m"), tmp_path / folder, target="tensorrt", draft_head=options)
        manifest, _ = build_engines(tmp_path / folder, replace(OPTIONS, embed_weights=True))
        keys.add(manifest.build_key)
    assert len(keys) == 2


@pytest.mark.trt
def test_without_the_plugin_library(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "renamed.so"
    assert main([str(folder), *SMALL, "--plugins", str(missing)]) == 4
    assert str(missing) in capsys.readouterr().err
    assert not (folder / ENGINES_NAME).exists()


@pytest.mark.trt
def test_progress_is_told(folder: Path) -> None:
    seen: list[tuple[str, float]] = []
    build_engines(folder, OPTIONS, progress=lambda phase, fraction: seen.append((phase, fraction)))
    assert {phase.split(":")[0] for phase, _ in seen} == set(build.ROLES)
    assert all(0 <= fraction <= 1 for _, fraction in seen)
