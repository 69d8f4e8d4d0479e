"""The file of a synthetic model: which tensors it has, where they lie, its header, and the pieces of their data.

The container is written here and not by the gguf package, because the model is made where that is not installed.
Source: the GGUF specification, version 3; tensor types as llama.cpp's quantiser chooses them for Q4_K_M.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.bench import synthetic_blocks as blocks
from tests.bench.synthetic_text import MERGES, SEED, Geometry, SyntheticText, vocabulary

F32, Q4_K, Q6_K = 0, 12, 14
_ROW_UNITS = {F32: (1, 4), Q4_K: (blocks.SUPERBLOCK, blocks.Q4_K_BYTES), Q6_K: (blocks.SUPERBLOCK, blocks.Q6_K_BYTES)}
_ALIGNMENT = 32
_U32, _I32, _F32_KEY, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
# Of the half that a norm is to leave out.
_OTHER_HALF = 1 / 32


@dataclass(frozen=True)
class TensorPlace:
    """A tensor of ``rows`` rows of ``columns`` values. kind: what it holds (`_values`); offset: in the data."""

    name: str
    shape: tuple[int, ...]  # outermost first
    ggml_type: int
    kind: str
    index: int
    offset: int = 0

    @property
    def rows(self) -> int:
        return int(np.prod(self.shape[:-1], dtype=np.int64))

    @property
    def row_nbytes(self) -> int:
        values, nbytes = _ROW_UNITS[self.ggml_type]
        assert self.shape[-1] % values == 0, self
        return self.shape[-1] // values * nbytes

    @property
    def end(self) -> int:
        return self.offset + -(-self.rows * self.row_nbytes // _ALIGNMENT) * _ALIGNMENT


def tensor_list(geometry: Geometry) -> Iterator[tuple[str, tuple[int, ...], int, str]]:
    """(name, shape, type, kind) of every tensor."""
    g = geometry
    yield "token_embd.weight", (g.vocab, g.embd), Q4_K, "embedding"
    yield "output_norm.weight", (g.embd,), F32, "half A"
    yield "output.weight", (g.vocab, g.embd), Q6_K, "head"
    blocks_in_all = g.layers + 1
    for layer in range(blocks_in_all):
        draft, eighth = layer == g.layers, blocks_in_all // 8
        more_bits = layer < eighth or layer >= 7 * blocks_in_all // 8 or (layer - eighth) % 3 == 2
        finer = Q6_K if more_bits else Q4_K
        attention = draft or (layer + 1) % g.interval == 0
        for leaf, shape, ggml_type, kind in (
            ("attn_norm.weight", (g.embd,), F32, "norm"),
            ("post_attention_norm.weight", (g.embd,), F32, "norm"),
            *(_attention(g, finer) if attention else _delta_net(g, finer)),
            ("ffn_gate.weight", (g.ff, g.embd), Q4_K, "random"),
            ("ffn_down.weight", (g.embd, g.ff), finer, "random"),
            ("ffn_up.weight", (g.ff, g.embd), Q4_K, "random"),
            *(_draft_head(g) if draft else ()),
        ):
            yield f"blk.{layer}.{leaf}", shape, ggml_type, kind


_Leaf = tuple[str, tuple[int, ...], int, str]


def _attention(g: Geometry, finer: int) -> Sequence[_Leaf]:
    width, kv_width = g.heads * g.head_dim, g.kv_heads * g.head_dim
    return (
        ("attn_q.weight", (2 * width, g.embd), Q4_K, "random"),
        ("attn_k.weight", (kv_width, g.embd), Q4_K, "random"),
        ("attn_v.weight", (kv_width, g.embd), finer, "random"),
        ("attn_output.weight", (g.embd, width), Q4_K, "random"),
        ("attn_q_norm.weight", (g.head_dim,), F32, "norm"),
        ("attn_k_norm.weight", (g.head_dim,), F32, "norm"),
    )


def _delta_net(g: Geometry, finer: int) -> Sequence[_Leaf]:
    return (
        ("attn_qkv.weight", (g.conv_dim, g.embd), finer, "random"),
        ("attn_gate.weight", (g.inner, g.embd), Q4_K, "random"),
        ("ssm_conv1d.weight", (g.conv_dim, g.conv_kernel), F32, "conv"),
        ("ssm_dt.bias", (g.v_heads,), F32, "dt"),
        ("ssm_a", (g.v_heads,), F32, "a"),
        ("ssm_beta.weight", (g.v_heads, g.embd), Q4_K, "random"),
        ("ssm_alpha.weight", (g.v_heads, g.embd), Q4_K, "random"),
        ("ssm_norm.weight", (g.state,), F32, "norm"),
        ("ssm_out.weight", (g.embd, g.inner), Q4_K, "random"),
    )


def _draft_head(g: Geometry) -> Sequence[_Leaf]:
    return (
        ("nextn.eh_proj.weight", (g.embd, 2 * g.embd), Q4_K, "copy"),
        ("nextn.enorm.weight", (g.embd,), F32, "ones"),
        ("nextn.hnorm.weight", (g.embd,), F32, "ones"),
        ("nextn.shared_head_norm.weight", (g.embd,), F32, "half B"),
    )


def place_tensors(tensors: Iterator[_Leaf]) -> list[TensorPlace]:
    """The tensors one after the other, each aligned."""
    places: list[TensorPlace] = []
    for index, (name, shape, ggml_type, kind) in enumerate(tensors):
        places.append(TensorPlace(name, shape, ggml_type, kind, index, places[-1].end if places else 0))
    return places


def header(geometry: Geometry, places: Sequence[TensorPlace]) -> bytes:
    """All that comes before the data, padding included."""
    keys = [_key(name, value) for name, value in _metadata(geometry).items()]
    infos = [
        _text(place.name)
        + struct.pack(f"<I{len(place.shape)}Q", len(place.shape), *reversed(place.shape))
        + struct.pack("<IQ", place.ggml_type, place.offset)
        for place in places
    ]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(keys)) + b"".join([*keys, *infos])
    return head + bytes(-len(head) % _ALIGNMENT)


def _metadata(g: Geometry) -> dict[str, object]:
    """Keys by name. Numbers are u32, lists of them i32."""
    tokens, kinds = vocabulary(g)
    sizes = {
        "block_count": g.layers + 1,
        "nextn_predict_layers": 1,
        "context_length": g.context,
        "embedding_length": g.embd,
        "feed_forward_length": g.ff,
        "attention.head_count": g.heads,
        "attention.head_count_kv": g.kv_heads,
        "attention.key_length": g.head_dim,
        "attention.value_length": g.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.recurrent_layers": [(i + 1) % g.interval != 0 for i in range(g.layers)] + [False],
        "full_attention_interval": g.interval,
        "rope.dimension_count": g.rope_dim,
        "rope.dimension_sections": list(g.sections),
        "rope.freq_base": g.theta,
        "ssm.conv_kernel": g.conv_kernel,
        "ssm.state_size": g.state,
        "ssm.group_count": g.k_heads,
        "ssm.time_step_rank": g.v_heads,
        "ssm.inner_size": g.inner,
    }
    return {
        "general.architecture": "qwen35",
        "general.name": "synthetic-qwen35",
        "general.file_type": 15,  # mostly Q4_K, medium
        "general.quantization_version": 2,
        **{f"qwen35.{name}": value for name, value in sizes.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in MERGES],
        "tokenizer.ggml.eos_token_id": g.special + 2,
        "tokenizer.ggml.padding_token_id": g.special,
        "tokenizer.ggml.add_bos_token": False,
    }


def _key(name: str, value: object) -> bytes:
    if isinstance(value, list):
        kind = {bool: _BOOL, int: _I32, str: _STRING}[type(value[0])]
        items = b"".join(_text(item) if kind == _STRING else _number(kind, item) for item in value)
        return _text(name) + struct.pack("<IIQ", _ARRAY, kind, len(value)) + items
    kind = {bool: _BOOL, int: _U32, float: _F32_KEY, str: _STRING}[type(value)]
    data = _text(value) if isinstance(value, str) else _number(kind, value)
    return _text(name) + struct.pack("<I", kind) + data


def _number(kind: int, value: object) -> bytes:
    return struct.pack({_U32: "<I", _I32: "<i", _F32_KEY: "<f", _BOOL: "<?"}[kind], value)


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def write_piece(path: Path, start: int, text: SyntheticText, place: TensorPlace, first: int, last: int) -> None:
    """Write rows first..last - 1 of a tensor; data begins at ``start``. The head needs the embedding in the file."""
    data = memoryview(np.ascontiguousarray(_values(path, start, text, place, first, last))).cast("B")
    assert len(data) == (last - first) * place.row_nbytes, place
    with open(path, "r+b", buffering=0) as file:
        file.seek(start + place.offset + first * place.row_nbytes)
        while data:
            data = data[file.write(data) :]


def _values(path: Path, start: int, text: SyntheticText, place: TensorPlace, first: int, last: int) -> np.ndarray:
    seed, columns = [SEED, 2, place.index, first], place.shape[-1]
    count = (last - first) * columns // blocks.SUPERBLOCK
    if place.ggml_type == F32:
        return _small(place.kind, [SEED, 3, place.index], place.shape).astype("<f4").reshape(place.rows, -1)[first:last]
    if place.kind == "embedding":
        return blocks.embedding_blocks(seed, count)
    if place.kind == "copy":
        return blocks.copy_blocks(place.shape[0], first, last)
    if place.kind == "head":
        return _head_rows(path, start, text, first, last)
    make = blocks.random_q4_k if place.ggml_type == Q4_K else blocks.random_q6_k
    return make(seed, count, columns**-0.5)


def _head_rows(path: Path, start: int, text: SyntheticText, first: int, last: int) -> np.ndarray:
    """Row j: half A of the embedding of the token that the trunk follows with j, half B of the draft head's."""
    g = text.geometry
    per_row = g.embd // blocks.SUPERBLOCK
    embedding = np.memmap(path, np.uint8, "r", start, (g.vocab, per_row, blocks.Q4_K_BYTES))
    before = [np.argsort(follower)[first:last] for follower in (text.trunk, text.draft)]
    half = per_row // 2
    rows = np.concatenate([embedding[before[0], :half], embedding[before[1], half:]], axis=1)
    return blocks.head_blocks(rows.reshape(-1, blocks.Q4_K_BYTES))


def _small(kind: str, seed: Sequence[int], shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(list(seed))
    if kind in ("half A", "half B"):
        weight, half = np.full(shape, _OTHER_HALF), shape[0] // 2
        weight[slice(half) if kind == "half A" else slice(half, None)] = 1
        return weight
    make = {
        "norm": lambda: 1 + 0.1 * rng.standard_normal(shape),
        "ones": lambda: np.ones(shape),
        "conv": lambda: 0.5 * rng.standard_normal(shape),
        "dt": lambda: rng.uniform(-3.0, 0.5, shape),
        "a": lambda: -rng.uniform(0.3, 4.0, shape),  # -exp(A_log)
    }
    return make[kind]()
