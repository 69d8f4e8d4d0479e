"""What a model's equations give for a few tokens, in float64, from the .gguf alone: the witness against a whole build.

A build that is wrong in itself agrees with itself, with and without drafts. This shares neither graphs nor kernels nor
code with one: it goes through the file matrix by matrix and keeps none. Minutes for a model of billions of weights.
Sources: llama.cpp's qwen35 graph; Gated Delta Networks (Yang et al., 2024); YaRN (Peng et al., 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from engines.errors import UsageError
from engines.evidence import HEAD_LOGITS, LOGITS, Evidence
from export.config import load_config
from export.gguf_file import GGUFFile

Array = np.ndarray
_CHUNK_VALUES = 16 << 20  # of a matrix that are widened at a time
GROUPED = (
    "the order of value heads: each group reads one key head, as in the original checkpoints, where a GGUF's take turns"
)
REORDERED = "the order of value heads: rows of the file are in another"
BEHIND = "the convolution's window, which is a token behind"
LATE = "rope: positions are off by one"
NEXT_PAIR = "rope: each pair turns with the frequency of the next one"
NEIGHBOURS = "rope: neighbours are pairs, where halves should be"
UNSCALED = "rope: YaRN is left out"
SWAPPED = "eh_proj: its halves are the other way round"


def give_evidence(
    model: Path, tokens: Sequence[int], progress: Callable[[int], None] = lambda weights: None
) -> Evidence:
    """progress: told the number of weights that were gone through. Raises UsageError, ModelFileError."""
    file = GGUFFile.open(model)
    size = load_config(file, draft=_has_head(file)).vocab_size
    if unknown := [token for token in tokens if not 0 <= token < size]:
        raise UsageError(f"{model}: has {size} tokens, and none of number {unknown[0]}; the build is of another model")
    return _Witness(file, progress).all_of(tuple(tokens))


class _Witness:
    def __init__(self, file: GGUFFile, progress: Callable[[int], None]) -> None:
        self._file, self._progress = file, progress
        self._num_layers = self._count("block_count") - self._count("nextn_predict_layers", 0)
        self._eps = self._number("attention.layer_norm_rms_epsilon")
        self._places: dict[str, Array] = {}
        self._explanations: dict[str, dict[str, Array]] = {}

    def all_of(self, tokens: tuple[int, ...]) -> Evidence:
        interval = self._count("full_attention_interval", 4)
        x = self._rows(self._first("token_embd.weight"), tokens)
        for layer in range(self._num_layers):
            x = self._block(x, layer, self._attention if (layer + 1) % interval == 0 else self._delta_net)
        hidden = self._norm(x, "output_norm.weight")
        self._places[LOGITS] = self._product(hidden, self._first("output.weight", "token_embd.weight"))
        if self._count("nextn_predict_layers", 0) and _has_head(self._file):
            self._head(tokens, np.vstack([np.zeros_like(hidden[:1]), hidden[:-1]]))
        return Evidence(tokens, self._places, self._explanations)

    def _head(self, tokens: tuple[int, ...], before: Array) -> None:
        name = f"blk.{self._num_layers}.nextn."
        e = self._rows(self._first(name + "embed_tokens.weight", "token_embd.weight"), tokens)
        halves = self._norm(e, name + "enorm.weight"), self._norm(before, name + "hnorm.weight")
        kept, self._places, self._explanations = (self._places, self._explanations), {}, {}  # its caches do not count
        rows = []
        for order in (halves, halves[::-1]):
            x = self._product(np.hstack(order), name + "eh_proj.weight")
            x = self._block(x, self._num_layers, self._attention)
            rows.append(self._norm(x, self._first(name + "shared_head_norm.weight", "output_norm.weight")))
        self._places, self._explanations = kept
        head = self._first(name + "shared_head_head.weight", "output.weight", "token_embd.weight")
        right, swapped = np.split(self._product(np.vstack(rows), head), 2)
        self._places[HEAD_LOGITS], self._explanations[HEAD_LOGITS] = right, {SWAPPED: swapped}

    def _block(self, x: Array, layer: int, mixer: Callable[[Array, int], Array]) -> Array:
        name = f"blk.{layer}."
        x = x + mixer(self._norm(x, name + "attn_norm.weight"), layer)
        normed = self._norm(x, name + "post_attention_norm.weight")
        gate, up = (self._product(normed, f"{name}ffn_{leaf}.weight") for leaf in ("gate", "up"))
        return x + self._product(_silu(gate) * up, name + "ffn_down.weight")

    def _delta_net(self, x: Array, layer: int) -> Array:
        name, keys, heads = f"blk.{layer}.", self._count("ssm.group_count"), self._count("ssm.time_step_rank")
        conv, norm = self._vector(name + "ssm_conv1d.weight"), self._vector(name + "ssm_norm.weight")
        window, dim = conv.shape[1] - 1, len(norm)
        qkv, z, alpha, beta = (
            self._product(x, f"{name}{leaf}.weight") for leaf in ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta")
        )
        padded = np.vstack([np.zeros((window, qkv.shape[1])), qkv])
        mixed = _silu(sum(padded[j : j + len(x)] * conv[:, j] for j in range(window + 1)))
        query, key, value = (
            part.reshape(len(x), -1, dim) for part in np.split(mixed, [keys * dim, 2 * keys * dim], axis=1)
        )
        query, key = (part / np.sqrt(np.square(part).sum(-1, keepdims=True) + self._eps) for part in (query, key))
        decay = np.exp(self._vector(name + "ssm_a") * np.logaddexp(0, alpha + self._vector(name + "ssm_dt.bias")))
        rate = 1 / (1 + np.exp(-beta))
        of_head = np.arange(heads)
        rows = self._places[name + "conv"] = padded[len(x) :]
        self._explanations[name + "conv"] = {
            **_in_other_orders(rows, 2 * keys * dim, keys, heads // keys),
            BEHIND: padded[len(x) - 1 : -1],
        }
        self._places[name + "state"], out = _delta_rule(query, key, value, decay, rate, of_head % keys)
        if heads != keys:
            grouped, _ = _delta_rule(query, key, value, decay, rate, of_head // (heads // keys))
            self._explanations[name + "state"] = {GROUPED: grouped}
        normed = (_normed(out, self._eps) * norm).reshape(len(x), -1)
        return self._product(normed * _silu(z), name + "ssm_out.weight")

    def _attention(self, x: Array, layer: int) -> Array:
        name, dim = f"blk.{layer}.", self._count("attention.key_length")
        heads, kv_heads = self._count("attention.head_count"), self._count("attention.head_count_kv")
        both = self._product(x, name + "attn_q.weight").reshape(len(x), heads, 2, dim)  # query, gate
        plain_key, value = (
            self._product(x, f"{name}attn_{leaf}.weight").reshape(len(x), kv_heads, dim) for leaf in "kv"
        )
        plain_key = self._norm(plain_key, name + "attn_k_norm.weight")
        query = _turned(self._norm(both[:, :, 0], name + "attn_q_norm.weight"), *self._rope())
        key = _turned(plain_key, *self._rope())
        self._places[name + "value_cache"], self._places[name + "key_cache"] = value.swapaxes(0, 1), key.swapaxes(0, 1)
        self._explanations[name + "key_cache"] = {
            fault: turned.swapaxes(0, 1) for fault, turned in self._wrongly_turned(plain_key).items()
        }
        out = np.empty((len(x), heads, dim))
        hidden = np.triu_indices(len(x), 1)
        for head in range(heads):
            of = head // (heads // kv_heads)
            scores = query[:, head] @ key[:, of].T / math.sqrt(dim)
            scores[hidden] = -np.inf
            share = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head] = share / share.sum(axis=1, keepdims=True) @ value[:, of]
        gated = out / (1 + np.exp(-both[:, :, 1]))
        return self._product(gated.reshape(len(x), -1), name + "attn_output.weight")

    def _wrongly_turned(self, key: Array) -> dict[str, Array]:
        frequencies, factor = self._rope()
        found = {
            LATE: _turned(key, frequencies, factor, first=1),
            NEXT_PAIR: _turned(key, frequencies * frequencies[1] / frequencies[0], factor),
            NEIGHBOURS: _turned(key, frequencies, factor, neighbours=True),
        }
        plain = self._plain_frequencies()
        if not np.array_equal(plain, frequencies):
            found[UNSCALED] = _turned(key, plain, 1.0)
        return found

    def _plain_frequencies(self) -> Array:
        dim = self._count("rope.dimension_count")
        return self._number("rope.freq_base") ** (-np.arange(0, dim, 2) / dim)

    def _rope(self) -> tuple[Array, float]:
        """Frequency of each pair, and the factor on cosines and sines."""
        plain = self._plain_frequencies()
        if self._file.get("qwen35.rope.scaling.type", str, "none") == "none":
            return plain, 1.0
        dim, theta, scale = 2 * len(plain), self._number("rope.freq_base"), self._number("rope.scaling.factor")
        original = self._count("rope.scaling.original_context_length")
        slow, fast = (dim * math.log(original / (2 * math.pi * n)) / (2 * math.log(theta)) for n in (1, 32))
        low, high = max(0, math.floor(fast)), min(dim - 1, math.ceil(slow))
        kept = 1 - np.clip((np.arange(len(plain)) - low) / max(0.001, high - low), 0, 1)
        return plain * kept + plain / scale * (1 - kept), 1 + 0.1 * math.log(scale)

    def _product(self, x: Array, name: str) -> Array:
        """x [T, K] by the rows of a matrix [N, K] -> [T, N]."""
        tensor = self._file.tensors[name]
        step, out = max(1, _CHUNK_VALUES // tensor.shape[-1]), np.empty((len(x), tensor.num_rows))
        for at in range(0, tensor.num_rows, step):
            stop = min(at + step, tensor.num_rows)
            out[:, at:stop] = x @ tensor.rows_f32(at, stop).astype(np.float64).T
            self._progress((stop - at) * tensor.shape[-1])
        return out

    def _rows(self, name: str, rows: Sequence[int]) -> Array:
        tensor = self._file.tensors[name]
        return np.vstack([tensor.rows_f32(row, row + 1) for row in rows]).astype(np.float64)

    def _norm(self, x: Array, name: str) -> Array:
        return _normed(x, self._eps) * self._vector(name)

    def _vector(self, name: str) -> Array:
        return self._file.tensors[name].f32().astype(np.float64)

    def _first(self, *names: str) -> str:
        return next(name for name in names if name in self._file.tensors)

    def _count(self, key: str, *default: int) -> int:
        return self._file.get(f"qwen35.{key}", int, *default)

    def _number(self, key: str) -> float:
        return self._file.get(f"qwen35.{key}", float)


def _has_head(file: GGUFFile) -> bool:
    """Whether any of it is there; one that was stripped may still be promised."""
    return any(".nextn." in name for name in file.tensors)


def _delta_rule(
    query: Array, key: Array, value: Array, decay: Array, rate: Array, key_head: Array
) -> tuple[Array, ...]:
    """State [HV, DK, DV] after the last token, and what is read of it after each [T, HV, DV]. key_head: [HV]."""
    query, key = query[:, key_head], key[:, key_head]
    state, out = np.zeros((value.shape[1], key.shape[2], value.shape[2])), np.empty_like(value)
    for t in range(len(value)):
        state = state * decay[t][:, None, None]
        delta = rate[t][:, None] * (value[t] - np.einsum("hkv,hk->hv", state, key[t]))
        state = state + key[t][:, :, None] * delta[:, None, :]
        out[t] = np.einsum("hkv,hk->hv", state, query[t]) / math.sqrt(value.shape[2])
    return state, out


def _in_other_orders(rows: Array, first: int, keys: int, per_key: int) -> dict[str, Array]:
    """Rows whose value heads, from column ``first`` on, go by key head where they took turns, or the reverse."""
    if min(keys, per_key) == 1:
        return {}
    own, values = rows[:, :first], rows[:, first:]
    found = {}
    orders = {"by key head": (per_key, keys), "in turns": (keys, per_key)}  # the same for as many of each
    for order, (outer, inner) in list(orders.items())[: 1 if keys == per_key else 2]:
        turned = values.reshape(len(rows), outer, inner, -1).swapaxes(1, 2).reshape(len(rows), -1)
        found[f"{REORDERED} order ({order})"] = np.hstack([own, turned])
    return found


def _turned(x: Array, frequencies: Array, factor: float, first: int = 0, neighbours: bool = False) -> Array:
    """Pairs of a head's first values turned by position, which counts from ``first``.   x: [T, heads, D]"""
    angle = (first + np.arange(len(x)))[:, None, None] * frequencies
    cos, sin, half = factor * np.cos(angle), factor * np.sin(angle), len(frequencies)
    one, other = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if neighbours else (slice(half), slice(half, 2 * half))
    out = x.copy()
    out[..., one], out[..., other] = x[..., one] * cos - x[..., other] * sin, x[..., other] * cos + x[..., one] * sin
    return out


def _normed(x: Array, eps: float) -> Array:
    return np.asarray(x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + eps))


def _silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))
