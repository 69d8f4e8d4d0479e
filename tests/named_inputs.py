"""Named model files for tests, each the smallest that shows one trait: `write_named(name, folder)` -> path.

Broken and foreign containers, missing parts, odd numbers, unusual vocabularies, and the models of `known_text`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T
from gguf import GGUFValueType

from tests import known_text
from tests.quantize import pack
from tests.tiny_gguf import ARCHITECTURE, Spec, TinyModel, build

# Every matrix row is a whole number of superblocks.
BLOCK_SPEC = Spec(embd=256, ff=256, head_dim=64, state=64, types="q4_k_m")

# M-RoPE sections of the released models, whose heads rotate 64 dims.
_SECTIONS = (11, 11, 10, 0)

# The shapes that differ in kind between the released sizes and their conversions.
GEOMETRIES: dict[str, Spec] = {
    "f32": Spec(),
    "heads_256": Spec(head_dim=256, rope_dim=64, sections=_SECTIONS, theta=1e7, state=128, k_heads=2, v_heads=6),
    "heads_9b": Spec(heads=16, kv_heads=4, k_heads=16, v_heads=32),
    # One query head per KV head, and head counts that are no multiple of a vector's width.
    "heads_odd": Spec(heads=3, kv_heads=3, k_heads=3, v_heads=9),
    "yarn": Spec(yarn_factor=4.0, yarn_orig_ctx=64),
    "tied_no_head_norm": Spec(tied=True, shared_head_norm=False),
    "q4_k_m": BLOCK_SPEC,
}

HTML_PAGE = b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head><body>Please sign in.</body></html>\n"
LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345678\n"
)
# One key, an array of 2^63 integers, in a file of 50 bytes.
ARRAY_BOMB = (
    b"GGUF"
    + struct.pack("<IQQ", 3, 0, 1)
    + struct.pack("<Q2s", 2, b"ab")
    + struct.pack("<IIQ", GGUFValueType.ARRAY, GGUFValueType.UINT32, 1 << 63)
)
SPLIT_MAX_TENSORS = 20
_WIDE_PERIOD = 89  # rows


def write_named(name: str, folder: Path) -> Path:
    """Write the input ``name`` (a key of `NAMED`) into ``folder`` and return the path to give as the model."""
    return NAMED[name](folder / f"{name}.gguf")


def _spec(**changes: object) -> Callable[[Path], Path]:
    return lambda path: build(Spec(**changes)).write(path)  # type: ignore[arg-type]


def _model(make: Callable[[], TinyModel]) -> Callable[[Path], Path]:
    return lambda path: make().write(path)


def _bytes(content: bytes) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        path.write_bytes(content)
        return path

    return write


def _trunc_data_mid(path: Path) -> Path:
    """Cut off in the middle of the tensor data."""
    whole = build(Spec()).write(path).read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3])
    return path


def _split_missing(path: Path) -> Path:
    """The first of several shards, the second not there."""
    first = build(Spec()).write(path, max_tensors=SPLIT_MAX_TENSORS)
    first.with_name(first.name.replace("-00001-", "-00002-")).unlink()
    return first


def _split_later(path: Path) -> Path:
    """The second shard of a whole set, given as the model."""
    first = build(Spec()).write(path, max_tensors=SPLIT_MAX_TENSORS)
    return first.with_name(first.name.replace("-00001-", "-00002-"))


def _mmproj() -> TinyModel:
    metadata = {
        "general.architecture": "clip",
        "general.type": "mmproj",
        "clip.has_vision_encoder": True,
        "clip.projector_type": "qwen3vl_merger",
        "clip.vision.embedding_length": 64,
    }
    return TinyModel(metadata, {"v.patch_embd.weight": np.zeros((64, 48)), "mm.0.weight": np.zeros((64, 64))})


def without_draft_tensors(model: TinyModel) -> TinyModel:
    """The draft head's tensors taken out, its key left in."""
    layer = model.metadata[f"{ARCHITECTURE}.block_count"] - 1
    model.tensors = {name: v for name, v in model.tensors.items() if not name.startswith(f"blk.{layer}.")}
    return model


