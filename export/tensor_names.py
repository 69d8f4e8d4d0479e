"""Tensor names and shapes of architecture qwen35: which tensors a model must have, and what stands in for others.

The only file that spells tensor names. Source: llama.cpp, `qwen35` loader, and its converter's tensor map.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from engines.errors import ModelFileError
from export.gguf_file import GGUFFile, GGUFTensor
from export.tensor_types import needs_dequantized_copy

# Leaf name in the code -> (its names in the file, the first that exists counts; shape, outermost first).
# V vocabulary, D hidden, F ffn; Q query and gate, A attention output, KV keys, HD attention head;
# C convolution channels, I delta-net values, HV value heads, S delta-net head, K convolution kernel.
_Table = Mapping[str, tuple[tuple[str, ...], str]]
_GLOBAL: _Table = {
    "token_embd": (("token_embd.weight",), "V D"),
    "output_norm": (("output_norm.weight",), "D"),
    "output": (("output.weight",), "V D"),
}
_EVERY_BLOCK: _Table = {
    "attn_norm": (("attn_norm.weight",), "D"),
    "post_attention_norm": (("post_attention_norm.weight",), "D"),
    "ffn_gate": (("ffn_gate.weight",), "F D"),
    "ffn_up": (("ffn_up.weight",), "F D"),
    "ffn_down": (("ffn_down.weight",), "D F"),
}
_DELTA_NET: _Table = {
    "attn_qkv": (("attn_qkv.weight",), "C D"),
    "attn_gate": (("attn_gate.weight",), "I D"),
    "ssm_conv1d": (("ssm_conv1d.weight",), "C K"),
    "ssm_dt": (("ssm_dt.bias", "ssm_dt"), "HV"),
    "ssm_a": (("ssm_a",), "HV"),
    "ssm_beta": (("ssm_beta.weight",), "HV D"),
    "ssm_alpha": (("ssm_alpha.weight",), "HV D"),
    "ssm_norm": (("ssm_norm.weight",), "S"),
    "ssm_out": (("ssm_out.weight",), "D I"),
}
_ATTENTION: _Table = {
    "attn_q": (("attn_q.weight",), "Q D"),
    "attn_k": (("attn_k.weight",), "KV D"),
    "attn_v": (("attn_v.weight",), "KV D"),
    "attn_output": (("attn_output.weight",), "D A"),
    "attn_q_norm": (("attn_q_norm.weight",), "HD"),
    "attn_k_norm": (("attn_k_norm.weight",), "HD"),
}
_DRAFT: _Table = {
    "eh_proj": (("nextn.eh_proj.weight",), "D 2D"),
    "enorm": (("nextn.enorm.weight",), "D"),
    "hnorm": (("nextn.hnorm.weight",), "D"),
    "shared_head_norm": (("nextn.shared_head_norm.weight",), "D"),
    "embed_tokens": (("nextn.embed_tokens.weight",), "V D"),
    "shared_head_head": (("nextn.shared_head_head.weight",), "V D"),
}
# Tensors that may be absent, and the one that is used then.
_FALLBACKS = {
    "output": "token_embd",
    "shared_head_norm": "output_norm",
    "embed_tokens": "token_embd",
    "shared_head_head": "output",
}
# Other models that some publishers leave in the same file: vision tower, its projector, an unconverted draft head.
_FOREIGN = ("v.", "mm.", "mtp.")
_BLOCK = re.compile(r"blk\.(\d{1,9})\.")

Names = dict[tuple[str, "int | None"], str]


def has_block(names: Collection[str], start: int, stop: int) -> bool:
    """Whether any tensor belongs to a block in [start, stop)."""
    return any(start <= block < stop for block in map(_block_of, names) if block is not None)


def is_draft_only(names: Collection[str]) -> bool:
    """Whether every block that has tensors is a draft head."""
    blocks = {_block_of(name) for name in names} - {None}
    return bool(blocks) and blocks == {_block_of(name) for name in names if ".nextn." in name} - {None}


def vocabulary_rows(file: GGUFFile) -> int:
    """Rows of the token embedding. Raises ModelFileError (content) when it is absent."""
    name = _GLOBAL["token_embd"][0][0]
    if name not in file.tensors:
        raise ModelFileError("content", f"{file.path}: tensor {name!r} is missing")
    return file.tensors[name].shape[0]


def draft_is_missing(file: GGUFFile, layer: int, detail: str) -> ModelFileError:
    """The refusal of a file that promises a draft head and does not have it."""
    return ModelFileError(
        "content",
        f"{file.path}: promises a NextN draft head (nextn_predict_layers 1), but its block blk.{layer} is missing "
        f"({detail}); use --spec-type none (python -m export: --no-draft) to go on without drafting, or a whole file",
    )


def resolve_tensors(file: GGUFFile, dims: Mapping[str, int], is_attention: Sequence[bool], draft: int | None) -> Names:
    """(leaf, block or None) -> name in the file, for the trunk's blocks and, unless None, draft block ``draft``.

    Each tensor's shape is checked against ``dims`` and its type for being readable; tensors of those blocks that
    nothing here would use are refused, since leaving them out would change the numbers.
    Raises ModelFileError naming tensor, got and wanted.
    """
    names: Names = {}
    for leaf, layer, candidates, symbols in _wanted(is_attention, draft):
        found = next((name for name in candidates if name in file.tensors), None)
        if found is not None:
            _check_tensor(file.tensors[found], tuple(dims[symbol] for symbol in symbols.split()))
        elif leaf in _FALLBACKS:
            fallback = _FALLBACKS[leaf]
            found = names[fallback, None]
        elif layer is not None and layer == draft:
            raise draft_is_missing(file, layer, f"no {candidates[0]!r}")
        else:
            raise ModelFileError("content", f"{file.path}: tensor {candidates[0]!r} is missing")
        names[leaf, layer] = found
    _refuse_unused(file, set(names.values()), len(is_attention), draft)
    return names


def _wanted(is_attention: Sequence[bool], draft: int | None) -> Iterator[tuple[str, int | None, list[str], str]]:
    """(leaf, block, names to look for, shape symbols) of every tensor, those that others fall back on first."""
    for leaf, (names, symbols) in _GLOBAL.items():
        yield leaf, None, list(names), symbols
    blocks: list[tuple[int, list[_Table]]] = [
        (layer, [_EVERY_BLOCK, _ATTENTION if attention else _DELTA_NET]) for layer, attention in enumerate(is_attention)
    ]
    if draft is not None:
        blocks.append((draft, [_EVERY_BLOCK, _ATTENTION, _DRAFT]))
    for layer, tables in blocks:
        for table in tables:
            for leaf, (names, symbols) in table.items():
                yield leaf, layer, [f"blk.{layer}.{name}" for name in names], symbols


def _check_tensor(tensor: GGUFTensor, wanted: tuple[int, ...]) -> None:
    if tensor.shape != wanted:
        raise ModelFileError(
            "content",
            f"{tensor.path}: tensor {tensor.name!r} has shape {list(tensor.shape)}; wanted {list(wanted)} (rows "
            "first), by the file's own metadata",
        )
    needs_dequantized_copy(tensor)


def _refuse_unused(file: GGUFFile, used: set[str], num_layers: int, draft: int | None) -> None:
    """Refuse a tensor the model would need and we would ignore: a bias, a scale, another head."""
    for name in file.tensors:
        block = _block_of(name)
        outside = block is not None and block >= num_layers and block != draft
        if name not in used and not outside and not name.startswith(_FOREIGN):
            raise ModelFileError(
                "unsupported",
                f"{file.path}: tensor {name!r} belongs to no supported variant of this architecture; ignoring it "
                "would change the model's output",
            )


def _block_of(name: str) -> int | None:
    match = _BLOCK.match(name)
    return int(match[1]) if match else None
