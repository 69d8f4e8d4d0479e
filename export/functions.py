"""The local functions of the canonical graph: each is one step that a TensorRT plugin can stand for.

All activations are float32; T is the number of tokens of the pass. Every function treats a row (token) alike whatever T
is, bit for bit on ONNX Runtime's CPU provider; comments name the places where that took care.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from export.config import AttentionConfig, GatedDeltaNetConfig
from export.graph import Function

# Smallest block scale: keeps 0 / 0 out of all-zero blocks. Anything below it is carried by the last of the three terms.
_TINY = 1e-30
_INT8_MAX = 127.0


def split_activation() -> Function:
    """x [T, K] -> rows [3 T, K] (x = first + second + third term, each exact in int8 with a scale per block), and the
    block sums [T, K / block].

    MatMulNBits with int8 activations is several times faster than with float ones and exact in its integer sums, but
    rounds activations to 8 bits. Fed the rounded values, then what rounding left, then what that left, its three
    results add up to the float32 product: 24 bits of activation. It also treats one row and many alike, which its
    float path does not.
    """
    f = Function("SplitActivation", ["x"], ["rows", "sums"], ["block_shape", "row_shape", "sum_shape"])
    rest = f.op("Reshape", ["x", f.attribute("block_shape")])
    sums = f.op("ReduceSum", [rest, f.const([-1])], keepdims=0)
    f.op("Reshape", [sums, f.attribute("sum_shape")], outputs=["sums"])
    terms = []
    for _ in range(2):
        peak = f.op("ReduceMax", [f.op("Abs", [rest]), f.const([-1])], keepdims=1)
        scale = f.op("Mul", [peak, f.const(1 / _INT8_MAX, np.float32)])
        scale = f.op("Max", [scale, f.const(_TINY, np.float32)])
        term = f.op("Mul", [f.op("Round", [f.op("Div", [rest, scale])]), scale])
        rest = f.op("Sub", [rest, term])
        terms.append(term)
    rows = f.op("Concat", [*terms, rest], axis=0)
    f.op("Reshape", [rows, f.attribute("row_shape")], outputs=["rows"])
    return f


def block_matmul(affine: bool) -> Function:
    """rows [3 T, K] (and block sums [T, K / block]), a weight [N, K] in block form -> y [T, N] = x W^T."""
    name, extra = ("AffineBlockMatMul", ["sums", "offsets"]) if affine else ("BlockMatMul", [])
    f = Function(name, ["rows", "quants", "scales", *extra], ["y"], ["K", "N", "bits", "block_size"])
    attributes = {key: f.ref(key) for key in ("K", "N", "bits", "block_size")}
    parts = f.op("com.microsoft::MatMulNBits", ["rows", "quants", "scales"], accuracy_level=4, **attributes)
    f.declare(parts, TensorProto.FLOAT, ["rows", "N"])
    first, second, third = f.op("Split", [parts], outputs=3, axis=0, num_outputs=3)
    y = ["y"] if not affine else 1
    total = f.op("Add", [f.op("Add", [third, second]), first], outputs=y)
    if affine:
        f.op("Gemm", ["sums", "offsets", total], outputs=["y"], transB=1)
    return f


def block_embedding(bits: int, affine: bool) -> Function:
    """tokens [T], a table [V, D] in block form -> rows [T, D]."""
    inputs = ["tokens", "quants", "scales", *(["offsets"] if affine else [])]
    f = Function(f"BlockEmbedding{bits}{'Affine' if affine else ''}", inputs, ["y"], ["row_shape"])
    quants = f.op("Gather", ["quants", "tokens"], axis=0)
    if bits == 4:
        low = f.op("BitwiseAnd", [quants, f.const(15, np.uint8)])
        high = f.op("BitShift", [quants, f.const(4, np.uint8)], direction="RIGHT")
        pair = [f.op("Unsqueeze", [half, f.const([-1])]) for half in (low, high)]
        merged = f.op("Concat", pair, axis=-1)
        shape = f.op("Concat", [f.op("Shape", [quants], end=2), f.const([-1])], axis=0)
        quants = f.op("Reshape", [merged, shape])
    centred = f.op("Sub", [f.op("Cast", [quants], to=1), f.const(2 ** (bits - 1), np.float32)])

    def per_block(table: str) -> str:
        rows: str = f.op("Unsqueeze", [f.op("Gather", [table, "tokens"], axis=0), f.const([-1])])
        return rows

    values = f.op("Mul", [centred, per_block("scales")])
    if affine:
        values = f.op("Add", [values, per_block("offsets")])
    f.op("Reshape", [values, f.attribute("row_shape")], outputs=["y"])
    return f


def swiglu() -> Function:
    """gate [T, F], up [T, F] -> silu(gate) * up."""
    f = Function("SwiGLU", ["gate", "up"], ["y"])
    f.op("Mul", [f.op("Mul", ["gate", f.op("Sigmoid", ["gate"])]), "up"], outputs=["y"])
    return f


def gated_delta_net(gdn: GatedDeltaNetConfig, rms_eps: float) -> Function:
    """Causal conv, gates, delta rule and gated norm of one layer.

    qkv [T, C], z [T, HV DV], alpha, beta [T, HV]; conv [1, kernel - 1, C] and state [1, HV, DK, DV] before the first
    token -> y [T, HV DV]; conv_rows [1, kernel - 1 + T, C] (the window after n tokens is rows n .. n + kernel - 2);
    key, value [1, T, HV D], decay, rate [1, T, HV] (what the state update used, for replaying a part of the pass);
    state_out (after all T tokens).

    ONNX Runtime has kernels for the convolution and the delta rule in its own domain only. Of the standard operators of
    the same names it runs the defining subgraphs (a Scan): several times slower, and T = 1 sums in another order.
    """
    heads, dim = gdn.num_v_heads, gdn.head_dim
    inputs = ["qkv", "z", "alpha", "beta", "conv", "state", "conv_weight", "a", "dt", "norm"]
    outputs = ["y", "conv_rows", "key", "value", "decay", "rate", "state_out"]
    f = Function("GatedDeltaNet", inputs, outputs)
    new = f.op("Unsqueeze", ["qkv", f.const([0])])
    f.op("Concat", ["conv", new], outputs=["conv_rows"], axis=1)
    mixed, _ = f.op(
        "com.microsoft::CausalConvWithState",
        [new, "conv_weight", "", "conv"],
        outputs=2,
        activation="silu",
        channels_last=1,
    )
    f.declare(mixed, TensorProto.FLOAT, [1, "T", gdn.conv_dim])
    query_key, _ = f.op(
        "Split", [mixed, f.const([2 * gdn.key_dim, gdn.value_dim])], outputs=[f.unique("query_key"), "value"], axis=2
    )
    # x / sqrt(sum x^2 + eps) is RMSNormalization with eps / dim and weight 1 / sqrt(dim).
    query_key = f.op("Reshape", [query_key, f.const([1, -1, 2 * gdn.num_k_heads, dim])])
    unit = f.const(np.full(dim, dim**-0.5), np.float32)
    query_key = f.op("RMSNormalization", [query_key, unit], axis=-1, epsilon=rms_eps / dim)
    query, key = f.op("Split", [query_key], outputs=2, axis=2, num_outputs=2)
    if gdn.num_v_heads != gdn.num_k_heads:  # value head h reads key head h mod num_k_heads
        repeats = f.const([1, 1, gdn.num_v_heads // gdn.num_k_heads, 1])
        query, key = f.op("Tile", [query, repeats]), f.op("Tile", [key, repeats])
    packed = f.const([1, -1, gdn.value_dim])
    query = f.op("Reshape", [query, packed])
    f.op("Reshape", [key, packed], outputs=["key"])
    f.op("Unsqueeze", [f.op("Sigmoid", ["beta"]), f.const([0])], outputs=["rate"])
    step = _softplus(f, f.op("Add", ["alpha", "dt"]), heads)
    f.op("Unsqueeze", [f.op("Mul", [step, "a"]), f.const([0])], outputs=["decay"])
    mixed, _ = f.op(
        "com.microsoft::LinearAttention",
        [query, "key", "value", "state", "decay", "rate"],
        outputs=[f.unique("mixed"), "state_out"],
        update_rule="gated_delta",
        q_num_heads=heads,
        kv_num_heads=heads,
        scale=dim**-0.5,
    )
    f.declare(mixed, TensorProto.FLOAT, [1, "T", gdn.value_dim])
    mixed = f.op("Reshape", [mixed, f.const([-1, heads, dim])])
    mixed = f.op("RMSNormalization", [mixed, "norm"], axis=-1, epsilon=rms_eps)
    mixed = f.op("Reshape", [mixed, f.const([-1, gdn.value_dim])])
    f.op("Mul", [mixed, f.op("Mul", ["z", f.op("Sigmoid", ["z"])])], outputs=["y"])
    return f


def _softplus(f: Function, x: str, width: int) -> str:
    """softplus of [T, width]. ONNX Runtime computes whole vectors and left-over elements by different formulas, so
    rows are padded to a multiple of the widest vector (16 floats): then no element is a left-over, for any T."""
    pad = -width % 16
    if pad:
        x = f.op("Pad", [x, f.const([0, 0, 0, pad])])
    x = f.op("Softplus", [x])
    if pad:
        x = f.op("Slice", [x, f.const([0]), f.const([width]), f.const([1])])
    return x


def replay(gdn: GatedDeltaNetConfig) -> Function:
    """State before a pass and what its first n updates used -> the state after those n tokens."""
    f = Function("ReplayGatedDelta", ["state", "key", "value", "decay", "rate"], ["state_out"])
    f.op(
        "com.microsoft::LinearAttention",
        ["key", "key", "value", "state", "decay", "rate"],
        outputs=[f.unique("unused"), "state_out"],
        update_rule="gated_delta",
        q_num_heads=gdn.num_v_heads,
        kv_num_heads=gdn.num_v_heads,
        scale=1.0,
    )
    return f


def attention_mask() -> Function:
    """positions [T], a KV cache [1, KV, L, head_dim] -> mask [repeat T, L]: 0 where key index <= position, else -inf.

    ``repeat``: query rows per token that share a KV head (see `gated_attention`), repeated outermost."""
    f = Function("AttentionMask", ["positions", "cache"], ["mask"], ["repeats"])
    length = f.op("Squeeze", [f.op("Shape", ["cache"], start=2, end=3)])
    keys = f.op("Range", [f.const(0), length, f.const(1)])
    visible = f.op("LessOrEqual", [keys, f.op("Unsqueeze", ["positions", f.const([-1])])])
    mask = f.op("Where", [visible, f.const(0, np.float32), f.const(-np.inf, np.float32)])
    f.op("Tile", [mask, f.attribute("repeats")], outputs=["mask"])
    return f


def rope_tables() -> Function:
    """positions [T] -> cos, sin [1, T, rope dim / 2], already times the YaRN attention factor.

    Angles in float64: at long contexts a float32 product would be off by more than the model's own rounding."""
    f = Function("RopeTables", ["positions", "inv_freq", "factor"], ["cos", "sin"])
    angle = f.op("Mul", [f.op("Unsqueeze", [f.op("Cast", ["positions"], to=11), f.const([0, 2])]), "inv_freq"])
    for kind in ("Cos", "Sin"):
        f.op("Cast", [f.op("Mul", [f.op(kind, [angle]), "factor"])], outputs=[kind.lower()], to=1)
    return f


