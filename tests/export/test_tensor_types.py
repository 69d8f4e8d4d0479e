"""Type classes of tensors, and the check for values that are no numbers."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as T

from engines.errors import ModelFileError
from export.config import load_config
from export.gguf_file import GGUFFile
from export.tensor_types import NATIVE_TYPES, check_finite, needs_dequantized_copy
from tests.export.edited_models import Tiny, refused


def test_types(tiny: Tiny) -> None:
    mixed = GGUFFile.open(tiny("mixed_types"))
    assert {tensor.ggml_type for tensor in mixed.tensors.values()} == NATIVE_TYPES
    assert not any(needs_dequantized_copy(tensor) for tensor in mixed.tensors.values())
    other = GGUFFile.open(tiny("other_types"))
    needing = {tensor.ggml_type for tensor in other.tensors.values() if needs_dequantized_copy(tensor)}
    assert needing == {T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.TQ2_0, T.TQ1_0}
    assert load_config(other).num_layers == 4
    file = GGUFFile.open(tiny("type_without_dequantizer"))
    refused(lambda: load_config(file), "unsupported", "'blk.1.ffn_up.weight'", "Q8_K", "Q4_K")


def test_not_finite(tiny: Tiny) -> None:
    for name, tensor, value in [
        ("nan_norm", "blk.1.attn_norm.weight", "nan"),
        ("inf_block", "blk.0.ffn_gate.weight", "inf"),
    ]:
        file = GGUFFile.open(tiny(name))
        broken = file.tensors[tensor]
        refused(partial(check_finite, broken), "content", repr(tensor), f"holds {value}")
        for each in file.tensors.values():
            if each.name != tensor:
                check_finite(each)


@pytest.mark.parametrize("name", ["mixed_types", "other_types"])
def test_finite_check_agrees_with_the_values(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Every type, an infinite or NaN bit pattern at every place: refused exactly when a value is not finite."""
    monkeypatch.setattr("export.tensor_types._CHUNK_BYTES", 512)
    file = GGUFFile.open(tiny(name))
    rng, refused_rows = np.random.default_rng(3), 0
    for tensor in {tensor.ggml_type: tensor for tensor in file.tensors.values()}.values():
        raw = np.tile(tensor.blocks()[:1], (4, 1))
        for pattern in (b"\x00\x7c", b"\xff\xff", b"\x80\x7f"):
            for column in (0, 2, int(rng.integers(0, raw.shape[1] // 2)) * 2, raw.shape[1] - 2):
                damaged = raw.copy()
                damaged[2, column : column + 2] = np.frombuffer(pattern, np.uint8)
                path = tmp_path / "rows.bin"
                path.write_bytes(damaged.tobytes())
                shape = (4, tensor.shape[-1])
                copy = dataclasses.replace(tensor, path=path, offset=0, nbytes=damaged.nbytes, shape=shape)
                if np.isfinite(copy.f32()).all():
                    check_finite(copy)
                else:
                    refused_rows += 1
                    with pytest.raises(ModelFileError, match="in row 2"):
                        check_finite(copy)
    assert refused_rows >= 10
