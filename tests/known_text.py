"""Models whose output is known beforehand: with every residual branch of the trunk zero, the hidden state is the
last token's embedding, so logits are a table by that token, whatever came before it.

The recurrent and attention state still changes with every token; it only never reaches the output.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests import tiny_vocab
from tests.tiny_gguf import Spec, TinyModel, build

RMS_EPS = 1e-6
# The ids of 17 visible letters: a prime, so that the walk falls out of step with every draft depth.
RING: tuple[int, ...] = tuple(b"thequickbrownfxjm")
RING_GAIN = 8.0


@dataclass(frozen=True)
class RingText:
    """A deterministic text: tokens fall into ``len(RING)`` classes, ``follower[class]`` comes next.

    Ring tokens have their place in the ring as class, any other token its id modulo the ring's length.
    """

    follower: tuple[int, ...]

    @staticmethod
    def class_of(token: int) -> int:
        return RING.index(token) if token in RING else token % len(RING)

    def next(self, token: int) -> int:
        """The greedy token after ``token``."""
        return self.follower[self.class_of(token)]

    def greedy(self, token: int, n: int) -> list[int]:
        """The ``n`` greedy tokens after ``token``, end tokens not heeded."""
        text: list[int] = []
        for _ in range(n):
            token = self.next(token)
            text.append(token)
        return text

    def logits(self, token: int, vocab: int = 320) -> np.ndarray:
        """[vocab] f64: RING_GAIN at the next token, 0 elsewhere, but for the epsilon of RMSNorm."""
        row = np.zeros(vocab)
        row[self.next(token)] = RING_GAIN / np.sqrt(1 + RMS_EPS)
        return row


_AROUND = RING[1:] + RING[:1]
# Walks the ring for ever.
ENDLESS = RingText(_AROUND)
# After the ring's last token: its first 11 tokens, then <|im_end|>.
STOP_INSIDE = RingText((*_AROUND[:10], tiny_vocab.IM_END, *_AROUND[11:]))
# <|im_end|> after every token.
STOP_AT_ONCE = RingText((tiny_vocab.IM_END,) * len(RING))


def ring_model(text: RingText, perfect_draft: bool = False) -> TinyModel:
    """A model that says ``text``. Its draft head drafts exactly that text, or gets about two in three right."""
    model = build(Spec())
    _silence(model)
    rows, width = model.tensors["token_embd.weight"].shape
    classes = _hadamard(width)[: len(RING)]  # orthogonal rows of +-1, mean square 1
    model.tensors["token_embd.weight"] = classes[[text.class_of(token) for token in range(rows)]]
    head = np.zeros((rows, width), np.float32)
    for place, token in enumerate(text.follower):
        head[token] += classes[place] * np.float32(RING_GAIN / width)
    model.tensors["output.weight"] = head
    _copy_trunk(model, noise=0.0 if perfect_draft else 3.0)
    return model


def bigram_model() -> TinyModel:
    """A model with a broad next-token distribution, `bigram_logits`, and a draft head that is often right."""
    model = build(Spec())
    _silence(model)
    rng = np.random.default_rng(11)
    rows, width = model.tensors["token_embd.weight"].shape
    # Rows of mean square 1 whose first entry is always 1: the head can bar a token whatever came before.
    embedding = rng.standard_normal((rows, width))
    embedding[:, 0] = 0
    embedding *= np.sqrt((width - 1) / np.square(embedding).sum(1, keepdims=True))
    embedding[:, 0] = 1
    head = rng.standard_normal((rows, width)) * (1.5 / np.sqrt(width))
    head[:, 0] = 0
    head[tiny_vocab.FIRST_SPECIAL :] = 0
    head[tiny_vocab.FIRST_SPECIAL :, 0] = -30
    model.tensors["token_embd.weight"] = embedding.astype(np.float32)
    model.tensors["output.weight"] = head.astype(np.float32)
    _copy_trunk(model, noise=0.5)
    return model


def bigram_logits(model: TinyModel, token: int) -> np.ndarray:
    """[vocab] f64 logits of any silent-trunk model after ``token``. Tokens from FIRST_SPECIAL on stay near -30."""
    hidden = model.tensors["token_embd.weight"][token].astype(np.float64)
    hidden = hidden / np.sqrt(np.square(hidden).mean() + RMS_EPS) * model.tensors["output_norm.weight"]
    return model.tensors["output.weight"].astype(np.float64) @ hidden


def _silence(model: TinyModel) -> None:
    """Zero every residual branch of the trunk, and make the last norm plain."""
    draft = _draft_name(model, "")
    for name, values in model.tensors.items():
        if not name.startswith(draft) and _is_branch_end(name):
            model.tensors[name] = np.zeros_like(values)
    model.tensors["output_norm.weight"] = np.ones_like(model.tensors["output_norm.weight"])


def _copy_trunk(model: TinyModel, noise: float) -> None:
    """Make the draft head the same table of its token, spoilt by ``noise`` (as large as the values at 1).

    eh_proj takes the embedding half as it is and noise times both halves; the block's own branches are zero.
    """
    draft = _draft_name(model, "")
    for name, values in model.tensors.items():
        if name.startswith(draft) and _is_branch_end(name):
            model.tensors[name] = np.zeros_like(values)
    for leaf in ("nextn.enorm.weight", "nextn.shared_head_norm.weight"):
        model.tensors[draft + leaf] = np.ones_like(model.tensors[draft + leaf])
    rows, columns = model.tensors[draft + "nextn.eh_proj.weight"].shape
    spoilt = np.random.default_rng(5).standard_normal((rows, columns)) * (noise / np.sqrt(columns))
    spoilt[0] = 0  # the first entry bars tokens in `bigram_model`
    model.tensors[draft + "nextn.eh_proj.weight"] = (np.eye(rows, columns) + spoilt).astype(np.float32)


def _draft_name(model: TinyModel, leaf: str) -> str:
    return f"blk.{model.metadata['qwen35.block_count'] - 1}.{leaf}"


def _is_branch_end(name: str) -> bool:
    return name.endswith((".attn_output.weight", ".ssm_out.weight", ".ffn_down.weight"))


def _hadamard(size: int) -> np.ndarray:
    matrix = np.ones((1, 1), np.float32)
    while matrix.shape[0] < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix
