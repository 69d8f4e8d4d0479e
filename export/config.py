"""The model's geometry and tensor names, read from a GGUF of architecture qwen35 and checked against its tensors.

The architecture's metadata keys are spelled here and nowhere else; its tensor names in `tensor_names`.

Source: llama.cpp, `qwen35` (loader and graph), and its converter's key and tensor names.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from export.gguf_file import GGUFFile
from export.metadata_keys import MetadataKeys
from export.tensor_names import draft_is_missing, has_block, is_draft_only, resolve_tensors, vocabulary_rows

ARCHITECTURE = "qwen35"

# YaRN refinements; values other than these would need another formula (-1 means: by the type).
_YARN_FIXED: dict[str, tuple[float, ...]] = {
    "attn_factor": (1.0,),
    "yarn_attn_factor": (1.0,),
    "yarn_ext_factor": (1.0, -1.0),
    "yarn_beta_fast": (32.0,),
    "yarn_beta_slow": (1.0,),
    "yarn_log_multiplier": (0.0,),
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of the first ``dim`` of a head, pairs (i, i + dim/2). ``yarn_factor`` 1: no scaling."""

    theta: float
    dim: int
    sections: tuple[int, ...]
    yarn_factor: float = 1.0
    yarn_orig_ctx: int = 0


@dataclass(frozen=True)
class AttentionConfig:
    """Gated full attention: query head h reads KV head h div (num_heads / num_kv_heads)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class GatedDeltaNetConfig:
    """Gated DeltaNet: value head h reads key head h mod num_k_heads; keys and values are ``head_dim`` wide."""

    num_k_heads: int
    num_v_heads: int
    head_dim: int
    conv_kernel: int

    @property
    def key_dim(self) -> int:
        return self.num_k_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        return self.num_v_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution, in the order q, k, v."""
        return 2 * self.key_dim + self.value_dim


@dataclass(frozen=True)
class DraftHeadConfig:
    """The NextN block: its block index, which follows the trunk's last."""

    layer: int


@dataclass(frozen=True)
class ModelConfig:
    """Geometry of a trunk of ``num_layers`` blocks and its draft head, if there is one to use."""

    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    context_length: int
    rms_eps: float
    full_attention_interval: int
    attention: AttentionConfig
    gdn: GatedDeltaNetConfig
    rope: RopeConfig
    draft: DraftHeadConfig | None
    names: dict[tuple[str, int | None], str] = field(default_factory=dict, repr=False, hash=False)

    def is_attention(self, layer: int) -> bool:
        """Whether block ``layer`` is full attention; the draft head's block always is."""
        return layer >= self.num_layers or (layer + 1) % self.full_attention_interval == 0

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_layers) if self.is_attention(layer))

    @property
    def gdn_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_layers) if not self.is_attention(layer))

    @property
    def tied(self) -> bool:
        """Whether the LM head is the token embedding."""
        return self.tensor("output") == self.tensor("token_embd")

    def tensor(self, leaf: str, layer: int | None = None) -> str:
        """Name in the file of a tensor: ``tensor("attn_qkv", 3)``, ``tensor("output")``, fallbacks resolved."""
        return self.names[leaf, layer]

    def tensor_names(self) -> tuple[str, ...]:
        """Every tensor the model uses, each once."""
        return tuple(dict.fromkeys(self.names.values()))


