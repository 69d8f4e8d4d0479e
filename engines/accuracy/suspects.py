"""From the first place that is off to what may be wrong: the one line that says where to look."""

from __future__ import annotations

from collections.abc import Sequence

from engines.accuracy.graphs import JOINED
from engines.accuracy.measures import Measure
from engines.evidence import ROUNDING_NMSE

_BY_LEAF = {
    "token_embd": "the embedding: its blocks, or token ids",
    "embed_tokens": "the head's embedding: its blocks, or token ids",
    "concat": "what eh_proj is given: enorm and hnorm, and which of them comes first",
    "eh_proj": "eh_proj: the order of its halves, or its blocks",
    "key_cache": "rope (position, frequencies, pairs) or the key norm",
    "value_cache": "the cache: rows written at another position, or the value projection",
    "conv": "the window of the convolution: the slot it is taken from or put into",
    "gdn": "the gated norm of the delta net, or its gate z",
    "attention": "attention over the cache: query rope, scale, mask, output gate",
    "mixer_residual": "the mixer's output projection",
    "swiglu": "the feed-forward network's gate or up",
    "ffn_residual": "the feed-forward network's down",
    "shared_head_norm": "the head's last norm",
    "hidden.out": "the last norm",
    "logits": "the LM head: its blocks, or which rows it is given",
}


def first_bad(measures: Sequence[Measure]) -> Measure | None:
    return next((each for each in measures if not each.ok), None)


def suspect(measures: Sequence[Measure], layers: bool = False) -> str:
    """What the first place that is off suggests; "" when none is. layers: of a layer no more is seen than its end and
    its state, which any of its parts may have spoilt."""
    bad = first_bad(measures)
    if bad is None:
        return ""
    if bad.rounded:
        return f"{bad.rounded} ({bad.nmse:.1g} of its energy is lost)"
    if layers and bad.name.startswith("blk.") and not bad.name.endswith("concat"):
        return f"something in layer {bad.name.split('.')[1].split('/')[0]}; single ops (--lowering ops) tell what"
    if bad.local and bad.shape[-1] > 1 and not bad.name.endswith((".state", ".conv", "_cache")):
        return f"weights: {_row(bad)}"
    leaf = bad.name.split(JOINED)[0].split("/")[-1].rsplit(".", 1)[-1] if "/" not in bad.name else ""
    leaf = leaf or bad.name.split("/")[-1]
    if bad.name in _BY_LEAF:
        leaf = bad.name
    if leaf == "state":
        return _state(bad)
    if JOINED in bad.name:
        return f"the products of one input: {bad.name.replace(JOINED, ', ')}"
    return _BY_LEAF.get(leaf, "this op")


def _state(bad: Measure) -> str:
    precise = ", or their precision" if bad.nmse < ROUNDING_NMSE else ""
    return (
        "the delta rule (which key head a value head reads, decay, rate), the slot it starts from, or the convolution"
        f"{precise}"
    )


def _row(bad: Measure) -> str:
    """The matrix and its row that a column of products belongs to."""
    column = bad.worst_channel
    for name, width in bad.parts:
        if column < width:
            return f"row {column} of what makes {name}"
        column -= width
    return f"row {bad.worst_channel} of what makes {bad.name}"
