"""Trunk and NextN head of a qwen35 GGUF in float64, whole sequences at a time: the reference for graphs and engines.

Written from the architecture's equations, slow and plain: no cache, no chunks, a full causal matrix. Shares nothing
with the product; weights come through the gguf package.   Sources: llama.cpp's qwen35 graph (order of halves, heads and
norms), YaRN (Peng et al., 2023) with llama.cpp's defaults.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize

from tests.oracle import gated_delta_net as gdn
from tests.oracle.gated_delta_net import F64, sigmoid


@dataclass
class Rows:
    """What a model gives for T tokens: logits [T, V], hidden [T, D] (after the last norm), and the state after them.

    state: blk.N.state [HV, DK, DV], blk.N.conv [kernel - 1, C], blk.N.key_cache, blk.N.value_cache [KV, T, head_dim].
    """

    logits: F64
    hidden: F64
    state: dict[str, F64]


class Model:
    """A model file, its weights widened to float64 as they are first used."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._fields = {key: field.contents() for key, field in reader.fields.items()}
        self._weights: dict[str, F64] = {}
        self.num_blocks = int(self.key("block_count"))
        self.num_layers = self.num_blocks - int(self.key("nextn_predict_layers", 0))
        self.eps = float(self.key("attention.layer_norm_rms_epsilon"))

    def key(self, name: str, default: Any = None) -> Any:
        """Metadata value ``qwen35.<name>``."""
        return self._fields[f"qwen35.{name}"] if default is None else self._fields.get(f"qwen35.{name}", default)

    def weight(self, name: str) -> F64:
        """A tensor by its full name, row-major [out, in]."""
        if name not in self._weights:
            tensor = self._tensors[name]
            shape = [int(size) for size in reversed(tensor.shape)]
            values = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
            self._weights[name] = values.astype(np.float64)
        return self._weights[name]

    def first_of(self, *names: str) -> F64:
        """The first of these tensors that the file has."""
        return self.weight(next(name for name in names if name in self._tensors))

    def trunk(self, tokens: Sequence[int]) -> Rows:
        """The trunk over a fresh sequence."""
        x = self.weight("token_embd.weight")[list(tokens)]
        state: dict[str, F64] = {}
        for layer in range(self.num_layers):
            full = (layer + 1) % int(self.key("full_attention_interval")) == 0
            x = self._block(x, layer, full, state)
        hidden = rms_norm(x, self.weight("output_norm.weight"), self.eps)
        return Rows(hidden @ self.first_of("output.weight", "token_embd.weight").T, hidden, state)

    def head(self, tokens: Sequence[int], hidden_before: F64) -> Rows:
        """The NextN head over a fresh sequence: row p takes token p and ``hidden_before[p]``, the trunk's hidden of
        p - 1 (or a drafted one), and guesses token p + 1."""
        name = f"blk.{self.num_layers}.nextn."
        table = self.first_of(name + "embed_tokens.weight", "token_embd.weight")
        e = rms_norm(table[list(tokens)], self.weight(name + "enorm.weight"), self.eps)
        h = rms_norm(hidden_before, self.weight(name + "hnorm.weight"), self.eps)
        x = np.hstack([e, h]) @ self.weight(name + "eh_proj.weight").T
        state: dict[str, F64] = {}
        x = self._block(x, self.num_layers, True, state)
        out = rms_norm(x, self.first_of(name + "shared_head_norm.weight", "output_norm.weight"), self.eps)
        lm_head = self.first_of(name + "shared_head_head.weight", "output.weight", "token_embd.weight")
        return Rows(out @ lm_head.T, out, state)

    def _block(self, x: F64, layer: int, full: bool, state: dict[str, F64]) -> F64:
        def w(leaf: str) -> F64:
            return self.weight(f"blk.{layer}.{leaf}.weight")

        normed = rms_norm(x, w("attn_norm"), self.eps)
        x = x + (self._attention if full else self._delta_net)(normed, layer, state)
        normed = rms_norm(x, w("post_attention_norm"), self.eps)
        gate = normed @ w("ffn_gate").T
        return x + (gate * sigmoid(gate) * (normed @ w("ffn_up").T)) @ w("ffn_down").T

    def _delta_net(self, a: F64, layer: int, state: dict[str, F64]) -> F64:
        def w(leaf: str) -> F64:
            return self.weight(f"blk.{layer}.{leaf}")

        constants = gdn.Layer(
            k_heads=int(self.key("ssm.group_count")),
            v_heads=int(self.key("ssm.time_step_rank")),
            conv_weight=w("ssm_conv1d.weight"),
            a=w("ssm_a"),
            dt_bias=w("ssm_dt.bias"),
            norm=w("ssm_norm.weight"),
            eps=self.eps,
        )
        qkv, z, alpha, beta = (
            a @ w(leaf).T for leaf in ("attn_qkv.weight", "attn_gate.weight", "ssm_alpha.weight", "ssm_beta.weight")
        )
        window = np.zeros((constants.conv_weight.shape[1] - 1, qkv.shape[1]))
        start = np.zeros((constants.v_heads, constants.dim, constants.dim))
        steps = gdn.run(constants, qkv, z, alpha, beta, window, start)
        state[f"blk.{layer}.state"], state[f"blk.{layer}.conv"] = steps.states[-1], steps.windows[-1]
        return steps.y @ w("ssm_out.weight").T

    def _attention(self, a: F64, layer: int, state: dict[str, F64]) -> F64:
        def w(leaf: str) -> F64:
            return self.weight(f"blk.{layer}.{leaf}.weight")

        n, dim = len(a), int(self.key("attention.key_length"))
        heads, kv_heads = int(self.key("attention.head_count")), int(self.key("attention.head_count_kv"))
        query_gate = (a @ w("attn_q").T).reshape(n, heads, 2, dim)  # per head: query, then gate
        query, gate = query_gate[:, :, 0], query_gate[:, :, 1]
        key = (a @ w("attn_k").T).reshape(n, kv_heads, dim)
        value = (a @ w("attn_v").T).reshape(n, kv_heads, dim)
        query = self._rope(rms_norm(query, w("attn_q_norm"), self.eps))
        key = self._rope(rms_norm(key, w("attn_k_norm"), self.eps))
        out = np.empty((n, heads, dim))
        for h in range(heads):
            of = h // (heads // kv_heads)
            scores = query[:, h] @ key[:, of].T / math.sqrt(dim)
            scores[np.triu_indices(n, 1)] = -np.inf
            share = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, h] = share / share.sum(axis=1, keepdims=True) @ value[:, of]
        state[f"blk.{layer}.key_cache"] = key.transpose(1, 0, 2)
        state[f"blk.{layer}.value_cache"] = value.transpose(1, 0, 2)
        return (out * sigmoid(gate)).reshape(n, -1) @ w("attn_output").T

    def _rope(self, x: F64) -> F64:
        """Rotate pairs (i, i + n/2) of the first n dims of every head by position.   x: [T, heads, dim]"""
        frequencies, factor = self.rope
        half = len(frequencies)
        angle = np.arange(len(x))[:, None, None] * frequencies
        cos, sin = factor * np.cos(angle), factor * np.sin(angle)
        first, second = x[..., :half], x[..., half : 2 * half]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]], axis=-1)

    @cached_property
    def rope(self) -> tuple[F64, float]:
        """Frequencies [n / 2], and the factor on cos and sin."""
        dim, theta = int(self.key("rope.dimension_count")), float(self.key("rope.freq_base"))
        plain = np.array([theta ** (-2 * i / dim) for i in range(dim // 2)])
        if self.key("rope.scaling.type", "none") == "none":
            return plain, 1.0
        s, orig = float(self.key("rope.scaling.factor")), int(self.key("rope.scaling.original_context_length"))

        def pair(turns: float) -> float:
            return dim * math.log(orig / (2 * math.pi * turns)) / (2 * math.log(theta))

        low, high = max(0, math.floor(pair(32))), min(dim - 1, math.ceil(pair(1)))
        kept = [1 - min(1.0, max(0.0, (i - low) / max(0.001, high - low))) for i in range(dim // 2)]
        scaled = [f * k + f / s * (1 - k) for f, k in zip(plain, kept, strict=True)]
        return np.array(scaled), 1 + 0.1 * math.log(s)


def rms_norm(x: F64, weight: F64, eps: float) -> F64:
    return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + eps) * weight