def load_config(file: GGUFFile, draft: bool = True) -> ModelConfig:
    """Read the geometry and check every tensor the model uses against it: presence, shape, type.

    ``draft``: use the draft head when the file promises one; False loads the trunk alone.
    Raises ModelFileError naming file and key or tensor: unsupported for a sound file of another kind, content
    for missing or contradictory parts.
    """
    _check_architecture(file)
    keys = MetadataKeys(file, ARCHITECTURE)
    num_blocks, promised = keys.count("block_count"), keys.count("nextn_predict_layers", 0, low=0)
    if promised > 1:
        raise keys.refuse(f"has {promised} NextN blocks (nextn_predict_layers); supported: 0 or 1", "unsupported")
    num_layers = num_blocks - promised
    _check_blocks(keys, num_layers, promised, draft)
    interval = keys.count("full_attention_interval", 4)
    is_attention = [layer >= num_layers or (layer + 1) % interval == 0 for layer in range(num_blocks)]
    recurrent, listed = [not each for each in is_attention], keys.flags("attention.recurrent_layers")
    if listed not in (None, recurrent, recurrent[:num_layers]):
        raise keys.refuse("attention.recurrent_layers contradicts full_attention_interval", "unsupported")
    hidden_size = keys.count("embedding_length")
    attention = _read_attention(keys, is_attention, hidden_size)
    config = ModelConfig(
        vocab_size=_read_vocab_size(keys),
        hidden_size=hidden_size,
        ffn_size=keys.per_block("feed_forward_length", [True] * num_blocks),
        num_layers=num_layers,
        context_length=keys.count("context_length"),
        rms_eps=keys.positive("attention.layer_norm_rms_epsilon"),
        full_attention_interval=interval,
        attention=attention,
        gdn=_read_gdn(keys),
        rope=_read_rope(keys, attention.head_dim),
        draft=DraftHeadConfig(num_layers) if promised and draft else None,
    )
    draft_layer = config.draft.layer if config.draft else None
    names = resolve_tensors(file, _dims(config), [config.is_attention(i) for i in range(num_layers)], draft_layer)
    return replace(config, names=names)


def _check_architecture(file: GGUFFile) -> None:
    keys = MetadataKeys(file, "general")
    found, kind = keys.text("architecture"), keys.text("type", "model")
    if found == "clip" or kind == "mmproj":
        raise keys.refuse(
            f"is a vision projector (mmproj, architecture {found!r}), not a language model; give the text model's "
            f".gguf, of architecture {ARCHITECTURE}",
            "unsupported",
        )
    if kind == "adapter":
        raise keys.refuse("is an adapter (LoRA) without a model; merge it into its model first", "unsupported")
    if found != ARCHITECTURE:
        raise keys.refuse(
            f"has architecture {found!r}; supported: {ARCHITECTURE} (the dense Qwen3.5 family)", "unsupported"
        )


def _check_blocks(keys: MetadataKeys, num_layers: int, promised: int, draft: bool) -> None:
    """Before anything loops over blocks: a trunk is there, and the draft head where it is promised and wanted."""
    names = keys.file.tensors
    if is_draft_only(names):
        raise keys.refuse("is a draft head (NextN) without a trunk; give the .gguf of the whole model", "unsupported")
    if num_layers < 1:
        raise keys.refuse(f"has no trunk block: block_count {num_layers + promised}, nextn_predict_layers {promised}")
    if num_layers > len(names):
        raise keys.refuse(f"promises {num_layers} blocks (block_count), but holds only {len(names)} tensors")
    if promised and draft and not has_block(names, num_layers, num_layers + 1):
        raise draft_is_missing(keys.file, num_layers, "none of its tensors is there")


def _read_vocab_size(keys: MetadataKeys) -> int:
    rows = vocabulary_rows(keys.file)
    named = keys.count("vocab_size", rows)
    tokens = keys.file.get("tokenizer.ggml.tokens", list[str], [])
    if named != rows or (tokens and len(tokens) != rows):
        raise keys.refuse(
            f"the vocabulary has {rows} embedding rows, but {len(tokens)} tokens and vocab_size {named}; wanted equal"
        )
    return rows


