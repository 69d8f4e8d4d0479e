"""Small random GGUFs of architecture qwen35, seeded, built in memory and written in well under a second.

    write(path, Spec())                          # float32, three Gated DeltaNet blocks, one attention, a NextN head
    model = build(Spec(types="q4_k_m"))          # edit model.metadata, model.tensors, model.types, then
    model.write(path)

Written from the format and the architecture alone: nothing of the product is used here.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T
from gguf import GGUFValueType as V
from gguf.quants import dequantize

from tests.quantize import pack
from tests.tiny_vocab import vocabulary_metadata

ARCHITECTURE = "qwen35"


@dataclass(frozen=True)
class Spec:
    """What to write. Sizes default to the smallest that keep every part; block types need embd = ff = 256 at least.

    ``types``: "f32"; "q4_k_m", llama.cpp's choice per tensor; "mixed", a spread as community files have.
    ``dequantized``: the values of those types, stored as float32.
    ``agree``: scale of all block outputs; at 0.25 logits depend mostly on the last token, and the head, made to
    copy the trunk, often drafts right. 0: unrelated.
    """

    embd: int = 64
    ff: int = 128
    vocab: int = 320
    layers: int = 4
    interval: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    rope_dim: int = 16
    sections: tuple[int, ...] = (3, 3, 2, 0)
    theta: float = 10000.0
    state: int = 32
    k_heads: int = 2
    v_heads: int = 4
    conv_kernel: int = 4
    context: int = 4096
    yarn_factor: float = 0.0
    yarn_orig_ctx: int = 64
    types: str = "f32"
    dequantized: bool = False
    agree: float = 0.0
    tied: bool = False
    draft: bool = True
    shared_head_norm: bool = True
    seed: int = 7

    @property
    def inner(self) -> int:
        return self.state * self.v_heads

    @property
    def conv_dim(self) -> int:
        return 2 * self.state * self.k_heads + self.inner

    @property
    def num_blocks(self) -> int:
        return self.layers + self.draft


@dataclass
class TinyModel:
    """A GGUF in memory, to be edited. ``raw`` bytes, where given, are written in place of a tensor's packed values."""

    metadata: dict[str, Any]
    tensors: dict[str, np.ndarray]
    types: dict[str, T] = field(default_factory=dict)
    raw: dict[str, np.ndarray] = field(default_factory=dict)

    def packed(self, name: str) -> np.ndarray:
        """The bytes written for a tensor, [rows, row bytes] u8."""
        if name in self.raw:
            return self.raw[name]
        values = self.tensors[name]
        return pack(values.reshape(-1, values.shape[-1]), self.types.get(name, T.F32))

    def values(self, name: str) -> np.ndarray:
        """The float32 values a reader gets, in the tensor's shape."""
        return dequantize(self.packed(name), self.types.get(name, T.F32)).reshape(self.tensors[name].shape)

    def dequantize(self) -> None:
        """Keep the values, drop the types: all float32 from here on."""
        self.tensors = {name: self.values(name) for name in self.tensors}
        self.types, self.raw = {}, {}

    def write(self, path: Path, max_tensors: int = 0, endianess: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE) -> Path:
        """Write ``path``; with ``max_tensors`` a split set of that many per shard. Returns the (first) file."""
        metadata = dict(self.metadata)
        logger = logging.getLogger("gguf.gguf_writer")
        was_disabled, logger.disabled = logger.disabled, True
        try:
            writer = gguf.GGUFWriter(
                path, metadata.pop("general.architecture"), endianess=endianess, split_max_tensors=max_tensors
            )
            for key, value in metadata.items():
                writer.add_key_value(key, *_typed(value))
            for name, values in self.tensors.items():
                if self.types.get(name, T.F32) == T.F32:
                    writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
                else:
                    raw = self.packed(name)
                    writer.add_tensor(
                        name, raw, raw_shape=(*values.shape[:-1], raw.shape[-1]), raw_dtype=self.types[name]
                    )
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
        finally:
            logger.disabled = was_disabled
        return writer.format_shard_names(Path(path))[0]


