"""Geometries that the TensorRT plugins do not take (the ``refuses`` of `plugins.ops`), found first."""

from __future__ import annotations

from pathlib import Path

from engines.errors import ModelFileError
from export.config import ModelConfig


def check_plugins_take(config: ModelConfig, path: Path) -> None:
    """Raise ModelFileError (unsupported) for a geometry that `plugins.ops` lists as refused."""
    attention, gdn = config.attention, config.gdn
    checks = (
        (attention.head_dim in (32, 64, 128, 256), f"attention heads of {attention.head_dim}", "32, 64, 128 or 256"),
        (
            attention.num_heads // attention.num_kv_heads <= 8,
            f"{attention.num_heads // attention.num_kv_heads} query heads to a KV head",
            "8 at most",
        ),
        (gdn.head_dim in (32, 64, 128), f"Gated DeltaNet heads of {gdn.head_dim}", "32, 64 or 128"),
        (2 <= gdn.conv_kernel <= 8, f"a convolution over {gdn.conv_kernel} tokens", "2 to 8"),
        (gdn.num_v_heads % 2 == 0, f"{gdn.num_v_heads} value heads", "an even number"),
    )
    for fits, found, wanted in checks:
        if not fits:
            raise ModelFileError(
                "unsupported", f"{path}: has {found}; the TensorRT plugins take {wanted}; use --target onnxruntime"
            )
