"""What is unusual about a model file, and what it means for whoever runs it: a line each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from engines.errors import ModelFileError
from export.config import ModelConfig
from export.gguf_file import GGUFFile, GGUFTensor
from export.plugin_limits import check_plugins_take
from export.survey import TensorGroup
from export.tensor_types import needs_dequantized_copy

_ALIGNMENT_KEY, _USUAL_ALIGNMENT = "general.alignment", 32
_TEMPLATE_KEY = "tokenizer.chat_template"


def oddities(file: GGUFFile, config: ModelConfig, groups: Sequence[TensorGroup], missing_draft: str = "") -> list[str]:
    """In the order of their weight. missing_draft: why a draft head that the file promises cannot be used."""
    return [
        *_draft_head(config, missing_draft),
        *_rope(config),
        *_types(file, config, groups),
        *_plugins(file, config),
        *_container(file, config),
    ]


def _draft_head(config: ModelConfig, missing: str) -> Iterator[str]:
    if missing:
        yield f"NextN head stripped: {missing}"
    elif config.draft is None:
        yield "no NextN head: plain decoding only, nothing to draft with"
    if config.tied:
        yield "tied LM head: the token embedding is read as LM head as well"
    if config.draft is None:
        return
    layer = config.draft.layer
    if config.tensor("shared_head_norm", layer) == config.tensor("output_norm"):
        yield "no norm of the draft head's own (nextn.shared_head_norm): output_norm stands in"
    for leaf, shared, what in (("embed_tokens", "token_embd", "embedding"), ("shared_head_head", "output", "LM head")):
        if config.tensor(leaf, layer) != config.tensor(shared):
            yield f"the draft head brings its own {what} ({config.tensor(leaf, layer)}): more memory, more to read"


def _rope(config: ModelConfig) -> Iterator[str]:
    rope = config.rope
    if rope.yarn_factor != 1.0:
        yield (
            f"YaRN: positions scaled by {rope.yarn_factor:g} from a context of {rope.yarn_orig_ctx} tokens; short "
            "texts change a little as well"
        )


def _types(file: GGUFFile, config: ModelConfig, groups: Sequence[TensorGroup]) -> Iterator[str]:
    by_role: dict[str, list[TensorGroup]] = defaultdict(list)
    for group in groups:
        if group.role != "not used":
            by_role[group.role].append(group)
    for role, parts in by_role.items():
        if len(parts) > 1:
            yield f"mixed types, {role}: " + ", ".join(f"{part.tensors} {part.type}" for part in parts)
    tensors = [file.tensors[name] for name in config.tensor_names()]
    copied: dict[str, list[GGUFTensor]] = defaultdict(list)
    for tensor in tensors:
        if len(tensor.shape) == 2 and needs_dequantized_copy(tensor):
            copied[tensor.ggml_type.name].append(tensor)
    for type_name, each in copied.items():
        yield f"{type_name} has no kernel: {len(each)} tensors (first: {each[0].name}) become float32 copies"
    last = config.num_layers + (config.draft is not None)
    unlike = [n for n in range(last) if _type_of(file, config, "ffn_gate", n) != _type_of(file, config, "ffn_up", n)]
    if unlike:
        yield f"gate and up of different types in blk.{', blk.'.join(map(str, unlike))}: no layer node there"


def _type_of(file: GGUFFile, config: ModelConfig, leaf: str, layer: int) -> str:
    return str(file.tensors[config.tensor(leaf, layer)].ggml_type.name)


def _plugins(file: GGUFFile, config: ModelConfig) -> Iterator[str]:
    try:
        check_plugins_take(config, file.path)
    except ModelFileError as error:
        yield f"not for TensorRT: {str(error).removeprefix(f'{file.path}: ')}"


def _container(file: GGUFFile, config: ModelConfig) -> Iterator[str]:
    if len(file.paths) > 1:
        yield f"split into {len(file.paths)} files"
    alignment = file.get(_ALIGNMENT_KEY, int, _USUAL_ALIGNMENT)
    if alignment != _USUAL_ALIGNMENT:
        yield f"tensors aligned to {alignment} bytes ({_ALIGNMENT_KEY}), not {_USUAL_ALIGNMENT}"
    unused = sorted(file.tensors.keys() - set(config.tensor_names()))
    if unused:
        nbytes = sum(file.tensors[name].nbytes for name in unused)
        yield f"{len(unused)} tensors are not used (first: {unused[0]}), {nbytes / 1e6:.1f} MB"
    if not file.get(_TEMPLATE_KEY, str, ""):
        yield "no chat template: text is continued as it is"