def write(path: Path, spec: Spec) -> Path:
    """Write the model of ``spec`` and return its path."""
    return build(spec).write(path)


def build(spec: Spec) -> TinyModel:
    """The model of ``spec``, in memory."""
    assert sum(spec.sections) == spec.rope_dim // 2
    model = TinyModel({**_geometry(spec), **vocabulary_metadata(spec.vocab)}, _weights(spec))
    if spec.types != "f32":
        choose = {"q4_k_m": q4_k_m_type, "mixed": mixed_type}[spec.types]
        for name, values in model.tensors.items():
            # As in real files: vectors and the convolution kernel are never quantised.
            if values.ndim > 1 and "conv1d" not in name:
                model.types[name] = choose(name, spec)
        if spec.dequantized:
            model.dequantize()
    return model


def q4_k_m_type(name: str, spec: Spec) -> T:
    """llama.cpp's Q4_K_M choice for a matrix of this architecture."""
    if name == "token_embd.weight":
        return T.Q6_K if spec.tied else T.Q4_K
    if name == "output.weight":
        return T.Q6_K
    block, leaf = int(name.split(".")[1]), name.split(".", 2)[2]
    eighth = spec.num_blocks // 8
    more_bits = block < eighth or block >= 7 * spec.num_blocks // 8 or (block - eighth) % 3 == 2
    finer = leaf in ("ffn_down.weight", "attn_v.weight", "attn_qkv.weight")
    return T.Q6_K if finer and more_bits else T.Q4_K


def mixed_type(name: str, spec: Spec) -> T:
    """Every native type somewhere, as calibrated community files spread them."""
    leaf = name.split(".", 2)[2] if name.startswith("blk.") else name
    chosen = {
        "token_embd.weight": T.Q8_0,
        "attn_qkv.weight": T.Q5_K,
        "attn_gate.weight": T.Q5_K,
        "nextn.eh_proj.weight": T.Q8_0,
        "ssm_alpha.weight": T.BF16,
        "ssm_beta.weight": T.Q8_0,
        "ssm_out.weight": T.Q6_K,
        "attn_k.weight": T.F16,
    }
    return chosen.get(leaf) or q4_k_m_type(name, spec)


def _typed(value: Any) -> tuple[Any, V, V | None]:
    """(value, type, item type) as files of this architecture store them."""
    if isinstance(value, np.ndarray):
        items = {"f": V.FLOAT32, "b": V.BOOL, "i": V.INT32, "u": V.UINT32}
        return value.tolist(), V.ARRAY, items[value.dtype.kind]
    if isinstance(value, list):
        return value, V.ARRAY, V.STRING if isinstance(value[0], str) else V.INT32
    kinds = {bool: V.BOOL, int: V.UINT32, float: V.FLOAT32, str: V.STRING}
    return value, kinds[type(value)], None


def _geometry(spec: Spec) -> dict[str, Any]:
    values: dict[str, Any] = {
        "block_count": spec.num_blocks,
        "context_length": spec.context,
        "embedding_length": spec.embd,
        "feed_forward_length": spec.ff,
        "attention.head_count": spec.heads,
        "attention.head_count_kv": spec.kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": spec.rope_dim,
        "rope.dimension_sections": list(spec.sections),
        "rope.freq_base": spec.theta,
        "ssm.conv_kernel": spec.conv_kernel,
        "ssm.state_size": spec.state,
        "ssm.group_count": spec.k_heads,
        "ssm.time_step_rank": spec.v_heads,
        "ssm.inner_size": spec.inner,
        "full_attention_interval": spec.interval,
    }
    if spec.draft:
        values["nextn_predict_layers"] = 1
    if spec.yarn_factor:
        values["rope.scaling.type"] = "yarn"
        values["rope.scaling.factor"] = float(spec.yarn_factor)
        values["rope.scaling.original_context_length"] = spec.yarn_orig_ctx
    named = {f"{ARCHITECTURE}.{key}": value for key, value in values.items()}
    return {"general.architecture": ARCHITECTURE, "general.name": "tiny-random-qwen35", **named}


