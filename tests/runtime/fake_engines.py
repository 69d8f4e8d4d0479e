"""Toy engines for the loop: a trunk whose state is a hash of every token it took, and heads of every quality.

Any state that is not restored, any row fed twice, shifted or left out, changes all logits from there on. A trunk row's
"hidden" is the state after it, so a head that gets (token, hidden of the position before) can compute the trunk's next
choice exactly; given anything else it cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from engines.engine_manifest import GUESS_ROWS
from runtime.engine import Pass, Sampler

VOCAB = 13
START_STATE = 1


def next_state(state: int, token: int) -> int:
    return (state * 6364136223846793005 + int(token) * 1442695040888963407 + 11) % (1 << 62)


def logits_of(state: int) -> np.ndarray:
    """[1, VOCAB] float32, a function of the state alone."""
    return np.random.default_rng(state).standard_normal((1, VOCAB)).astype(np.float32)


def choice(state: int, position: int, sampler: Sampler) -> int:
    return int(sampler(logits_of(state), np.array([position], np.int64))[0])


def greedy(logits: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return logits.argmax(axis=1)


def noisy(seed: int) -> Sampler:
    """Gumbel-max at a high temperature, pure in (logits, position)."""

    def sample(logits: np.ndarray, positions: np.ndarray) -> np.ndarray:
        noise = [np.random.default_rng((seed, int(p))).gumbel(size=logits.shape[1]) for p in positions]
        return (logits + np.stack(noise)).argmax(axis=1)

    return sample


def plain_decode(
    prompt: Sequence[int], sampler: Sampler, max_tokens: int, end_token_ids: Sequence[int], context_size: int
) -> tuple[list[int], str]:
    """(tokens, finish reason) as the definition of the toy has them, one token at a time, with no engine."""
    state = START_STATE
    for token in prompt:
        state = next_state(state, token)
    room = context_size - len(prompt)
    out: list[int] = []
    while len(out) < (room if max_tokens < 0 else min(room, max_tokens)):
        token = choice(state, len(prompt) + len(out), sampler)
        if token in end_token_ids:
            return out, "stop"
        out.append(token)
        state = next_state(state, token)
    return out, "length"


class ToyTrunk:
    """A TrunkEngine that refuses every breach of the protocol."""

    def __init__(self, context_size: int = 64, max_rows: int = 6, prefill_chunk: int = 4) -> None:
        self.context_size, self.max_rows, self.prefill_chunk = context_size, max_rows, prefill_chunk
        self.verified: list[list[int]] = []

    @property
    def position(self) -> int:
        return self._position

    def start(self, sampler: Sampler) -> None:
        self._sampler, self._position, self.state = sampler, 0, START_STATE
        self._pending: list[int] | None = None
        self.verified = []

    def _run(self, tokens: Sequence[int]) -> list[int]:
        assert self._pending is None, "the last verify pass was never committed"
        assert self._position + len(tokens) <= self.context_size, "past the context"
        assert all(0 <= token < VOCAB for token in tokens)
        states = [self.state]
        for token in tokens:
            states.append(next_state(states[-1], token))
        return states[1:]

    def prefill(self, tokens: Sequence[int]) -> Pass:
        assert 1 <= len(tokens) <= self.prefill_chunk
        states = self._run(tokens)
        self._position += len(tokens)
        self.state = states[-1]
        return Pass([choice(self.state, self._position, self._sampler)], np.array(states)[:, None])

    def verify(self, tokens: Sequence[int]) -> Pass:
        assert 1 <= len(tokens) <= self.max_rows
        states = self._run(tokens)
        self.verified.append(list(tokens))
        self._pending = states
        places = self._position + 1 + np.arange(len(states))
        choices = self._sampler(np.concatenate([logits_of(state) for state in states]), places)
        return Pass(choices.tolist(), np.array(states)[:, None])

    def commit(self, n_keep: int) -> None:
        assert self._pending is not None and 1 <= n_keep <= len(self._pending)
        self.state = self._pending[n_keep - 1]
        self._position += n_keep
        self._pending = None


class UnrestoredTrunk(ToyTrunk):
    """Broken on purpose: rolls back the position, not the state."""

    def commit(self, n_keep: int) -> None:
        assert self._pending is not None
        last = self._pending[-1]
        super().commit(n_keep)
        self.state = last


class ToyHead:
    """A DraftEngine. ``twist(right token, its position)`` is what it drafts; the default is always right."""

    def __init__(self, twist: Callable[[int, int], int] = lambda token, _: token, prefill_chunk: int = 5) -> None:
        self.prefill_chunk = prefill_chunk
        self._twist = twist
        self.draft_calls: list[tuple[int, int]] = []
        self.guess_calls: list[int] = []

    @property
    def position(self) -> int:
        return len(self.rows)

    def start(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.rows: list[tuple[int, int]] = []
        self.draft_calls, self.guess_calls = [], []

    def _take(self, tokens: Sequence[int], hidden: np.ndarray) -> None:
        assert 1 <= len(tokens) <= self.prefill_chunk
        assert hidden.shape == (len(tokens), 1)
        self.rows += [(int(token), int(state)) for token, state in zip(tokens, hidden[:, 0], strict=True)]

    def prefill(self, tokens: Sequence[int], hidden: np.ndarray) -> None:
        self._take(tokens, hidden)

    def guess(self, tokens: Sequence[int], hidden: np.ndarray) -> np.ndarray | None:
        self._take(tokens, hidden)
        self.guess_calls.append(len(tokens))
        places = range(max(0, len(self.rows) - min(len(tokens), GUESS_ROWS)), len(self.rows))
        states = [next_state(self.rows[place][1] or START_STATE, self.rows[place][0]) for place in places]
        choices = [choice(state, place + 1, self._sampler) for place, state in zip(places, states, strict=True)]
        return np.array([self._twist(token, place + 1) for place, token in zip(places, choices, strict=True)])

    def draft(self, tokens: Sequence[int], hidden: np.ndarray, n: int) -> np.ndarray:
        assert n >= 1
        self.draft_calls.append((len(tokens), n))
        self._take(tokens, hidden)
        token, state = self.rows[-1]
        drafts: list[int] = []
        for position in range(len(self.rows), len(self.rows) + n):
            state = next_state(state or START_STATE, token)  # a zero hidden stands for the start of the sequence
            self.last_state = state
            token = self._twist(choice(state, position, self._sampler), position)
            drafts.append(token)
        return np.array(drafts)

    def zero_hidden(self) -> np.ndarray:
        return np.zeros((1, 1), np.int64)

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(list(parts))

    def put_aside(self, kept: np.ndarray | None, rows: np.ndarray) -> np.ndarray:
        assert kept is None or kept is self._aside, "only what the last call returned can be added to"
        self._aside = rows.copy() if kept is None else np.concatenate([kept, rows])
        return self._aside

    def check_rows(self, sequence: Sequence[int]) -> None:
        """Every row taken holds the sequence's token and the trunk's true hidden of the position before."""
        assert [token for token, _ in self.rows] == list(sequence[: len(self.rows)])
        for (token, before), (_, after) in pairwise(self.rows):
            assert after == next_state(before or START_STATE, token)
