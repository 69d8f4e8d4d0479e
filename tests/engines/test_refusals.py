"""A fault of a model file is found when engines are built: one line that says what it is, exit code 3, nothing left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engines.build import main


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("trunc_data_mid", ("cut off", "size needed", "found")),
        ("html_page", ("HTML",)),
        ("lfs_pointer", ("Git LFS",)),
        ("array_bomb", ("size needed",)),
        ("big_endian", ("big-endian",)),
        ("split_missing", ("split", "4 parts")),
        ("split_later", ("part 2", "first part")),
        ("empty", ("0 bytes",)),
        ("mmproj", ("projector", "text model")),
        ("nextn_promised", ("NextN", "--no-draft")),
        ("nextn_only", ("draft head", "without a trunk")),
        ("nan_norm", ("blk.1.attn_norm.weight", "nan")),
        ("inf_block", ("blk.0.ffn_gate.weight", "inf", "scale")),
        ("rope_scaling_unknown", ("rope.scaling.type", "spiral")),
    ],
)
def test_bad_model_file(
    tiny: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, words: tuple[str, ...]
) -> None:
    model = tiny(name)
    assert main([str(model), "-o", str(tmp_path / "x")]) == 3
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(f"error: {model}: ") and said.err.count("\n") == 1
    assert all(word in said.err for word in words), said.err
    assert list(tmp_path.iterdir()) == []
