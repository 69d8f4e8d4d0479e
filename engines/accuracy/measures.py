"""How far two runs of a pass are apart, place by place: the numbers, and how far they may be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from engines.accuracy import int8_rows, state_slots
from engines.accuracy.graphs import JOINED
from engines.accuracy.plan import Plan
from engines.evidence import ROUNDING_MOST, ROUNDING_NMSE, layers_so_far, rounded_state
from engines.manifest import Geometry

# Order within a block; what a plugin node makes is named after the last canonical node that it stands for.
_STAGES = (
    ("token_embd", "embed_tokens"),
    ("concat",),
    ("eh_proj",),
    ("attn_qkv", "attn_q"),
    ("state", "conv", "key_cache", "value_cache"),
    ("gdn", "attention"),
    ("mixer_residual",),
    ("swiglu", "ffn_gate", "ffn_up"),
    ("ffn_residual",),
    ("shared_head_norm", "hidden.out"),
    ("logits",),
)
_LAST_BLOCK = 1 << 30
_CHANNEL_MOST = 3e-2


@dataclass(frozen=True)
class Tolerance:
    """What passes. nmse: squared error over squared reference; channel: the same of the worst column, over the larger
    of its own and the mean column's energy; kl_mean: nats a row; top1: share of rows with the reference's best token,
    rows left out whose best two logits lie closer than max_abs of the row."""

    nmse: float
    channel: float
    kl_mean: float
    top1: float

    def after(self, layers: int) -> Tolerance:
        """What passes after so many layers, whose rounding adds up; up to what faults come to."""
        grown = {
            name: max(base, min(base * layers, most))
            for name, base, most in (
                ("nmse", self.nmse, ROUNDING_MOST),
                ("channel", self.channel, _CHANNEL_MOST),
                ("kl_mean", self.kl_mean, ROUNDING_MOST),
            )
        }
        return Tolerance(**grown, top1=self.top1)


@dataclass(frozen=True)
class Measure:
    """One tensor. worst_channel: its index; local: that channel stands out, nearly all others agree. rounded: see
    `engines.evidence.rounded_state`. parts: tensors that stand side by side in it, with their columns."""

    name: str
    shape: tuple[int, ...]
    max_abs: float
    nmse: float
    channel: float
    worst_channel: int
    local: bool
    ok: bool
    kl_mean: float | None = None
    kl_max: float | None = None
    top1: float | None = None
    rounded: str = ""
    parts: tuple[tuple[str, int], ...] = field(default=(), repr=False)

    def as_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "parts"}


def measure_all(
    reference: Mapping[str, np.ndarray],
    engine: Mapping[str, np.ndarray],
    geometry: Geometry,
    plan: Plan,
    tolerance: Tolerance,
) -> list[Measure]:
    """Every output of the engine that the reference has, in the order of the model. tolerance: of the first layer."""
    measures = []
    found = {**engine, **_states(engine, geometry, plan)}
    layers = layers_so_far(found)
    for name, got in found.items():
        parts = [part for part in name.split(JOINED) if part in reference]
        if parts and len(parts) == len(name.split(JOINED)):
            arrays = [np.asarray(reference[part]) for part in parts]
            widths = tuple((part, array.shape[-1]) for part, array in zip(parts, arrays, strict=True))
            want = np.concatenate(arrays, axis=-1)
        elif (state := reference_state(name, reference, got.shape)) is not None:
            want, widths = state, ()
        else:
            continue
        measures.append(measure(name, np.asarray(got), want, tolerance.after(layers[name]), widths))
    return sorted(measures, key=lambda each: _place(each.name))


def measure(
    name: str,
    got: np.ndarray,
    want: np.ndarray,
    tolerance: Tolerance,
    parts: tuple[tuple[str, int], ...] = (),
) -> Measure:
    """Of one tensor, its columns being the last dimension."""
    assert got.shape == want.shape, (name, got.shape, want.shape)
    got, want = (array.astype(np.float64).reshape(-1, array.shape[-1]) for array in (got, want))
    squares, energy = np.square(got - want).sum(axis=0), np.square(want).sum(axis=0)
    channels = squares / np.maximum(np.maximum(energy, energy.mean()), 1e-30)
    worst = int(np.argmax(np.nan_to_num(channels, nan=np.inf)))
    nmse, channel = float(squares.sum() / max(energy.sum(), 1e-30)), float(channels[worst])
    rounded = rounded_state(name, got, want) if nmse < ROUNDING_NMSE else ""
    ok = bool(nmse <= tolerance.nmse and channel <= tolerance.channel and not rounded)  # not so for a NaN
    local = not ok and bool(np.quantile(channels, 0.9) < 0.01 * channel)
    max_abs = float(np.abs(got - want).max()) if got.size else 0.0
    more: dict[str, Any] = {}
    if name == "logits":
        kl = kl_divergence(want, got)
        ordered = np.sort(want, axis=-1)
        close = ordered[:, -1] - ordered[:, -2] <= np.abs(got - want).max(axis=-1)  # not so for a NaN
        agree = (got.argmax(axis=-1) == want.argmax(axis=-1)) | close
        more = {"kl_mean": float(kl.mean()), "kl_max": float(kl.max()), "top1": float(agree.mean())}
        ok = ok and more["kl_mean"] <= tolerance.kl_mean and more["top1"] >= tolerance.top1
    return Measure(name, got.shape, max_abs, nmse, channel, worst, local, ok, rounded=rounded, parts=parts, **more)


def kl_divergence(p_logits: np.ndarray, q_logits: np.ndarray) -> np.ndarray:
    """KL(p || q) in nats of every row."""
    log_p, log_q = (_log_softmax(logits) for logits in (p_logits, q_logits))
    return np.asarray(np.sum(np.exp(log_p) * (log_p - log_q), axis=-1))


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def _states(engine: Mapping[str, np.ndarray], geometry: Geometry, plan: Plan) -> dict[str, np.ndarray]:
    """What the engine's pools and caches hold, one tensor a kind, by the canonical names."""
    tokens, slots = len(engine["hidden.out"]), plan.max_rows
    heads, dim, window = geometry.gdn_v_heads, geometry.gdn_head_dim, geometry.conv_kernel - 1
    found = {}
    for name, value in engine.items():
        prefix, _, kind = name.removesuffix(".out").rpartition(".")
        if kind == "pool":
            channels = geometry.conv_channels
            state, steps, windows = state_slots.split(np.asarray(value), heads, dim, window * channels)
            last = tokens - 1 if tokens <= slots else 0
            found[f"{prefix}.state"] = state_slots.state_of(state, steps, last)
            used = slice(tokens) if tokens <= slots else slice(1)
            found[f"{prefix}.conv"] = windows.reshape(slots, window, channels)[used]
        elif kind == "cache":
            rows = int8_rows.decode(np.asarray(value)) if value.dtype == np.int8 else np.asarray(value)
            found[f"{prefix}.key_cache"], found[f"{prefix}.value_cache"] = rows
    return found


def reference_state(name: str, reference: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> np.ndarray | None:
    """The canonical graph's state, as `_states` lays it out."""
    if name.endswith(".state") and f"{name}.out" in reference:
        return np.asarray(reference[f"{name}.out"])[0]
    if name.endswith("_cache") and f"{name}.out" in reference:
        return np.asarray(reference[f"{name}.out"])[0].transpose(1, 0, 2)
    if name.endswith(".conv") and f"{name}_rows" in reference:
        rows, (count, window, _) = np.asarray(reference[f"{name}_rows"])[0], shape
        first = len(rows) - window - count + 1  # the last window is the one after the last token
        return np.stack([rows[i : i + window] for i in range(first, first + count)])
    return None


def _place(name: str) -> tuple[int, int, str]:
    block = re.match(r"blk\.(\d+)[./](.*)", name)
    leaf = (block[2] if block else name).split(JOINED)[0].split("/")[-1]
    stage = next((index for index, names in enumerate(_STAGES) if leaf in names), len(_STAGES) // 2)
    if block:
        return int(block[1]), stage, name
    return (-1 if stage == 0 else _LAST_BLOCK), stage, name