def _nextn_only() -> TinyModel:
    """Draft head, embedding and LM head, no trunk block."""
    model = build(Spec())
    layer = model.metadata[f"{ARCHITECTURE}.block_count"] - 1
    model.tensors = {
        name: v for name, v in model.tensors.items() if not name.startswith("blk.") or f"blk.{layer}." in name
    }
    return model


def _nextn_absent() -> TinyModel:
    model = build(Spec(draft=False))
    model.metadata[f"{ARCHITECTURE}.nextn_predict_layers"] = 0
    return model


def _tied_copied() -> TinyModel:
    model = build(Spec(tied=True))
    model.tensors["output.weight"] = model.tensors["token_embd.weight"].copy()
    return model


def _split_kinds_in_pair() -> TinyModel:
    """Matrices that an engine may multiply in one go, of different types."""
    model = build(BLOCK_SPEC)
    kinds = {
        "ffn_gate.weight": T.Q4_K,
        "ffn_up.weight": T.Q6_K,
        "attn_qkv.weight": T.Q5_K,
        "attn_gate.weight": T.Q4_K,
        "attn_q.weight": T.Q6_K,
        "attn_k.weight": T.Q8_0,
        "attn_v.weight": T.Q5_K,
        "ssm_alpha.weight": T.F32,
        "ssm_beta.weight": T.Q8_0,
    }
    model.types |= {name: kinds[leaf] for name in model.types if (leaf := name.split(".", 2)[-1]) in kinds}
    return model


def _other_types() -> TinyModel:
    """Types that have no block form of their own here, but a dequantiser in the gguf package."""
    model = build(replace(BLOCK_SPEC, types="f32"))
    others = (T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.TQ2_0, T.TQ1_0)
    matrices = [name for name, v in model.tensors.items() if v.ndim == 2 and "conv1d" not in name]
    model.types = {name: others[index % len(others)] for index, name in enumerate(matrices)}
    return model


def _type_without_dequantizer() -> TinyModel:
    model = build(BLOCK_SPEC)
    name = "blk.1.ffn_up.weight"
    model.types[name] = T.Q8_K
    model.raw[name] = np.zeros((model.tensors[name].shape[0], gguf.GGML_QUANT_SIZES[T.Q8_K][1]), np.uint8)
    return model


def _wide() -> TinyModel:
    """As wide as the layer kernel of compute capability 9.0 takes, in K-quants throughout. The rows of a layer's matrix
    repeat after a while: quick to write, and small when packed."""
    spec = replace(BLOCK_SPEC, embd=2048, ff=1024, layers=3, interval=3, head_dim=128, state=128)
    model = build(spec)
    for name, kind in model.types.items():
        # Rows of four superblocks are too short for Q6_K there.
        model.types[name] = T.Q5_K if name.endswith("ffn_down.weight") else kind
        if name.startswith("blk."):
            some = pack(model.tensors[name][:_WIDE_PERIOD], model.types[name])
            model.raw[name] = np.resize(some, (len(model.tensors[name]), some.shape[1]))
    return model


def _norms_all_one() -> TinyModel:
    model = build(Spec())
    model.tensors = {name: np.ones_like(v) if "norm" in name else v for name, v in model.tensors.items()}
    return model


def _decay(a: float, dt: float) -> Callable[[], TinyModel]:
    def make() -> TinyModel:
        model = build(Spec())
        for name, values in model.tensors.items():
            if name.endswith((".ssm_a", ".ssm_dt.bias")):
                model.tensors[name] = np.full_like(values, a if name.endswith("ssm_a") else dt)
        return model

    return make


def _nan_norm() -> TinyModel:
    model = build(Spec())
    model.tensors["blk.1.attn_norm.weight"][3] = np.nan
    return model


