"""The layers of the canonical graph, one method each, over a graph, a config and the stored weights."""

from __future__ import annotations

import math

import numpy as np
from onnx import TensorProto

from export import functions
from export.config import ModelConfig, RopeConfig
from export.gguf_file import GGUFFile
from export.graph import Graph
from export.weights import Matrix, WeightStore

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


class Layers:
    """Adds layers to a graph. Activations are [T, width] float32; names follow the GGUF's tensor names."""

    def __init__(self, graph: Graph, file: GGUFFile, config: ModelConfig, store: WeightStore) -> None:
        self.graph, self.file, self.config, self.store = graph, file, config, store
        self._split: dict[tuple[str, int], tuple[str, str]] = {}

    def _matrix(self, leaf: str, layer: int | None) -> Matrix:
        return self.store.matrix(self.file.tensors[self.config.tensor(leaf, layer)])

    def _vector(self, leaf: str, layer: int | None = None, shape: tuple[int, ...] | None = None) -> str:
        tensor = self.file.tensors[self.config.tensor(leaf, layer)]
        return self.graph.weight(self.store.vector(tensor, shape or tensor.shape))

    def linear(self, x: str, leaf: str, layer: int | None = None) -> str:
        """x [T, K] -> [T, N] by the matrix ``leaf`` [N, K]."""
        matrix = self._matrix(leaf, layer)
        parts = [self.graph.weight(part) for part in matrix.parts]
        y: str
        if matrix.form is None:
            y = self.graph.op("Gemm", [x, self._as_float(matrix, parts[0])], leaf, transB=1)
            return y
        form = matrix.form
        rows, sums = self._activation_rows(x, matrix.columns, form.block_size)
        inputs = [rows, parts[0], parts[1], *([sums, parts[2]] if form.has_offset else [])]
        y = self.graph.call(
            functions.block_matmul(form.has_offset),
            inputs,
            leaf,
            K=matrix.columns,
            N=matrix.rows,
            bits=form.bits,
            block_size=form.block_size,
        )
        return self.graph.declare(y, FLOAT, ["T", matrix.rows])

    def _as_float(self, matrix: Matrix, weight: str) -> str:
        if matrix.parts[0].data_type == FLOAT:
            return weight
        y: str = self.graph.op("Cast", [weight], "f32", to=FLOAT)
        return y

    def _activation_rows(self, x: str, width: int, block: int) -> tuple[str, str]:
        key = (x, block)
        if key not in self._split:
            rows, sums = self.graph.call(
                functions.split_activation(),
                [x],
                f"split{block}",
                block_shape=[-1, block],
                row_shape=[-1, width],
                sum_shape=[-1, width // block],
            )
            self._split[key] = rows, sums
        return self._split[key]

    def embedding(self, tokens: str, leaf: str = "token_embd", layer: int | None = None) -> str:
        """tokens [T] int64 -> rows [T, D]."""
        matrix = self._matrix(leaf, layer)
        parts = [self.graph.weight(part) for part in matrix.parts]
        y: str
        if matrix.form is None:
            y = self.graph.op("Gather", [parts[0], tokens], leaf, axis=0)
            if matrix.parts[0].data_type != FLOAT:
                y = self.graph.op("Cast", [y], "f32", to=FLOAT)
            return y
        function = functions.block_embedding(matrix.form.bits, matrix.form.has_offset)
        y = self.graph.call(function, [tokens, *parts], leaf, row_shape=[-1, matrix.columns])
        return y

    def rms_norm(self, x: str, leaf: str, layer: int | None = None) -> str:
        y: str = self.graph.op(
            "RMSNormalization", [x, self._vector(leaf, layer)], leaf, axis=-1, epsilon=self.config.rms_eps
        )
        return y

    def add(self, x: str, y: str, name: str) -> str:
        total: str = self.graph.op("Add", [x, y], name)
        return total

    def ffn(self, x: str, layer: int) -> str:
        gate, up = self.linear(x, "ffn_gate", layer), self.linear(x, "ffn_up", layer)
        return self.linear(self.graph.call(functions.swiglu(), [gate, up], "swiglu"), "ffn_down", layer)

    def rope_and_mask(self, positions: str, any_cache: str) -> tuple[str, str, str]:
        """What all attention layers of a pass share: the mask, cos and sin."""
        inv_freq, factor = rope_frequencies(self.config.rope)
        rope = [self.graph.const("rope.inv_freq", inv_freq), self.graph.const("rope.factor", np.array(factor))]
        cos, sin = self.graph.call(functions.rope_tables(), [positions, *rope], "rope")
        repeats = [functions.query_rows_per_token(self.config.attention), 1]
        mask = self.graph.call(functions.attention_mask(), [positions, any_cache], "mask", repeats=repeats)
        return mask, cos, sin

    def cache_inputs(self, layer: int) -> tuple[str, str]:
        """Declare the KV cache inputs of an attention layer."""
        shape: list[int | str] = [1, self.config.attention.num_kv_heads, "L", self.config.attention.head_dim]
        key, value = (self.graph.input(f"blk.{layer}.{kind}_cache", FLOAT, shape) for kind in ("key", "value"))
        return key, value

    def attention(
        self, x: str, layer: int, positions: str, shared: tuple[str, str, str], caches: tuple[str, str]
    ) -> str:
        config = self.config.attention
        function = functions.gated_attention(config, self.config.rope.dim, self.config.rms_eps)
        inputs = [self.linear(x, leaf, layer) for leaf in ("attn_q", "attn_k", "attn_v")]
        norms = [self._vector(leaf, layer) for leaf in ("attn_q_norm", "attn_k_norm")]
        outputs = [self.graph.unique("attention"), *(f"{cache}.out" for cache in caches)]
        mixed, *new_caches = self.graph.call(
            function, [*inputs, positions, *shared, *caches, *norms], "attention", outputs
        )
        for cache in new_caches:
            self.graph.output(cache, FLOAT, [1, config.num_kv_heads, "L", config.head_dim])
        return self.linear(mixed, "attn_output", layer)

    def gated_delta_net(self, x: str, layer: int) -> str:
        """The GDN mixer with its state inputs and outputs (see `functions.gated_delta_net`)."""
        gdn, prefix = self.config.gdn, f"blk.{layer}."
        heads, dim, window = gdn.num_v_heads, gdn.head_dim, gdn.conv_kernel - 1
        state_shape: list[int | str] = [1, heads, dim, dim]
        conv = self.graph.input(prefix + "conv", FLOAT, [1, window, gdn.conv_dim])
        state = self.graph.input(prefix + "state", FLOAT, state_shape)
        rows = [self.linear(x, leaf, layer) for leaf in ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta")]
        weights = [
            self._vector("ssm_conv1d", layer, (gdn.conv_dim, 1, gdn.conv_kernel)),
            *(self._vector(leaf, layer) for leaf in ("ssm_a", "ssm_dt", "ssm_norm")),
        ]
        function = functions.gated_delta_net(gdn, self.config.rms_eps)
        shapes: dict[str, list[int | str]] = {
            "conv_rows": [1, "conv_T", gdn.conv_dim],
            "key": [1, "T", heads * dim],
            "value": [1, "T", heads * dim],
            "decay": [1, "T", heads],
            "rate": [1, "T", heads],
            "state.out": state_shape,
        }
        outputs = [self.graph.unique("gdn"), *(prefix + leaf for leaf in shapes)]
        mixed, *_ = self.graph.call(function, [*rows, conv, state, *weights], "gdn", outputs)
        for leaf, shape in shapes.items():
            self.graph.output(prefix + leaf, FLOAT, shape)
        self.graph.declare(mixed, FLOAT, ["T", gdn.value_dim])
        return self.linear(mixed, "ssm_out", layer)

    def logits(self, hidden: str, rows: str, leaf: str, layer: int | None = None) -> None:
        """LM head over the wanted rows: hidden [T, D], rows [R] -> output ``logits`` [R, N], N rows of the head."""
        picked = self.graph.op("Gather", [hidden, rows], "rows_of_hidden", axis=0)
        scores = self.linear(picked, leaf, layer)
        self.graph.op("Identity", [scores], "logits_out", ["logits"])
        self.graph.output("logits", FLOAT, ["R", self._matrix(leaf, layer).rows])

    def hidden_output(self, hidden: str) -> None:
        self.graph.op("Identity", [hidden], "hidden_out", ["hidden.out"])
        self.graph.output("hidden.out", FLOAT, ["T", self.config.hidden_size])


def rope_frequencies(rope: RopeConfig) -> tuple[np.ndarray, float]:
    """Inverse frequencies [dim / 2] f64 and the factor on cos and sin, YaRN included.

    Source: YaRN, Peng et al. 2023, as llama.cpp applies it (beta_fast 32, beta_slow 1, factor 1 + 0.1 ln s)."""
    pairs = np.arange(rope.dim // 2, dtype=np.float64)
    inv_freq = rope.theta ** (-2 * pairs / rope.dim)
    if rope.yarn_factor == 1:
        return inv_freq, 1.0

    def pair_of(turns: float) -> float:
        """The pair that turns this many times over the original context."""
        return rope.dim * math.log(rope.yarn_orig_ctx / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = max(0, math.floor(pair_of(32))), min(rope.dim - 1, math.ceil(pair_of(1)))
    ramp = np.clip((pairs - low) / max(0.001, high - low), 0, 1)
    return inv_freq * (1 - ramp) + inv_freq / rope.yarn_factor * ramp, 1 + 0.1 * math.log(rope.yarn_factor)