def _weights(spec: Spec) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(spec.seed)
    tensors: dict[str, np.ndarray] = {}
    branch = spec.agree or 1.0

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * (gain / np.sqrt(columns))).astype(np.float32)

    def norm(size: int) -> np.ndarray:
        return (1.0 + 0.2 * rng.standard_normal(size)).astype(np.float32)

    out_norm = norm(spec.embd)
    tensors["token_embd.weight"] = rng.standard_normal((spec.vocab, spec.embd)).astype(np.float32)
    tensors["output_norm.weight"] = out_norm
    if not spec.tied:
        tensors["output.weight"] = matrix(spec.vocab, spec.embd, 3.0)
    for layer in range(spec.num_blocks):
        attention = layer >= spec.layers or (layer + 1) % spec.interval == 0
        mixer = _attention_weights if attention else _delta_net_weights
        block = {"attn_norm.weight": norm(spec.embd), "post_attention_norm.weight": norm(spec.embd)}
        block |= mixer(spec, rng, matrix, norm, 1.5 * branch)
        block["ffn_gate.weight"] = matrix(spec.ff, spec.embd, 1.5)
        block["ffn_up.weight"] = matrix(spec.ff, spec.embd, 1.5)
        block["ffn_down.weight"] = matrix(spec.embd, spec.ff, 1.5 * branch)
        if layer == spec.layers:
            block |= _draft_weights(spec, matrix, norm, out_norm)
        tensors |= {f"blk.{layer}.{leaf}": values for leaf, values in block.items()}
    return tensors


def _attention_weights(spec: Spec, rng: Any, matrix: Any, norm: Any, out_gain: float) -> dict[str, np.ndarray]:
    width = spec.heads * spec.head_dim
    kv_width = spec.kv_heads * spec.head_dim
    return {
        "attn_q.weight": matrix(2 * width, spec.embd, 1.5),
        "attn_k.weight": matrix(kv_width, spec.embd),
        "attn_v.weight": matrix(kv_width, spec.embd, 1.5),
        "attn_output.weight": matrix(spec.embd, width, out_gain),
        "attn_q_norm.weight": 1.5 * norm(spec.head_dim),
        "attn_k_norm.weight": 1.5 * norm(spec.head_dim),
    }


def _delta_net_weights(spec: Spec, rng: Any, matrix: Any, norm: Any, out_gain: float) -> dict[str, np.ndarray]:
    return {
        "attn_qkv.weight": matrix(spec.conv_dim, spec.embd, 1.5),
        "attn_gate.weight": matrix(spec.inner, spec.embd, 1.5),
        "ssm_conv1d.weight": 0.5 * rng.standard_normal((spec.conv_dim, spec.conv_kernel)).astype(np.float32),
        "ssm_dt.bias": rng.uniform(-3.0, 0.5, spec.v_heads).astype(np.float32),
        "ssm_a": -rng.uniform(0.3, 4.0, spec.v_heads).astype(np.float32),  # -exp(A_log)
        "ssm_beta.weight": matrix(spec.v_heads, spec.embd, 1.5),
        "ssm_alpha.weight": matrix(spec.v_heads, spec.embd, 1.5),
        "ssm_norm.weight": norm(spec.state),
        "ssm_out.weight": matrix(spec.embd, spec.inner, out_gain),
    }


def _draft_weights(spec: Spec, matrix: Any, norm: Any, out_norm: np.ndarray) -> dict[str, np.ndarray]:
    eh_proj = matrix(spec.embd, 2 * spec.embd, 1.5)
    enorm, head_norm = norm(spec.embd), norm(spec.embd)
    if spec.agree:
        copy_embedding = np.eye(spec.embd, 2 * spec.embd, dtype=np.float32)
        eh_proj, enorm, head_norm = 0.1 * eh_proj + copy_embedding, np.ones_like(enorm), out_norm
    block = {"nextn.eh_proj.weight": eh_proj, "nextn.enorm.weight": enorm, "nextn.hnorm.weight": norm(spec.embd)}
    if spec.shared_head_norm:
        block["nextn.shared_head_norm.weight"] = head_norm
    return block
