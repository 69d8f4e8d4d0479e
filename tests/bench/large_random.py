"""A random GGUF of the 0.8B geometry in Q4_K_M, half a gigabyte in a few seconds: for speed, not for text.

Four blocks and the NextN block are random; the 24 layers repeat them, and so do the rows of the embedding.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.tiny_gguf import Spec, TinyModel, build, q4_k_m_type
from tests.tiny_vocab import vocabulary_metadata

SPEC_08B = Spec(
    embd=1024,
    ff=3584,
    vocab=248320,
    layers=24,
    interval=4,
    heads=8,
    kv_heads=2,
    head_dim=256,
    rope_dim=64,
    sections=(11, 11, 10, 0),
    theta=1e7,
    state=128,
    k_heads=16,
    v_heads=16,
    context=262144,
    tied=True,
    types="q4_k_m",
)


def write_08b(path: Path) -> Path:
    """Write ``path`` and return it."""
    spec = SPEC_08B
    source = build(replace(spec, layers=spec.interval, vocab=320, types="f32"))
    model = TinyModel(dict(source.metadata), {})
    model.metadata |= vocabulary_metadata(spec.vocab)
    model.metadata["qwen35.block_count"] = spec.num_blocks
    packed: dict[tuple[str, object], np.ndarray] = {}
    for name, values in source.tensors.items():
        for target in _targets(name, spec):
            if values.ndim == 1 or "conv1d" in name:
                model.tensors[target] = values
                continue
            kind = q4_k_m_type(target, spec)
            if (name, kind) not in packed:
                source.types[name] = kind
                packed[name, kind] = source.packed(name)
            rows = spec.vocab if target == "token_embd.weight" else len(values)
            model.types[target] = kind
            model.raw[target] = np.resize(packed[name, kind], (rows, packed[name, kind].shape[1]))
            # Only the shape is read: the raw bytes are what is written.
            model.tensors[target] = np.broadcast_to(np.float32(0), (rows, values.shape[1]))
    return model.write(path)


def _targets(name: str, spec: Spec) -> list[str]:
    """The tensors of the large model that are copies of the small one's ``name``."""
    if not name.startswith("blk."):
        return [name]
    _, block, leaf = name.split(".", 2)
    if int(block) == spec.interval:
        return [f"blk.{spec.layers}.{leaf}"]
    return [f"blk.{layer}.{leaf}" for layer in range(int(block), spec.layers, spec.interval)]
