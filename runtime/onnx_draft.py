"""The draft head on ONNX Runtime's CPU provider."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from engines.errors import NumericError
from engines.manifest import Geometry
from runtime.draft_tokens import DraftTokens
from runtime.engine import NO_CHOICE, Sampler, SavedState, of_finite
from runtime.onnx_session import PREFILL_CHUNK, KvCache, RowStack, run_session
from runtime.sampling import ParamsSampler

# At most so many guesses of one pass are told.
_GUESS_ROWS = 8


class OnnxDraftEngine:
    """The NextN head of one sequence (see `runtime.engine.SharedDraft`)."""

    prefill_chunk = PREFILL_CHUNK

    def __init__(
        self, session: ort.InferenceSession, geometry: Geometry, context_size: int, tokens: DraftTokens
    ) -> None:
        assert geometry.draft_layer is not None
        self.context_size = context_size
        self._tokens = tokens
        self._session, self._geometry = session, geometry
        self._cache, self._aside = KvCache([geometry.draft_layer], geometry), RowStack(geometry.hidden_size)
        self._bindings: dict[int, tuple[Any, dict[str, np.ndarray]]] = {}
        self.start(lambda logits, positions: np.argmax(logits, axis=-1))

    @property
    def position(self) -> int:
        return self._position

    @property
    def logits(self) -> np.ndarray:
        """Of the last step, [1, V] f32; -inf where the head cannot tell."""
        return self._tokens.whole_rows(self._logits)

    def start(self, sampler: Sampler) -> None:
        self._sampler, self._position = of_finite(sampler, self._tokens.whole_rows), 0
        self._cache.forget()
        self._looks_back = not isinstance(sampler, ParamsSampler)
        self._logits = np.zeros((0, self._tokens.count), np.float32)

    def prefill(self, tokens: Sequence[int], hidden: np.ndarray) -> None:
        self._step(tokens, hidden, self._position)
        self._position += len(tokens)

    def guess(self, tokens: Sequence[int], hidden: np.ndarray) -> np.ndarray | None:
        if self._looks_back:  # such a one must see every token in its turn
            return None
        count = len(tokens)
        rows, self._position = min(count, _GUESS_ROWS), self._position + count
        self._step(tokens, hidden, self._position - count, rows)
        places = self._position - rows + 1 + np.arange(rows)
        guesses = np.asarray(self._sampler(self._logits, places), np.int64)
        self._logits = self._logits[-1:]
        return guesses

    def draft(self, tokens: Sequence[int], hidden: np.ndarray, n: int) -> np.ndarray:
        assert n >= 1, n
        drafted: list[int] = []
        position = self._position
        self._position += len(tokens)
        for _ in range(n):
            hidden = self._step(tokens, hidden, position)
            position += len(tokens)
            try:
                tokens = [int(self._sampler(self._logits, np.array([position]))[0])]
            except NumericError:
                if not drafted:
                    raise
                self._cache.clear(self._position)
                return np.array(drafted + [NO_CHOICE] * (n - len(drafted)), np.int64)
            drafted.append(tokens[0])
        return np.array(drafted, np.int64)

    def another(self, trunk: Any) -> OnnxDraftEngine:
        return OnnxDraftEngine(self._session, self._geometry, self.context_size, self._tokens)

    def save_rows(self, first: int) -> SavedState:
        return self._cache.save(first, self._position)

    def load(self, rows: Sequence[SavedState]) -> None:
        assert not self._position, self._position
        if self._cache.load(rows):
            self._bindings.clear()
        self._position = sum(part.count for part in rows)

    def zero_hidden(self) -> np.ndarray:
        return np.zeros((1, self._geometry.hidden_size), np.float32)

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(list(parts), axis=0)

    def put_aside(self, kept: np.ndarray | None, rows: np.ndarray) -> np.ndarray:
        return self._aside.extended(kept, rows)

    def _step(self, tokens: Sequence[int], hidden: np.ndarray, position: int, rows: int = 1) -> np.ndarray:
        """Run the rows; logits are of the last ``rows``, the returned hidden [1, D] of the last."""
        count = len(tokens)
        assert 1 <= count <= self.prefill_chunk and len(hidden) == count, (count, len(hidden))
        if self._cache.reserve(position + count):
            self._bindings.clear()
        if rows > 1:  # rare, and many rows of logits are too much memory to keep
            binding, arrays = self._bind(count, rows)
        else:
            if count not in self._bindings:
                self._bindings[count] = self._bind(count, 1)
            binding, arrays = self._bindings[count]
        arrays["tokens"][:] = tokens
        arrays["positions"][:] = np.arange(position, position + count)
        arrays["hidden"][:] = hidden
        arrays["rows"][:] = count - rows + np.arange(rows)
        run_session(self._session, binding)
        self._logits = arrays["logits"]
        last: np.ndarray = arrays["hidden.out"][-1:].copy()
        return last

    def _bind(self, count: int, rows: int) -> tuple[Any, dict[str, np.ndarray]]:
        binding = self._session.io_binding()
        arrays: dict[str, np.ndarray] = {
            "tokens": np.zeros(count, np.int64),
            "positions": np.zeros(count, np.int64),
            "rows": np.zeros(rows, np.int64),
            "hidden": np.zeros((count, self._geometry.hidden_size), np.float32),
            "logits": np.zeros((rows, self._tokens.count), np.float32),
            "hidden.out": np.zeros((count, self._geometry.hidden_size), np.float32),
        }
        for name, array in arrays.items():
            if name in ("logits", "hidden.out"):
                binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array))
            else:
                binding.bind_cpu_input(name, array)
        self._cache.bind(binding)
        return binding, arrays
