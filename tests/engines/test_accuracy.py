"""`python -m engines.accuracy`: passes on a good build, and names what is wrong with a bad one. Without a GPU."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from onnx import helper, numpy_helper

from engines.accuracy import __main__ as accuracy
from engines.accuracy import int8_rows, semantics, weight_bytes
from engines.accuracy.graphs import engine_graph
from engines.accuracy.inputs import load_feeds
from engines.accuracy.measures import measure
from engines.accuracy.plan import load_plan
from engines.accuracy.runner import SemanticsRunner
from engines.accuracy.suspects import suspect
from engines.accuracy.tolerances import INT8_CACHE, LONG, SHORT
from engines.network import load_graph
from export.exporter import export_model
from export.weight_inputs import external_weights
from plugins import ops
from tests.documented import POLYGRAPHY, ROOT
from tests.lowered import _NATIVE, _PLUGINS
from tests.oracle import int8_rows as int8_oracle
from tests.runtime.command import run_main

Tiny = Callable[[str], Path]
SMALL = ["--tokens", "12", "--max-draft", "2", "--backend", "oracle"]


@pytest.fixture(scope="module")
def prepared(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("accuracy") / "x"
    assert accuracy.main([str(tiny("q4_k_m")), "-o", str(folder), *SMALL, "--json", str(folder) + ".json"]) == 0
    return folder


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    code = accuracy.main(arguments)
    return code, capsys.readouterr().out


def test_a_good_build_passes(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = run([str(prepared), "--backend", "oracle", "--all"], capsys)
    assert code == 0 and shown.rstrip().endswith("passed")
    report = json.loads(prepared.with_suffix(".json").read_text())
    assert report["passed"] and report["first_off"] is None
    assert [(each["role"], each["tokens"]) for each in report["passes"]] == [
        (role, n) for role in ("trunk", "draft") for n in (12, 3, 1)
    ]
    for each in report["passes"]:
        names = [place["name"] for place in each["places"]]
        assert names[-2:] == ["hidden.out", "logits"]
        assert all(place["nmse"] < 1e-10 for place in each["places"])
        assert {"kl_mean", "top1", "max_abs", "nmse"} <= each["places"][-1].keys() and each["places"][-1]["top1"] == 1
    trunk = [place["name"] for place in report["passes"][0]["places"]]
    assert trunk[0] == "token_embd"
    # In the order of the model, with all state.
    order = [int(name.split("blk.")[1].split(".")[0].split("/")[0]) for name in trunk if name.startswith("blk.")]
    assert order == sorted(order) and set(order) == {0, 1, 2, 3}
    assert {"blk.0.state", "blk.0.conv", "blk.3.key_cache", "blk.3.value_cache"} <= set(trunk)


@pytest.mark.parametrize("options", [["--lowering", "layers"], ["--kv-cache", "int8"]])
def test_other_forms_pass(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    code, shown = run([str(tiny("q4_k_m")), "-o", str(tmp_path / "x"), *SMALL, *options], capsys)
    assert code == 0, shown


def test_a_long_text_passes(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Longer than what the equations are worked out for: keys, values and logits of the begin are held against them."""
    code, shown = run([str(tiny("f32")), "-o", str(tmp_path / "x"), "--tokens", "80", "--backend", "oracle"], capsys)
    assert code == 0 and "reference: 4 places as the model's equations have them" in shown


