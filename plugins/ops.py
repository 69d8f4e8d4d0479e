"""The contract of every custom op, as data: what exporter, plugin library and runtime agree on. A leaf.

T tokens, K and N columns and rows of a matrix, E hidden size, F rows of gate and up, H query heads, HV value heads, D
head size, C channels of the convolution, L cache capacity, S slots.
Activations are float32. A weight is the GGUF's raw rows as int8 [N, K / block, block bytes], of its GGML type. A pack
is several matrices in one tensor, int8 [1, B, 256], one behind the other, each from the next multiple of 256 bytes on.
An output with an alias is its input's memory: one address is bound to both, and the op writes in place.

Every op has at most 6 inputs and 2 outputs, the most that TensorRT-RTX 1.6 lets through (see `export.rtx16_dialect`).
"""

from __future__ import annotations

from dataclasses import dataclass

DOMAIN = "nextn.plugins"
VERSION = "1"
MAX_INPUTS = 6
MAX_OUTPUTS = 2
MAX_MATRICES = 4
# Passes of at most this many tokens are summed, token by token, in an order that does not depend on their number.
MAX_DECODE_T = 8
PACK_BLOCK = 256
# The matrices in the pack of a layer, in order; W_in of the mixer, its output, the feed-forward network.
_FFN = ("output", "gate", "up", "down")
DELTA_NET_MATRICES = ("qkv", "z", "alpha", "beta", *_FFN)
ATTENTION_MATRICES = ("query and gate", "key", "value", *_FFN)

# Attribute cache_type -> dtype of a KV cache. int8: D values and CACHE_SCALE_BYTES with a float32 scale per 64 of them.
CACHE_DTYPES = ("float16", "int8")
CACHE_SCALE_BYTES = 16

# GGML type id -> (values, bytes) of a block, of the types that the kernels read.
BLOCKS: dict[int, tuple[int, int]] = {
    0: (1, 4),  # F32
    1: (1, 2),  # F16
    8: (32, 34),  # Q8_0
    12: (256, 144),  # Q4_K
    13: (256, 176),  # Q5_K
    14: (256, 210),  # Q6_K
    30: (1, 2),  # BF16
}


@dataclass(frozen=True)
class Tensor:
    """An input or output. ``dtype``: several are listed in the order of the attribute ``cache_type``. ``alias``: of an
    output, the name of the input whose memory it is."""

    name: str
    dtype: str
    shape: str
    meaning: str = ""
    alias: str = ""


@dataclass(frozen=True)
class Attribute:
    """``kind``: "int", "ints" (int32 each) or "float"."""

    name: str
    kind: str
    meaning: str = ""


@dataclass(frozen=True)
class Op:
    """``inputs``: in order; a name ending in ``*`` stands for 1 to 4 tensors, one ending in ``?`` is there when the
    attribute ``has_<name>`` is 1. ``refuses``: shapes that the plugin does not take."""

    name: str
    meaning: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    attributes: tuple[Attribute, ...]
    refuses: tuple[str, ...]

    def alias_of(self, output: int) -> int:
        """Index of the input that shares memory with an output, or -1."""
        names = [each.name for each in self.inputs]
        alias = self.outputs[output].alias
        return names.index(alias) if alias else -1


KQUANT_MATMUL = Op(
    "KQuantMatmul",
    "y = concat_i(x' W_i^T), x' = x or RMSNorm(x, norm); with swiglu silu(x' W_0^T) * (x' W_1^T); plus residual",
    inputs=(
        Tensor("x", "float32", "[T, K]"),
        Tensor("weight*", "int8", "[N_i, K / block, block bytes]", "one per entry of types"),
        Tensor("norm?", "float32", "[K]"),
        Tensor("residual?", "float32", "[T, N]"),
    ),
    outputs=(Tensor("y", "float32", "[T, sum N_i], or [T, N] with swiglu"),),
    attributes=(
        Attribute("types", "ints", "GGML type id of each weight"),
        Attribute("has_norm", "int"),
        Attribute("has_residual", "int"),
        Attribute("swiglu", "int", "1: weights are gate and up"),
        Attribute("epsilon", "float", "of the norm"),
    ),
    refuses=(
        "more than 4 weights; a residual with more than one; swiglu with other than two of one type and N",
        "K not a multiple of the block, or of 4; types other than those of BLOCKS",
    ),
)

KQUANT_EMBEDDING = Op(
    "KQuantEmbedding",
    "y[t] = row tokens[t] of the table; a row of NaN for a token outside it",
    inputs=(
        Tensor("tokens", "int32", "[T]"),
        Tensor("table", "int8", "[V, K / block, block bytes]"),
    ),
    outputs=(Tensor("y", "float32", "[T, K]"),),
    attributes=(Attribute("type", "int", "GGML type id of the table"),),
    refuses=("types other than those of BLOCKS",),
)

