"""Bytes of weights that a pass reads: every matrix once, the embedding only where it is the LM head as well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from export.exporter import export_model
from export.gguf_file import GGUFFile
from tests.vocabulary_files import TRAINED_MODEL


def matrices(path: Path, draft_layer: int) -> tuple[int, int]:
    """(trunk, draft): bytes of all quantised matrices but the embedding; both take the LM head."""
    tensors = GGUFFile.open(path).tensors
    sizes = {name: tensor.nbytes for name, tensor in tensors.items() if tensor.ggml_type.name.startswith("Q")}
    head = sizes["output.weight"]
    draft = sum(size for name, size in sizes.items() if name.startswith(f"blk.{draft_layer}."))
    rest = sum(sizes.values()) - sizes["token_embd.weight"] - head - draft
    return rest + head, draft + head


def test_in_tensorrt_form(tmp_path: Path) -> None:
    manifest = export_model(TRAINED_MODEL, tmp_path / "out", target="tensorrt")
    trunk, draft = matrices(TRAINED_MODEL, 8)
    assert (manifest.read_nbytes["trunk"], manifest.read_nbytes["draft"]) == (trunk, draft)


def test_in_canonical_form(tmp_path: Path) -> None:
    """Scales and offsets of blocks are float32 there, and small tensors lie in the same file."""
    manifest = export_model(TRAINED_MODEL, tmp_path / "out")
    trunk, draft = matrices(TRAINED_MODEL, 8)
    assert trunk < manifest.read_nbytes["trunk"] < 1.6 * trunk
    assert draft < manifest.read_nbytes["draft"] < 1.6 * draft
    without = export_model(TRAINED_MODEL, tmp_path / "out", draft=False)
    assert without.read_nbytes == {"trunk": manifest.read_nbytes["trunk"]}


@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt"])
def test_a_tied_embedding_is_read_as_the_head(tiny: Callable[[str], Path], tmp_path: Path, target: str) -> None:
    tied, copied = (export_model(tiny(name), tmp_path / name, target=target) for name in ("tied", "tied_copied"))
    assert tied.read_nbytes == copied.read_nbytes