@pytest.mark.parametrize("name", ["mixed_types", "other_types", "tied_no_head_norm", "yarn", "split_kinds_in_pair"])
def test_other_models_pass(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    code, shown = run([str(tiny(name)), "-o", str(tmp_path / "x"), *SMALL], capsys)
    assert code == 0, shown


# (tensor, superblock, byte of it): bytes of scales and minima of Q4_K begin at 4, those of Q6_K at 192.
FLIPS = [
    ("blk.0.ffn_gate.weight", 7, 4, 1, "row 7 of what makes blk.0/swiglu"),
    ("blk.1.attn_gate.weight", 5, 9, 0xFF, "row 5 of what makes blk.1/attn_gate"),
    ("blk.3.attn_output.weight", 3, 5, 2, "row 3 of what makes blk.3/mixer_residual"),
    ("blk.4.nextn.eh_proj.weight", 9, 6, 0x80, "row 4 of what makes blk.4/eh_proj"),
]


def with_flipped_byte(model: Path, damaged: Path, tensor: str, superblock: int, byte: int, mask: int) -> None:
    """``damaged``, the same file as ``model`` or a copy, becomes one of its own with that byte changed."""
    content = bytearray(model.read_bytes())
    found = next(each for each in gguf.GGUFReader(model).tensors if each.name == tensor)
    assert found.tensor_type.name == "Q4_K" or superblock == 0
    content[int(found.data_offset) + 144 * superblock + byte] ^= mask
    damaged.unlink()
    damaged.write_bytes(content)


@pytest.mark.parametrize("lowering", ["ops", "layers"])
@pytest.mark.parametrize(("tensor", "superblock", "byte", "mask", "named"), FLIPS)
def test_one_flipped_scale_byte(
    tiny: Tiny,
    prepared: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    tensor: str,
    superblock: int,
    byte: int,
    mask: int,
    named: str,
    lowering: str,
) -> None:
    """In the file that the engine's weights come from: what is off first, its row, and the very byte."""
    folder = tmp_path / "x"
    shutil.copytree(prepared, folder, ignore=shutil.ignore_patterns("canonical", "*.oracle.json"))
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps({**plan, "lowering": lowering}))
    with_flipped_byte(tiny("q4_k_m"), folder / "lowered" / "model.gguf", tensor, superblock, byte, mask)
    code, shown = run([str(folder), "--backend", "oracle"], capsys)
    assert code == accuracy.EXIT_FAILED
    verdict = shown.rstrip().splitlines()[-1]
    assert verdict.startswith("FAILED: first off at " + ".".join(tensor.split(".")[:2]))
    assert named in verdict
    # Rows of eh_proj have two superblocks, the others of these one.
    per_row = 2 if "eh_proj" in tensor else 1
    place = f"row {superblock // per_row}, superblock {superblock % per_row}, byte {byte}"
    assert f"other bytes than the model's in {tensor}, {place}" in verdict


@pytest.mark.parametrize("name", ["q4_k_m", "mixed_types", "other_types", "tied_no_head_norm"])
def test_any_flipped_bit_of_any_weight(tiny: Tiny, tmp_path: Path, name: str) -> None:
    """Of every tensor that engines read, whatever its type, in whatever row: it is named, to the byte."""
    export, known = tmp_path / "export", tmp_path / "weights.npz"
    manifest = export_model(tiny(name), export, target="tensorrt")
    weight_bytes.remember(export, manifest, known)
    assert weight_bytes.damages(export, manifest, known)[0] == []
    places = {}
    for role in ("trunk", "draft"):
        for tensor in external_weights(load_graph(manifest.file(export, role))):
            entries = {entry.key: entry.value for entry in tensor.external_data}
            places[tensor.name] = (entries["location"], int(entries["offset"]), tuple(tensor.dims))
    files = {file: (export / file).read_bytes() for file, _, _ in places.values()}
    rng = np.random.default_rng(5)
    for tensor, (file, offset, (rows, blocks, block_bytes)) in places.items():
        row, block, byte = (int(rng.integers(n)) for n in (rows, blocks, block_bytes))
        content = bytearray(files[file])
        content[offset + (row * blocks + block) * block_bytes + byte] ^= 1 << int(rng.integers(8))
        (export / file).unlink()  # the model's own file may be the same
        (export / file).write_bytes(content)
        (damage,) = weight_bytes.damages(export, manifest, known)[0]
        place = (damage.tensor, damage.rows, damage.row, damage.bytes)
        assert place == (tensor, 1, row, (block * block_bytes + byte,))
        (export / file).write_bytes(files[file])
    assert len(places) > 20