def _read_attention(keys: MetadataKeys, is_attention: list[bool], hidden_size: int) -> AttentionConfig:
    num_heads = keys.per_block("attention.head_count", is_attention)
    num_kv_heads = keys.per_block("attention.head_count_kv", is_attention)
    keys.check_multiple("attention.head_count", num_heads, num_kv_heads, "attention.head_count_kv")
    if "attention.key_length" not in keys:
        keys.check_multiple("embedding_length", hidden_size, num_heads, "attention.head_count")
    head_dim = keys.count("attention.key_length", hidden_size // num_heads)
    value_dim = keys.count("attention.value_length", hidden_size // num_heads)
    if value_dim != head_dim:
        raise keys.refuse(
            f"attention.key_length {head_dim} and value_length {value_dim} differ; supported: equal", "unsupported"
        )
    usual = head_dim**-0.5
    scale = keys.positive("attention.scale", usual)
    if abs(scale / usual - 1) > 1e-5:
        raise keys.refuse(f"attention.scale is {scale}; supported: 1/sqrt(key_length) = {usual}", "unsupported")
    return AttentionConfig(num_heads, num_kv_heads, head_dim)


def _read_gdn(keys: MetadataKeys) -> GatedDeltaNetConfig:
    gdn = GatedDeltaNetConfig(
        num_k_heads=keys.count("ssm.group_count"),
        num_v_heads=keys.count("ssm.time_step_rank"),
        head_dim=keys.count("ssm.state_size"),
        conv_kernel=keys.count("ssm.conv_kernel", low=2),
    )
    keys.check_multiple("ssm.time_step_rank", gdn.num_v_heads, gdn.num_k_heads, "ssm.group_count")
    inner = keys.count("ssm.inner_size")
    if inner != gdn.value_dim:
        raise keys.refuse(f"ssm.inner_size is {inner}; wanted ssm.time_step_rank * ssm.state_size = {gdn.value_dim}")
    return gdn


def _read_rope(keys: MetadataKeys, head_dim: int) -> RopeConfig:
    dim = keys.count("rope.dimension_count", head_dim)
    if dim % 2 or dim > head_dim:
        raise keys.refuse(f"rope.dimension_count is {dim}; wanted an even number up to the head's {head_dim}")
    sections = keys.counts("rope.dimension_sections")
    if len(sections) not in (3, 4):
        raise keys.refuse(f"rope.dimension_sections has {len(sections)} entries; wanted 3 or 4")
    sections = (*sections, 0)[:4]
    # Pair i turns with axis i mod 3 while that axis' section lasts, else with a fourth that text leaves at position
    # 0. When the three sections reach all pairs, text sees plain rotary embedding.
    pairs = dim // 2
    if any(sections[axis] < -(-(pairs - axis) // 3) for axis in range(3)):
        raise keys.refuse(
            f"rope.dimension_sections {list(sections)} give some of the {pairs} rotated pairs no text position, "
            "which is not supported",
            "unsupported",
        )
    factor, orig_ctx = _read_yarn(keys)
    theta = keys.positive("rope.freq_base", 10000.0)
    if theta <= 1:
        raise keys.refuse(f"rope.freq_base is {theta}; wanted more than 1")
    return RopeConfig(theta, dim, sections, factor, orig_ctx)


def _read_yarn(keys: MetadataKeys) -> tuple[float, int]:
    """(factor, original context length); (1, 0) without scaling. An unnamed type means linear, as in llama.cpp."""
    kind = keys.text("rope.scaling.type", "linear")
    factor = keys.positive("rope.scaling.factor", keys.positive("rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return 1.0, 0
    if kind != "yarn":
        raise keys.refuse(f"rope.scaling.type is {kind!r} (factor {factor}); supported: none, yarn", "unsupported")
    if "rope.scaling.factor" not in keys:
        raise keys.refuse("rope.scaling.type is yarn, but rope.scaling.factor is missing")
    if factor < 1:
        raise keys.refuse(f"rope.scaling.factor is {factor}; supported: 1 or more", "unsupported")
    for name, allowed in _YARN_FIXED.items():
        value = keys.number(f"rope.scaling.{name}", allowed[0])
        if value not in allowed:
            raise keys.refuse(f"rope.scaling.{name} is {value}; supported: {allowed[0]}", "unsupported")
    if factor == 1.0:
        return 1.0, 0
    return factor, keys.count("rope.scaling.original_context_length", keys.count("context_length"))


def _dims(config: ModelConfig) -> dict[str, int]:
    """Sizes under the letters that the tensor table uses for shapes."""
    attention, gdn = config.attention, config.gdn
    return {
        "V": config.vocab_size,
        "D": config.hidden_size,
        "2D": 2 * config.hidden_size,
        "F": config.ffn_size,
        "Q": 2 * attention.num_heads * attention.head_dim,
        "A": attention.num_heads * attention.head_dim,
        "KV": attention.num_kv_heads * attention.head_dim,
        "HD": attention.head_dim,
        "C": gdn.conv_dim,
        "I": gdn.value_dim,
        "HV": gdn.num_v_heads,
        "S": gdn.head_dim,
        "K": gdn.conv_kernel,
    }
