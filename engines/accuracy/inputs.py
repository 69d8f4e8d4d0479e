"""Inputs of the passes that are compared: real tokens, and the state that the reference left after those before.

Three passes: a long one from nothing, one of a verify pass's rows, one of a single row. A feed holds the inputs of both
graphs; Polygraphy gives each runner its own. Slots that a pass must not read hold stray numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from tokenizers import Tokenizer

from engines.accuracy import int8_rows, state_slots
from engines.accuracy.plan import CANONICAL, Plan
from engines.engine_manifest import pool_size
from engines.errors import EngineError, UsageError
from engines.given_files import reason
from engines.manifest import Geometry, Manifest

Feed = OrderedDict[str, np.ndarray]
_STRAY = 0.5
_ELSEWHERE = "or a folder prepared where it is there"
Run = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]
_MOST_TEXT_CHARACTERS = 1 << 20
DEFAULT_TEXT = (
    "The function len returns the number of items of a container. Call len(x) with a string, a list or a dictionary; "
    "other objects define __len__.\n\ndef mean(values):\n    total = 0.0\n    for value in values:\n"
    "        total += value\n    return total / len(values)\n\nWhat does this code do? It adds up the numbers, then "
    "divides by how many there are. With an empty list it raises ZeroDivisionError, since 0.0 / 0 is not defined. "
    "How would you guard against it?"
)


def token_ids(folder: Path, text: str, count: int) -> list[int]:
    """The first ``count`` tokens of a text, repeated if it is too short. folder: an export. Raises UsageError."""
    ids: list[int] = (
        Tokenizer.from_file(str(folder / "tokenizer.json"))
        .encode(text[:_MOST_TEXT_CHARACTERS], add_special_tokens=False)
        .ids
    )
    if not ids:
        raise UsageError("--text: no tokens in it")
    return (ids * (-(-count // len(ids))))[:count]


def make_feeds(folder: Path, plan: Plan, manifest: Manifest, text: str) -> dict[str, list[Feed]]:
    """By role; the canonical graphs in ``folder`` are run for the state."""
    counts = (plan.prompt_n, plan.max_rows, 1)
    tokens = token_ids(folder / CANONICAL, text, sum(counts))
    parts, positions = np.split(np.array(tokens), np.cumsum(counts)[:-1]), np.cumsum((0, *counts[:-1]))
    maker = _Feeds(plan, manifest.geometry)
    run = _run(folder / CANONICAL / "trunk.onnx")
    hidden = [np.zeros((1, manifest.geometry.hidden_size), np.float32)]
    trunk, state = [], maker.zero_state(manifest.geometry.attention_layers, manifest.geometry.gdn_layers)
    for slot, part, position in zip((-1, 0, plan.max_rows - 1), parts, positions, strict=True):
        trunk.append(maker.feed(part, int(position), state, slot))
        outputs = run(trunk[-1])
        hidden.append(outputs["hidden.out"])
        state = maker.state_after(outputs, state)
    feeds = {"trunk": trunk}
    if manifest.has_draft:
        run = _run(folder / CANONICAL / "draft.onnx")
        assert manifest.geometry.draft_layer is not None
        before, draft = np.concatenate(hidden), []
        state = maker.zero_state((manifest.geometry.draft_layer,), ())
        for part, position in zip(parts, positions, strict=True):
            rows = before[position : position + len(part)]
            draft.append(maker.feed(part, int(position), state, None, hidden=rows))
            state = maker.state_after(run(draft[-1]), state)
        feeds["draft"] = draft
    return feeds


class _Feeds:
    def __init__(self, plan: Plan, geometry: Geometry) -> None:
        self._plan, self._geometry = plan, geometry

    def zero_state(self, attention: Sequence[int], gdn: Sequence[int]) -> dict[str, np.ndarray]:
        """By the canonical graph's names."""
        g = self._geometry
        cache = (1, g.num_kv_heads, self._plan.context, g.head_dim)
        shapes: dict[str, tuple[int, ...]] = {}
        for layer in attention:
            shapes |= {f"blk.{layer}.{kind}_cache": cache for kind in ("key", "value")}
        for layer in gdn:
            shapes[f"blk.{layer}.state"] = (1, g.gdn_v_heads, g.gdn_head_dim, g.gdn_head_dim)
            shapes[f"blk.{layer}.conv"] = (1, g.conv_kernel - 1, g.conv_channels)
        return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}

    def state_after(self, outputs: dict[str, np.ndarray], before: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What the next pass starts from; caches hold what the engine's type of cache can."""
        after = {}
        for name, old in before.items():
            if name.endswith(".conv"):
                after[name] = outputs[f"{name}_rows"][:, -old.shape[1] :]
            else:
                new = outputs[f"{name}.out"]
                after[name] = self._kept(new) if name.endswith("_cache") else new
        return after

    def feed(
        self, tokens: np.ndarray, position: int, state: dict[str, np.ndarray], slot: int | None, **more: np.ndarray
    ) -> Feed:
        """slot None: a graph without recurrent state."""
        count = len(tokens)
        feed: Feed = OrderedDict(
            tokens=tokens.astype(np.int64),
            positions=np.arange(position, position + count),
            position=np.array([position], np.int32),
            rows=np.arange(count),
            **more,
            **state,
        )
        if slot is not None:
            feed["slot"] = np.array([slot], np.int32)
        for name, value in state.items():
            prefix = name.rsplit(".", 1)[0]
            if name.endswith(".state") and slot is not None:
                feed[f"{prefix}.pool"] = self._pool(value, state[f"{prefix}.conv"], slot)
            elif name.endswith(".key_cache"):
                feed[f"{prefix}.cache"] = self._cache(value, state[f"{prefix}.value_cache"])
        return feed

    def _pool(self, state: np.ndarray, window: np.ndarray, slot: int) -> np.ndarray:
        pool = np.full(pool_size(self._geometry, self._plan.max_rows), _STRAY, np.float32)
        first, steps, windows = state_slots.split(pool, state.shape[1], state.shape[2], window.size)
        if slot >= 0:  # else from zeros, whatever the slots hold
            first[:], windows[slot] = _led_to(state[0], steps[:slot]), window.ravel()
        return pool

    def _cache(self, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        """[2, L, KV, D] of two [1, KV, L, D]."""
        rows = np.stack([keys[0], values[0]]).transpose(0, 2, 1, 3)
        return int8_rows.encode(rows) if self._plan.kv_cache == "int8" else rows.astype(np.float16)

    def _kept(self, values: np.ndarray) -> np.ndarray:
        if self._plan.kv_cache == "int8":
            return int8_rows.decode(int8_rows.encode(values))
        return values.astype(np.float16).astype(np.float32)


def _led_to(state: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """A state from which ``steps``, written here, lead to the one given, but for its last bits."""
    heads, dim, _ = state.shape
    rng, size = np.random.default_rng(0), np.sqrt(np.square(state).mean(dtype=np.float64))
    for step in steps:
        key, delta = rng.standard_normal((2, heads, dim))
        decay = rng.uniform(0.5, 1, (heads,))
        state_slots.put_step(step, key / np.sqrt(dim), size * delta, decay)
    for step in reversed(steps):
        state = state_slots.state_before(state, step)
    return state


def session(path: Path) -> Any:
    """Of ONNX Runtime, on the CPU. Raises EngineError."""
    try:
        import onnxruntime
    except ImportError as error:
        raise EngineError(f"onnxruntime is not installed ({error}); {_ELSEWHERE}") from None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what goes wrong is raised
    try:
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # classes of its own
        reason = str(error).splitlines()[0]
        raise EngineError(
            f"{path}: onnxruntime {onnxruntime.__version__} says: {reason}; 1.32 or newer is needed, {_ELSEWHERE}"
        ) from error


def _run(path: Path) -> Run:
    opened = session(path)
    inputs, outputs = ([each.name for each in each_kind] for each_kind in (opened.get_inputs(), opened.get_outputs()))

    def run(feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return dict(zip(outputs, opened.run(outputs, {name: feed[name] for name in inputs}), strict=True))

    return run


def save_feeds(path: Path, feeds: list[Feed]) -> None:
    arrays: dict[str, Any] = {f"{i}/{name}": value for i, feed in enumerate(feeds) for name, value in feed.items()}
    np.savez(path, **arrays)


def load_feeds(path: Path) -> list[Feed]:
    """Raises EngineError."""
    feeds: dict[int, Feed] = {}
    try:
        with np.load(path) as file:
            for key in file.files:
                index, name = key.split("/", 1)
                feeds.setdefault(int(index), OrderedDict())[name] = file[key]
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise EngineError(f"{path}: cannot be read ({reason(error)}); prepare the folder again") from error
    return [feeds[index] for index in sorted(feeds)]