def test_a_row_that_no_text_has(tiny: Tiny, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One scale byte of one superblock of the embedding, of a token that the passes have not."""
    folder, report = tmp_path / "x", tmp_path / "r.json"
    shutil.copytree(prepared, folder, ignore=shutil.ignore_patterns("canonical"))
    used = {int(token) for feed in load_feeds(folder / "trunk.npz") for token in feed["tokens"]}
    row = next(token for token in range(1, 300) if token not in used)
    with_flipped_byte(tiny("q4_k_m"), folder / "lowered" / "model.gguf", "token_embd.weight", row, 4, 1)
    code, shown = run([str(folder), "--backend", "oracle", "--json", str(report)], capsys)
    said = (
        f"FAILED: other bytes than the model's in token_embd.weight, row {row}, superblock 0, byte 4; these passes do"
    )
    assert code == accuracy.EXIT_FAILED and shown.splitlines()[-1].startswith(said)
    found = json.loads(report.read_text())
    assert not found["passed"] and found["first_off"] is None and found["weights"]["damaged"][0]["row"] == row
    ran = subprocess.run(
        [sys.executable, "-c", POLYGRAPHY, "run", "--load-outputs", str(folder / "trunk.onnxruntime.json"),
         str(folder / "trunk.oracle.json"), "--compare-func-script", str(folder / "trunk.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 1 and f"token_embd.weight, row {row}, superblock 0, byte 4" in ran.stdout


def test_bytes_that_only_the_equations_read(tiny: Tiny, prepared: Path, tmp_path: Path) -> None:
    """Engines have decay and the like from the graph: it is the file that is damaged, not both forms."""
    folder = tmp_path / "x"
    shutil.copytree(prepared, folder, ignore=shutil.ignore_patterns("canonical"))
    with_flipped_byte(tiny("q4_k_m"), folder / "lowered" / "model.gguf", "blk.2.ssm_a", 0, 2, 1)
    ran = run_main(accuracy.main, folder, "--backend", "oracle")
    assert ran.code == 4 and "model.gguf: its content is not what was exported" in ran.err


def test_numbers_that_are_none(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attention = semantics.OPS[ops.GATED_ATTENTION.name]

    def broken(inputs: list[np.ndarray], at: semantics.Attributes) -> list[np.ndarray]:
        rows, cache = attention(inputs, at)
        return [rows * np.nan, cache]

    monkeypatch.setitem(semantics.OPS, ops.GATED_ATTENTION.name, broken)
    code, shown = run([str(prepared), "--backend", "oracle", "--json", str(tmp_path / "r.json")], capsys)
    assert code == accuracy.EXIT_FAILED and "FAILED: first off at blk.3/attention" in shown
    found = json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)
    logits = next(each for each in found["passes"][0]["places"] if each["name"] == "logits")
    assert (logits["kl_mean"], logits["top1"], logits["ok"]) == (None, 0.0, False)


def test_a_folder_of_an_older_form(prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared, tmp_path / "x", ignore=shutil.ignore_patterns("canonical"))
    plan = json.loads((prepared / "plan.json").read_text())
    (tmp_path / "x" / "plan.json").write_text(json.dumps({**plan, "format": 1}))
    run_main(accuracy.main, tmp_path / "x").refused(4, "not prepared (format 1, wanted 2); run `python -m engines.acc")


@pytest.mark.parametrize(
    ("name", "content"),
    [("trunk.npz", None), ("draft.npz", b""), ("weights.npz", None)]
    + [("trunk.onnxruntime.json", content) for content in (None, b"", b"{}", b"[]")],
)
def test_files_of_the_folder_that_are_damaged(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes | None
) -> None:
    """Written half, or emptied: not a build that is off."""
    folder = tmp_path / "x"
    shutil.copytree(prepared, folder)
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: len(whole) // 2] if content is None else content)
    assert accuracy.main([str(folder), "--backend", "oracle"]) == 4
    shown = capsys.readouterr()
    assert re.fullmatch(rf"error: \S*{re.escape(name)}: (cannot be read|holds) .*\n", shown.err), shown
    if name.endswith("json") and content is None:
        assert accuracy.main([str(folder), "--backend", "oracle", "--again"]) == 0


def test_what_passes_grows_with_depth() -> None:
    later = SHORT.after(64)
    assert SHORT.after(1) == SHORT and (later.nmse, later.top1) == (64 * SHORT.nmse, SHORT.top1)
    assert LONG.after(640).nmse == 5e-3 and LONG.after(64).channel == 3e-2  # faults come to more
    assert INT8_CACHE.after(1) == INT8_CACHE and INT8_CACHE.after(64).nmse == 5e-3


def test_half_precision_within_what_kernels_round() -> None:
    """The state's values tell, where its error is within TensorRT's tolerance; in a pass of any length."""
    rng = np.random.default_rng(0)
    want = rng.normal(size=(4, 64, 64)).astype(np.float32)
    rounded = want.astype(np.float16).astype(np.float32)
    for tolerance in (SHORT, LONG):
        assert measure("blk.0.state", want * (1 + 1e-5), want, tolerance).ok
        found = measure("blk.0.state", rounded, want, tolerance)
        assert found.nmse < 1e-6 and not found.ok
        assert suspect([found]).startswith("the precision of the recurrent state: every value of it is a float16")
        assert suspect([found], layers=True) == suspect([found])
    assert measure("blk.0/gdn", rounded, want, SHORT).ok  # what is rounded is the state


def test_a_layer_that_is_wrong_as_one_node_alone(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layer = semantics.OPS[ops.GATED_DELTA_NET_LAYER.name]
    monkeypatch.setitem(semantics.OPS, ops.GATED_DELTA_NET_LAYER.name, lambda x, at: layer([-x[0], *x[1:]], at))
    folder = tmp_path / "x"
    shutil.copytree(prepared, folder, ignore=shutil.ignore_patterns("canonical"))
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps({**plan, "lowering": "layers"}))
    code, shown = run([str(folder), "--backend", "oracle"], capsys)
    assert code == accuracy.EXIT_FAILED
    assert "suspect what makes a layer one node" in shown.splitlines()[-1]


def test_an_export_that_was_damaged(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export_model(tiny("q4_k_m"), tmp_path / "engines", target="tensorrt")
    with_flipped_byte(tiny("q4_k_m"), tmp_path / "engines" / "model.gguf", *FLIPS[0][:4])
    flags = ["--export", str(tmp_path / "engines")]
    code, shown = run([str(tiny("q4_k_m")), "-o", str(tmp_path / "x"), *SMALL, *flags], capsys)
    assert code == accuracy.EXIT_FAILED and FLIPS[0][-1] in shown


def test_a_smaller_head_for_the_drafts(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = ["--draft-head-rows", "300", "--draft-head-type", "q4_k"]
    code, shown = run([str(tiny("q4_k_m")), "-o", str(tmp_path / "x"), *SMALL, *head], capsys)
    assert code == 0, shown


def test_the_trunk_alone(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a file that promises a head and has none."""
    flags = [str(tiny("nextn_promised")), "-o", str(tmp_path / "x"), *SMALL]
    assert run(flags, capsys)[0] == 3
    code, shown = run([*flags, "--no-draft"], capsys)
    assert code == 0 and shown.rstrip().endswith("passed") and "draft" not in shown


def test_refusals(tiny: Tiny, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tiny("q4_k_m"))
    export_model(tiny("q4_k_m"), tmp_path / "canonical")
    export_model(tiny("mixed_types"), tmp_path / "other", target="tensorrt")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    x = str(tmp_path / "x")
    for code, flags, says in (
        (2, [model], "-o DIR: say where"),
        (2, ["missing.gguf"], "missing.gguf: no such file or folder"),
        (2, [model, "-o", x, "--tokens", "0"], "--tokens 0: wanted 1 to"),
        (2, [model, "-o", x, "--tokens", "4"], "wanted more than --max-draft . 1"),
        (2, [model, "-o", x, "--max-draft", "9"], "--max-draft 9"),
        (2, [model, "-o", x, "--text", "none"], "--text none: cannot be read"),
        (2, [model, "-o", str(tmp_path / "full")], "holds something else"),
        (2, [model, "-o", x, "--export", str(tmp_path / "canonical")], "exported for onnxruntime"),
        (2, [model, "-o", x, "--export", str(tmp_path / "other")], "exported from another model"),
        (2, [model, "-o", x, "--export", str(prepared / "lowered"), "--draft-head-rows", "300"], "another LM head"),
        (2, [str(prepared), "-o", x], "is prepared already"),
        (2, [str(prepared), "--no-draft"], "is prepared already"),
        (2, [str(prepared), "--draft-head-rows", "100"], "is exported already"),
        (4, [str(tmp_path / "full")], "not prepared"),
        (3, [str(ROOT / "README.md"), "-o", x], "README.md"),
    ):
        assert accuracy.main([*flags, "--backend", "oracle"]) == code, flags
        assert re.search(says, capsys.readouterr().err), flags


def test_ops_are_those_of_the_tests_oracles(prepared: Path) -> None:
    """Of two that share no code: node by node over what a pass feeds each."""
    plan, manifest = load_plan(prepared)
    graph = engine_graph(prepared, "trunk", plan, manifest)
    for feed in load_feeds(prepared / "trunk.npz"):
        with SemanticsRunner(graph) as runner:
            names = runner.get_input_metadata(use_numpy_dtypes=False)
            wide = {name: feed[name].astype(np.float32) for name in names if name.endswith("cache")}
            got = runner.infer({name: feed[name] for name in names} | wide, check_inputs=False)
        inside = [each for each in graph.model.graph.initializer if each.name not in graph.weights]
        values = {each.name: numpy_helper.to_array(each) for each in inside} | dict(feed)
        values |= {name: array.view(np.uint8) for name, array in graph.weights.items()}
        for node in graph.model.graph.node:
            at = {each.name: helper.get_attribute_value(each) for each in node.attribute}
            results = (_PLUGINS if node.domain else _NATIVE)[node.op_type]([values[name] for name in node.input], at)
            values.update(zip(node.output, results, strict=True))
        for name, array in got.items():
            if not name.endswith("cache.out"):  # float16 there
                np.testing.assert_allclose(array, values[name], rtol=1e-3, atol=1e-3, err_msg=name)


def test_int8_rows() -> None:
    values = np.random.default_rng(1).standard_normal((2, 5, 3, 128)).astype(np.float32)
    values[0, 0, 0, :64] = 0
    rows = int8_rows.encode(values)
    assert np.array_equal(rows, int8_oracle.encode(values))
    np.testing.assert_allclose(int8_rows.decode(rows), int8_oracle.decode(rows), rtol=1e-6)


def test_polygraphy_reads_what_was_left(prepared: Path) -> None:
    """The comparison of both sides' outputs by Polygraphy's command line, and one that fails."""
    ours, theirs = prepared / "trunk.oracle.json", prepared / "trunk.onnxruntime.json"
    assert accuracy.main([str(prepared), "--backend", "oracle"]) == 0
    command = [sys.executable, "-c", POLYGRAPHY, "run", "--load-outputs", str(theirs), str(ours)]
    command += ["--compare-func-script", str(prepared / "trunk.py")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run(command, cwd=ROOT, env=env, capture_output=True).returncode == 0
    swapped = [str(prepared / "draft.oracle.json") if word == str(ours) else word for word in command]
    assert subprocess.run(swapped, cwd=ROOT, env=env, capture_output=True).returncode != 0
