"""What a synthetic model says and drafts (`make_synthetic_9b` writes it): known beforehand, for any acceptance.

The trunk's greedy token after t is trunk[t], the draft head's is draft[t], whatever came before. ``trunk`` walks the
ordinary tokens in cycles; ``draft`` equals it but at a random share 1 - p of the tokens, where it is another one of the
same cycle. So a draft is right with probability p, independently at every place, and p may change along the text.
NumPy only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tests.tiny_vocab import CONTROL, NORMAL, UNUSED, byte_characters

SEED = 20261129
MERGES = (("t", "h"), ("th", "e"), ("i", "n"), ("a", "n"), ("an", "d"))
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_PRINTABLE = range(32, 127)


@dataclass(frozen=True)
class Geometry:
    """Sizes under the names of the GGUF keys, roughly. special: the first control token's id. Rows of quantised
    matrices are multiples of 256, ``embd`` of 512, since the LM head's rows are cut in two."""

    embd: int
    ff: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    state: int
    k_heads: int
    v_heads: int
    vocab: int
    special: int
    interval: int = 4
    rope_dim: int = 64
    sections: tuple[int, ...] = (11, 11, 10, 0)
    theta: float = 1e7
    conv_kernel: int = 4
    context: int = 262144

    @property
    def inner(self) -> int:
        return self.state * self.v_heads

    @property
    def conv_dim(self) -> int:
        return 2 * self.state * self.k_heads + self.inner


GEOMETRIES = {
    # Qwen3.5-9B.
    "9b": Geometry(4096, 12288, 32, 16, 4, 256, 128, 16, 32, 248320, 248044),
    "small": Geometry(1024, 2048, 8, 4, 2, 256, 128, 4, 8, 8192, 8000),
    "tiny": Geometry(512, 512, 4, 4, 2, 64, 64, 2, 4, 2048, 2000),
}


def vocabulary(geometry: Geometry) -> tuple[list[str], list[int]]:
    """Texts and kinds of all tokens: the bytes, a few merges, then " xxxxx" (hex of the id), control tokens, padding.

    Ordinary text is read as bytes, for the most part: the tokens of the model's own text come from no text."""
    tokens = byte_characters() + [left + right for left, right in MERGES]
    space = byte_characters()[32]
    tokens += [f"{space}{token:05x}" for token in range(len(tokens), geometry.special)]
    kinds = [NORMAL] * len(tokens) + [CONTROL] * len(_SPECIAL)
    tokens += _SPECIAL
    tokens += [f"[PAD{token}]" for token in range(len(tokens), geometry.vocab)]
    return tokens, kinds + [UNUSED] * (geometry.vocab - len(kinds))


@dataclass(frozen=True)
class Run:
    """A generation as the speculative loop makes it: its tokens, verify passes, and drafts made and accepted."""

    tokens: list[int]
    verify_steps: int
    draft_n: int
    draft_n_accepted: int


@dataclass(frozen=True)
class SyntheticText:
    """acceptance: p, or several, each for ``change_every`` tokens of the text, in turn. ids: the text keeps to tokens
    below this id, once a printable ASCII character has begun it."""

    geometry: Geometry
    acceptance: float | tuple[float, ...]
    ids: int
    change_every: int = 0

    def __post_init__(self) -> None:
        if not all(0 <= p <= 1 for p in self.chances) or not self.chances or self.ids < _PRINTABLE.stop:
            raise ValueError(f"acceptance {self.acceptance}: 0 to 1; ids {self.ids}: {_PRINTABLE.stop} or more")
        if (len(self.chances) > 1) != (self.change_every > 0):
            raise ValueError(
                f"change_every {self.change_every}: 1 or more tokens if there are several acceptances, else 0"
            )

    @property
    def chances(self) -> tuple[float, ...]:
        return self.acceptance if isinstance(self.acceptance, tuple) else (self.acceptance,)

    @property
    def trunk(self) -> np.ndarray:
        """[V] i64: the greedy token after each."""
        return self._followers[0]

    @property
    def draft(self) -> np.ndarray:
        """[V] i64: what the head drafts after each."""
        return self._followers[1]

    @cached_property
    def _followers(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng([SEED, 1])
        trunk = np.arange(self.geometry.vocab)
        draft = trunk.copy()
        for cycle in self._cycles():
            rng.shuffle(cycle)
            trunk[cycle] = draft[cycle] = np.roll(cycle, -1)
            turns = np.arange(len(cycle)) // max(1, self.change_every) % len(self.chances)
            missed = cycle[rng.random(len(cycle)) >= np.array(self.chances)[turns]]
            if len(missed) > 1:  # a single one has no other to change places with
                draft[missed] = trunk[np.roll(missed, -1)]
        return trunk, draft

    def _cycles(self) -> Iterator[np.ndarray]:
        """The tokens of the text, and the other ordinary ones; all the rest follow on themselves."""
        ordinary = np.array([*_PRINTABLE, *range(256, self.geometry.special)])
        yield ordinary[ordinary < self.ids]
        if (ordinary >= self.ids).any():
            yield ordinary[ordinary >= self.ids]

    def after(self, token: int, n: int) -> list[int]:
        """The n greedy tokens after ``token``."""
        tokens = []
        for _ in range(n):
            token = int(self.trunk[token])
            tokens.append(token)
        return tokens

    def run(self, last: int, n_tokens: int, draft_n: int, max_rows: int = 64) -> Run:
        """Generation of ``n_tokens`` after a prompt that ends with ``last``, always drafting ``draft_n`` a round; the
        last rounds draft what the budget leaves, as the loop does."""
        tokens = self.after(last, n_tokens)
        at, steps, drafted, accepted = 0, 0, 0, 0  # tokens[at] is the last one emitted, the first comes from the prompt
        while at + 1 < n_tokens:
            n = min(draft_n, min(n_tokens - at - 1, max_rows) - 1)
            right = 0
            while right < n and self.draft[tokens[at + right]] == tokens[at + right + 1]:
                right += 1
            steps, drafted, accepted = steps + 1, drafted + n, accepted + right
            at += right + 1
        return Run(tokens, steps, drafted, accepted)

    def counts(self, last: int, n_tokens: int) -> np.ndarray:
        """[V] i64: how often each token occurs in the text after ``last`` and among the drafts along it, right or
        wrong: a draft head that keeps these rows accepts just what the whole head does."""
        tokens = [last, *self.after(last, n_tokens)]
        return np.bincount(np.concatenate([tokens, self.draft[tokens]]), minlength=self.geometry.vocab)