def _inf_block() -> TinyModel:
    """One superblock of a Q4_K matrix has an infinite scale."""
    model = build(BLOCK_SPEC)
    name = "blk.0.ffn_gate.weight"
    raw = model.packed(name).copy()
    raw[5, 0:2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    model.raw[name] = raw
    return model


def _edited(**metadata: object) -> Callable[[], TinyModel]:
    """The plain model with metadata keys (written with __ for .) set, or dropped where None."""

    def make() -> TinyModel:
        model = build(Spec())
        model.metadata |= {key.replace("__", "."): value for key, value in metadata.items()}
        model.metadata = {key: value for key, value in model.metadata.items() if value is not None}
        return model

    return make


def _bos_is_comma() -> TinyModel:
    """No BOS key, and id 11, which some loaders assume to be BOS, is a comma."""
    model = build(Spec())
    tokens = list(model.metadata["tokenizer.ggml.tokens"])
    comma = tokens.index(",")
    tokens[11], tokens[comma] = tokens[comma], tokens[11]
    model.metadata["tokenizer.ggml.tokens"] = tokens
    del model.metadata["tokenizer.ggml.add_bos_token"]
    return model


NAMED: dict[str, Callable[[Path], Path]] = {
    **{name: _model(partial(build, spec)) for name, spec in GEOMETRIES.items()},
    "q4_k_m_values": _model(lambda: build(replace(BLOCK_SPEC, dequantized=True))),
    "agreeing": _spec(agree=0.25),
    # Containers
    "array_bomb": _bytes(ARRAY_BOMB),
    "trunc_data_mid": _trunc_data_mid,
    "html_page": _bytes(HTML_PAGE),
    "lfs_pointer": _bytes(LFS_POINTER),
    "empty": _bytes(b""),
    "big_endian": lambda path: build(Spec()).write(path, endianess=gguf.GGUFEndian.BIG),
    "split_first": lambda path: build(Spec()).write(path, max_tensors=SPLIT_MAX_TENSORS),
    "split_missing": _split_missing,
    "split_later": _split_later,
    "mmproj": _model(_mmproj),
    # Parts
    "nextn_promised": _model(lambda: without_draft_tensors(build(Spec()))),
    "nextn_absent": _model(_nextn_absent),
    "nextn_only": _model(_nextn_only),
    "tied": _spec(tied=True),
    "tied_copied": _model(_tied_copied),
    "mixed_types": _model(lambda: build(replace(BLOCK_SPEC, types="mixed"))),
    "split_kinds_in_pair": _model(_split_kinds_in_pair),
    "other_types": _model(_other_types),
    "type_without_dequantizer": _model(_type_without_dequantizer),
    "wide": _model(_wide),
    # Numbers
    "norms_all_one": _model(_norms_all_one),
    "gdn_no_decay": _model(_decay(a=-1e-3, dt=-6.0)),
    "gdn_fast_decay": _model(_decay(a=-60.0, dt=20.0)),
    "nan_norm": _model(_nan_norm),
    "inf_block": _model(_inf_block),
    "yarn_keys": _spec(
        yarn_factor=4.0, yarn_orig_ctx=262144, context=1048576, theta=1e7, head_dim=64, rope_dim=64, sections=_SECTIONS
    ),
    "yarn_keys_small": _spec(yarn_factor=2.0, yarn_orig_ctx=32, context=64),
    "rope_scaling_unknown": _model(_edited(qwen35__rope__scaling__type="spiral", qwen35__rope__scaling__factor=4.0)),
    # Text
    "bigram_ring": _model(lambda: known_text.ring_model(known_text.ENDLESS)),
    "ring_stop_inside": _model(lambda: known_text.ring_model(known_text.STOP_INSIDE, perfect_draft=True)),
    "stops_at_once": _model(lambda: known_text.ring_model(known_text.STOP_AT_ONCE, perfect_draft=True)),
    "draft_perfect": _model(lambda: known_text.ring_model(known_text.ENDLESS, perfect_draft=True)),
    "bigram_for_sampling": _model(known_text.bigram_model),
    "bos_is_comma": _model(_bos_is_comma),
    "no_template": _model(_edited(tokenizer__chat_template=None)),
}
