"""Trunk and draft engines on ONNX Runtime's CPU provider: the embedded default, and the oracle for other engines.

Engines of several sequences share the sessions. State lives in NumPy buffers that these read and write in place (I/O
binding); a pass of T <= max_rows tokens has its binding made once. Recurrent state is kept twice: a pass reads one copy
and writes the other, so rolling back is reading the old copy again and replaying the tokens that stay; the KV cache
rolls back by its length.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from engines.errors import NumericError
from engines.manifest import Geometry, Manifest
from runtime.draft_tokens import load_draft_tokens
from runtime.engine import NO_CHOICE, SEQUENCES_DEFAULT, Pass, Sampler, SavedState, of_finite
from runtime.onnx_draft import OnnxDraftEngine
from runtime.onnx_session import PREFILL_CHUNK, KvCache, check_inputs, check_version, load_session, run_session


def open_engines(
    folder: Path,
    manifest: Manifest,
    *,
    context_size: int,
    threads: int = 0,
    max_rows: int = 4,
    draft: bool = True,
    num_sequences: int = 1,
) -> tuple[OnnxTrunkEngine, OnnxDraftEngine | None]:
    """Load an exported folder. threads 0: one per core. max_rows: draft_n of the longest round + 1. num_sequences: to
    be served, 0: SEQUENCES_DEFAULT; memory is taken as they come and grow.

    Raises EngineError (ONNX Runtime too old, damaged export) or ResourceError (memory)."""
    check_version(ort.__version__)
    geometry = manifest.geometry
    trunk_session = load_session(manifest.file(folder, "trunk"), threads)
    layers = [f"blk.{layer}.state" for layer in geometry.gdn_layers]
    caches = [f"blk.{layer}.key_cache" for layer in geometry.attention_layers]
    check_inputs(manifest.file(folder, "trunk"), trunk_session, layers + caches)
    replay_session = load_session(manifest.file(folder, "replay"), threads) if geometry.gdn_layers else None
    trunk = OnnxTrunkEngine(trunk_session, replay_session, geometry, context_size, max_rows)
    trunk.num_sequences = num_sequences or SEQUENCES_DEFAULT
    if not draft or not manifest.has_draft:
        return trunk, None
    session = load_session(manifest.file(folder, "draft"), threads)
    check_inputs(manifest.file(folder, "draft"), session, [f"blk.{geometry.draft_layer}.key_cache"])
    return trunk, OnnxDraftEngine(session, geometry, context_size, load_draft_tokens(folder, manifest))


class OnnxTrunkEngine:
    """The trunk of one sequence (see `runtime.engine.SharedTrunk`). ``logits``: of the last pass, [rows, V] f32."""

    prefill_chunk = PREFILL_CHUNK
    num_sequences = 1
    resumes_anywhere = True

    def __init__(
        self,
        session: ort.InferenceSession,
        replay: ort.InferenceSession | None,
        geometry: Geometry,
        context_size: int,
        max_rows: int,
    ) -> None:
        self.context_size, self.max_rows = context_size, max_rows
        self._session, self._replay, self._geometry = session, replay, geometry
        heads, dim = geometry.gdn_v_heads, geometry.gdn_head_dim
        window = geometry.conv_kernel - 1
        layers = geometry.gdn_layers
        self._states = [[np.zeros((1, heads, dim, dim), np.float32) for _ in layers] for _ in range(2)]
        self._convs = [np.zeros((1, window, geometry.conv_channels), np.float32) for _ in layers]
        self._conv_rows: list[np.ndarray] = []
        widths = {"key": heads * dim, "value": heads * dim, "decay": heads, "rate": heads}
        self._updates = [
            {leaf: np.zeros(max_rows * width, np.float32) for leaf, width in widths.items()} for _ in layers
        ]
        self._widths = widths
        self._cache = KvCache(geometry.attention_layers, geometry)
        self._bindings: dict[tuple[int, int], tuple[Any, dict[str, np.ndarray]]] = {}
        self._replay_bindings: dict[tuple[int, int], Any] = {}
        self.start(lambda logits, positions: np.argmax(logits, axis=-1))

    @property
    def position(self) -> int:
        return self._position

    def start(self, sampler: Sampler) -> None:
        self._sampler, self._position, self._pending, self._current = of_finite(sampler), 0, 0, 0
        self._damage: NumericError | None = None
        self._cache.forget()
        for buffer in (*self._states[0], *self._convs):
            buffer[:] = 0
        self.logits = np.zeros((0, self._geometry.vocab_size), np.float32)

    def prefill(self, tokens: Sequence[int]) -> Pass:
        count = len(tokens)
        assert 1 <= count <= self.prefill_chunk and not self._pending, (count, self._pending)
        self._reserve(count)
        hidden = self._run(self._bind(count, rows=1, keep_updates=False), tokens, np.array([count - 1]))
        choices = np.asarray(self._sampler(self.logits, np.array([self._position + count])), np.int64).tolist()
        self._keep_convs(count)
        self._current ^= 1
        self._position += count
        return Pass(choices, hidden)

    def verify(self, tokens: Sequence[int]) -> Pass:
        count = len(tokens)
        assert 1 <= count <= self.max_rows and not self._pending, (count, self._pending)
        self._reserve(count)
        hidden = self._run_rows(tokens)
        try:
            choices = np.asarray(self._sampler(self.logits, self._position + 1 + np.arange(count)), np.int64).tolist()
        except NumericError as damage:
            choices, hidden = self._verify_by_steps(tokens)
            self._damage = damage
        self._pending = len(hidden)
        return Pass(choices, hidden)

    def commit(self, n_keep: int) -> None:
        if n_keep > self._pending and self._damage is not None:
            raise self._damage
        assert 1 <= n_keep <= self._pending, (n_keep, self._pending)
        if n_keep < self._pending and self._replay is not None:
            key = (n_keep, self._current)
            if key not in self._replay_bindings:
                self._replay_bindings[key] = self._bind_replay(n_keep)
            run_session(self._replay, self._replay_bindings[key])
        self._keep_convs(n_keep)
        self._current ^= 1
        self._position += n_keep
        self._pending = 0

    def another(self) -> OnnxTrunkEngine:
        return OnnxTrunkEngine(self._session, self._replay, self._geometry, self.context_size, self.max_rows)

    def save_rows(self, first: int) -> SavedState:
        return self._cache.save(first, self._position)

    def save_recurrent(self) -> SavedState:
        copies = [array.copy() for array in (*self._states[self._current], *self._convs)]
        return SavedState(copies, sum(copy.nbytes for copy in copies))

    def load(self, rows: Sequence[SavedState], recurrent: SavedState) -> None:
        assert not self._position and not self._pending, (self._position, self._pending)
        if self._cache.load(rows):
            self._bindings.clear()
        for array, saved in zip((*self._states[self._current], *self._convs), recurrent.data, strict=True):
            array[:] = saved
        self._position = sum(part.count for part in rows)

    def state(self) -> dict[str, np.ndarray]:
        """Copies of everything the committed tokens left behind: GDN state, conv window, KV rows below ``position``."""
        copies: dict[str, np.ndarray] = {}
        for index, layer in enumerate(self._geometry.gdn_layers):
            copies[f"blk.{layer}.state"] = self._states[self._current][index].copy()
            copies[f"blk.{layer}.conv"] = self._convs[index].copy()
        for name, buffer in self._cache.buffers.items():
            copies[name] = buffer[:, :, : self._position].copy()
        return copies

    def _verify_by_steps(self, tokens: Sequence[int]) -> tuple[list[int], np.ndarray]:
        """Choices [T] of a pass with damaged logits, up to the first damaged row or rejected draft, and the hidden rows
        that can be kept: one token more at a time, as a NaN in a row's values reaches the rows before it (0 * NaN)."""
        choices = [NO_CHOICE] * len(tokens)
        for count in range(1, len(tokens) + 1):
            self._cache.clear(self._position)
            hidden = self._run_rows(tokens[:count])
            try:
                choices[count - 1] = int(self._sampler(self.logits[-1:], np.array([self._position + count]))[0])
            except NumericError:
                if count == 1:
                    raise
                self._cache.clear(self._position)
                return choices, self._run_rows(tokens[: count - 1])
            if count == len(tokens) or choices[count - 1] != tokens[count]:
                break
        return choices, hidden

    def _reserve(self, count: int) -> None:
        """Make room in the cache for the next ``count`` tokens; bindings to buffers that moved are dropped."""
        if self._cache.reserve(self._position + count):
            self._bindings.clear()

    def _keep_convs(self, count: int) -> None:
        for conv, rows in zip(self._convs, self._conv_rows, strict=True):
            conv[:] = rows[:, count : count + conv.shape[1]]

    def _bind(self, count: int, rows: int, keep_updates: bool) -> tuple[Any, dict[str, np.ndarray]]:
        """A binding for a pass of ``count`` tokens that reads the current recurrent state and writes the other."""
        geometry, binding = self._geometry, self._session.io_binding()
        arrays: dict[str, np.ndarray] = {
            "tokens": np.zeros(count, np.int64),
            "positions": np.zeros(count, np.int64),
            "rows": np.zeros(rows, np.int64),
            "logits": np.zeros((rows, geometry.vocab_size), np.float32),
            "hidden.out": np.zeros((count, geometry.hidden_size), np.float32),
        }
        for name in ("tokens", "positions", "rows"):
            binding.bind_cpu_input(name, arrays[name])
        self._cache.bind(binding)
        for index, layer in enumerate(geometry.gdn_layers):
            prefix = f"blk.{layer}."
            binding.bind_cpu_input(prefix + "conv", self._convs[index])
            binding.bind_cpu_input(prefix + "state", self._states[self._current][index])
            arrays[prefix + "state.out"] = self._states[self._current ^ 1][index]
            window = geometry.conv_kernel - 1 + count
            arrays[prefix + "conv_rows"] = np.zeros((1, window, geometry.conv_channels), np.float32)
            for leaf, width in self._widths.items():
                flat = self._updates[index][leaf] if keep_updates else np.zeros(count * width, np.float32)
                arrays[prefix + leaf] = flat[: count * width].reshape(1, count, width)
        for name, array in arrays.items():
            if name not in ("tokens", "positions", "rows"):
                binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array))
        return binding, arrays

    def _bind_replay(self, count: int) -> Any:
        assert self._replay is not None
        binding = self._replay.io_binding()
        for index, layer in enumerate(self._geometry.gdn_layers):
            prefix = f"blk.{layer}."
            binding.bind_cpu_input(prefix + "state", self._states[self._current][index])
            for leaf, width in self._widths.items():
                rows = self._updates[index][leaf][: count * width].reshape(1, count, width)
                binding.bind_cpu_input(prefix + leaf, rows)
            written = ort.OrtValue.ortvalue_from_numpy(self._states[self._current ^ 1][index])
            binding.bind_ortvalue_output(prefix + "state.out", written)
        return binding

    def _run_rows(self, tokens: Sequence[int]) -> np.ndarray:
        """A pass that gives logits of every row and can be rolled back."""
        key = (len(tokens), self._current)
        if key not in self._bindings:
            self._bindings[key] = self._bind(len(tokens), rows=len(tokens), keep_updates=True)
        return self._run(self._bindings[key], tokens, np.arange(len(tokens)))

    def _run(self, bound: tuple[Any, dict[str, np.ndarray]], tokens: Sequence[int], rows: np.ndarray) -> np.ndarray:
        """Run a pass; its hidden rows [T, D]."""
        binding, arrays = bound
        arrays["tokens"][:] = tokens
        arrays["positions"][:] = np.arange(self._position, self._position + len(tokens))
        arrays["rows"][:] = rows
        run_session(self._session, binding)
        self._conv_rows = [arrays[f"blk.{layer}.conv_rows"] for layer in self._geometry.gdn_layers]
        self.logits = arrays["logits"]
        hidden: np.ndarray = arrays["hidden.out"].copy()
        return hidden