def gated_attention(attention: AttentionConfig, rope_dim: int, rms_eps: float) -> Function:
    """Norms, partial rope, KV update and gated attention of one layer.

    query_gate [T, H 2 head_dim] (per head: query, then gate), key, value [T, KV head_dim]; caches [1, KV, L, head_dim],
    new rows written at positions[0] .. -> y [T, H head_dim] and the caches.
    """
    heads, kv_heads, dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
    group = heads // kv_heads
    inputs = ["query_gate", "key", "value", "positions", "mask", "cos", "sin", "key_cache", "value_cache"]
    f = Function("GatedAttention", [*inputs, "query_norm", "key_norm"], ["y", "key_cache_out", "value_cache_out"])
    query_gate = f.op("Reshape", ["query_gate", f.const([1, -1, heads, 2 * dim])])
    query, gate = f.op("Split", [query_gate], outputs=2, axis=3, num_outputs=2)

    def normed_heads(rows: str, weight: str) -> str:
        normed = f.op("RMSNormalization", [rows, weight], axis=-1, epsilon=rms_eps)
        by_head = f.op("Transpose", [normed], perm=[0, 2, 1, 3])
        rotated: str = f.op("RotaryEmbedding", [by_head, "cos", "sin"], rotary_embedding_dim=rope_dim)
        return rotated

    per_kv_head = f.const([1, -1, kv_heads, dim])
    query = normed_heads(query, "query_norm")
    key = normed_heads(f.op("Reshape", ["key", per_kv_head]), "key_norm")
    value = f.op("Transpose", [f.op("Reshape", ["value", per_kv_head])], perm=[0, 2, 1, 3])
    first = f.op("Slice", ["positions", f.const([0]), f.const([1])])
    f.op("TensorScatter", ["key_cache", key, first], outputs=["key_cache_out"], axis=2)
    f.op("TensorScatter", ["value_cache", value, first], outputs=["value_cache_out"], axis=2)
    # The query heads of a KV head become rows of one product: no copy of the cache, and never a product of one row,
    # which would be summed in another order than several. (The Attention op does neither, and is four times slower.)
    rows_per_token = query_rows_per_token(attention)
    folded = f.op("Reshape", [query, f.const([1, kv_heads, -1, dim])])
    if group < rows_per_token:
        folded = f.op("Concat", [folded] * rows_per_token, axis=2)
    scores = f.op("MatMul", [folded, f.op("Transpose", ["key_cache_out"], perm=[0, 1, 3, 2])])
    scores = f.op("Add", [f.op("Mul", [scores, f.const(dim**-0.5, np.float32)]), "mask"])
    mixed = f.op("MatMul", [f.op("Softmax", [scores], axis=-1), "value_cache_out"])
    if group < rows_per_token:
        mixed = f.op("Slice", [mixed, f.const([0]), f.op("Shape", ["positions"]), f.const([2])])
    mixed = f.op("Reshape", [mixed, f.const([1, heads, -1, dim])])
    flat = f.const([-1, heads * dim])
    mixed = f.op("Reshape", [f.op("Transpose", [mixed], perm=[0, 2, 1, 3]), flat])
    f.op("Mul", [mixed, f.op("Sigmoid", [f.op("Reshape", [gate, flat])])], outputs=["y"])
    return f


def query_rows_per_token(attention: AttentionConfig) -> int:
    """Rows that one token gives to the product with a KV head's keys; at least 2."""
    return max(2, attention.num_heads // attention.num_kv_heads)