RMS_NORM = Op(
    "RmsNorm",
    "y = x / sqrt(mean x^2 + epsilon) * weight, rows summed alike however many there are",
    inputs=(Tensor("x", "float32", "[T, K]"), Tensor("weight", "float32", "[K]")),
    outputs=(Tensor("y", "float32", "[T, K]"),),
    attributes=(Attribute("epsilon", "float"),),
    refuses=(),
)

RMS_NORM_ROWS = Op(
    "RmsNormRows",
    "as RmsNorm, and picked[i] = y[rows[i]]; a row of NaN for a row number outside y",
    inputs=(
        Tensor("x", "float32", "[T, K]"),
        Tensor("weight", "float32", "[K]"),
        Tensor("rows", "int32", "[P]"),
    ),
    outputs=(Tensor("y", "float32", "[T, K]"), Tensor("picked", "float32", "[P, K]")),
    attributes=(Attribute("epsilon", "float"),),
    refuses=(),
)

RMS_NORM_PAIR = Op(
    "RmsNormPair",
    "y = [RmsNorm(a, a_weight), RmsNorm(b, b_weight)], side by side",
    inputs=(
        Tensor("a", "float32", "[T, K]"),
        Tensor("a_weight", "float32", "[K]"),
        Tensor("b", "float32", "[T, N]"),
        Tensor("b_weight", "float32", "[N]"),
    ),
    outputs=(Tensor("y", "float32", "[T, K + N]"),),
    attributes=(Attribute("epsilon", "float"),),
    refuses=(),
)

ROPE_TABLES = Op(
    "RopeTables",
    "factor * cos(p * inv_freq), factor * sin(..) for p = position .. position + T - 1, angles in float64",
    inputs=(
        Tensor("rows", "float32", "[T, K]", "only how many there are counts"),
        Tensor("position", "int32", "[1]", "of the first token"),
        Tensor("inv_freq", "int64", "[R / 2]", "the bits of float64 numbers"),
    ),
    outputs=(Tensor("tables", "float32", "[2, T, R / 2]", "cos, sin"),),
    attributes=(Attribute("factor", "float"),),
    refuses=(),
)

GATED_DELTA_NET = Op(
    "GatedDeltaNet",
    "causal conv, gates, delta rule and gated norm of one layer, its state kept in slots",
    inputs=(
        Tensor("rows", "float32", "[T, (2 HK + 2 HV) D + 2 HV]", "q, k, v before the conv; z; alpha; beta"),
        Tensor(
            "pool",
            "float32",
            "[HV D D + (S - 1) HV (D / 32) (D + 64) + S (kernel - 1) C]",
            "state [HV, D, D], steps [S - 1, HV, D / 32, D + 64], windows [S, kernel - 1, C]",
        ),
        Tensor("slot", "int32", "[1]", "slot to start from; negative: from zeros"),
        Tensor("parameters", "float32", "[C kernel + 2 HV + D]", "conv weight [C, kernel], a [HV], dt [HV], norm [D]"),
    ),
    outputs=(
        Tensor("y", "float32", "[T, HV D]"),
        Tensor(
            "pool_out", "float32", "as pool", "T <= S: slot i for after token i; else slot 0 for after the last", "pool"
        ),
    ),
    attributes=(
        Attribute("k_heads", "int"),
        Attribute("v_heads", "int"),
        Attribute("head_dim", "int"),
        Attribute("conv_kernel", "int"),
        Attribute("epsilon", "float"),
    ),
    refuses=("head_dim other than 32, 64, 128", "v_heads not a multiple of k_heads", "conv_kernel outside 2..8"),
)

GATED_ATTENTION = Op(
    "GatedAttention",
    "norms, partial rope, cache update and gated attention of one layer",
    inputs=(
        Tensor("rows", "float32", "[T, 2 H D + 2 KV D]", "per query head: query, gate; then keys; then values"),
        Tensor("position", "int32", "[1]", "of the first token; equals the cache rows in use"),
        Tensor("rope", "float32", "[2, T, R / 2]", "cos, sin"),
        Tensor("norms", "float32", "[2, D]", "of query and key heads"),
        Tensor("cache", "float16, int8", "[2, L, KV, D], [2, L, KV, D + 16]", "keys, values"),
    ),
    outputs=(
        Tensor("y", "float32", "[T, H D]"),
        Tensor("cache_out", "float16, int8", "as cache", "rows position .. position + T - 1 written", "cache"),
    ),
    attributes=(
        Attribute("heads", "int"),
        Attribute("kv_heads", "int"),
        Attribute("head_dim", "int"),
        Attribute("rope_dim", "int"),
        Attribute("cache_type", "int", "0: float16; 1: int8, each row's D values followed by their scales"),
        Attribute("epsilon", "float"),
    ),
    refuses=(
        "head_dim other than 32, 64, 128, 256",
        "heads / kv_heads not a whole number up to 8",
        "rope_dim odd or above head_dim",
        "cache_type other than 0, 1",
    ),
)

_LAYER = "a whole decoder layer: r = x + W_output mixer(W_in RMSNorm(x)), y = r + W_down SwiGLU(RMSNorm(r))"
_LAYER_TYPES = "GGML type id of each matrix"
_LAYER_REFUSES = (
    "gate and up of different types; rows that are not whole blocks, or not of a multiple of 4 values",
    "a pack of another size than its matrices have; types other than those of BLOCKS",
)

GATED_DELTA_NET_LAYER = Op(
    "GatedDeltaNetLayer",
    f"{_LAYER}, mixer as GatedDeltaNet",
    inputs=(
        Tensor("x", "float32", "[T, E]"),
        Tensor("weights", "int8", "[1, B, 256]", f"pack of {', '.join(DELTA_NET_MATRICES)}"),
        Tensor("parameters", "float32", "[2 E + C kernel + 2 HV + D]", "norm of x, norm of r; then as GatedDeltaNet"),
        Tensor("slot", "int32", "[1]", "as GatedDeltaNet"),
        Tensor("pool", "float32", "[P]", "as GatedDeltaNet"),
    ),
    outputs=(
        Tensor("y", "float32", "[T, E]"),
        Tensor("pool_out", "float32", "as pool", "as GatedDeltaNet", "pool"),
    ),
    attributes=(
        Attribute("types", "ints", _LAYER_TYPES),
        Attribute("ffn_size", "int", "F"),
        *GATED_DELTA_NET.attributes,
    ),
    refuses=(*_LAYER_REFUSES, *GATED_DELTA_NET.refuses),
)

GATED_ATTENTION_LAYER = Op(
    "GatedAttentionLayer",
    f"{_LAYER}, mixer as GatedAttention",
    inputs=(
        Tensor("x", "float32", "[T, E]"),
        Tensor("weights", "int8", "[1, B, 256]", f"pack of {', '.join(ATTENTION_MATRICES)}"),
        Tensor("parameters", "float32", "[2 E + 2 D]", "norm of x, norm of r; then norms of query and key heads"),
        Tensor("position", "int32", "[1]", "as GatedAttention"),
        Tensor("rope", "float32", "[2, T, R / 2]", "as GatedAttention"),
        Tensor("cache", "float16, int8", "[2, L, KV, D], [2, L, KV, D + 16]", "as GatedAttention"),
    ),
    outputs=(
        Tensor("y", "float32", "[T, E]"),
        Tensor("cache_out", "float16, int8", "as cache", "as GatedAttention", "cache"),
    ),
    attributes=(
        Attribute("types", "ints", _LAYER_TYPES),
        Attribute("ffn_size", "int", "F"),
        *GATED_ATTENTION.attributes,
    ),
    refuses=(*_LAYER_REFUSES, *GATED_ATTENTION.refuses),
)

_MATMULS = (KQUANT_MATMUL, KQUANT_EMBEDDING)
_NORMS = (RMS_NORM, RMS_NORM_ROWS, RMS_NORM_PAIR)
_MIXERS = (ROPE_TABLES, GATED_DELTA_NET, GATED_ATTENTION)
_LAYERS = (GATED_DELTA_NET_LAYER, GATED_ATTENTION_LAYER)
OPS: dict[str, Op] = {op.name: op for op in (*_MATMULS, *_NORMS, *_MIXERS, *_LAYERS)}


def matrix_nbytes(ggml_type: int, rows: int, columns: int) -> int:
    """Bytes of a matrix whose rows are whole blocks."""
    values, nbytes = BLOCKS[ggml_type]
    return rows * columns // values * nbytes


def pack_offsets(sizes: list[int]) -> tuple[list[int], int]:
    """Where matrices of so many bytes lie in a pack, and how many blocks of PACK_BLOCK bytes it has."""
    offsets, end = [], 0
    for nbytes in sizes:
        offsets.append(end)
        end += -(-nbytes // PACK_BLOCK) * PACK_BLOCK
    return offsets, end // PACK_BLOCK
