"""What a layer of an engine is, by its name, and the bytes it moves.

Names are those of the graph's nodes (`export.lower`), as TensorRT reports them: a node inside a fused region carries a
suffix of TensorRT's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from engines.engine_manifest import Engine, EngineManifest, WeightPlace, pool_size
from engines.errors import UsageError
from engines.manifest import Geometry
from engines.memory_plan import nbytes_of, state_bindings

_SUFFIX = re.compile(r"(_U\d+)?_myl\d+_\d+$")
_PROFILE = re.compile(r" \[profile \d+\]$")
_F32_BYTES = 4
LAYERS = {"delta net": "delta net layers", "attention": "attention layers"}
OTHER = "TensorRT's own"
# Last part of a node's name -> kind; of nodes that stand for several, the first of them.
_KINDS = {
    "token_embd": "embedding",
    "embed_tokens": "embedding",
    "rope": "rope tables",
    "output": "LM head",
    "shared_head_head": "LM head",
    "output_norm": "norms",
    "shared_head_norm": "norms",
    "concat": "norms",
    "eh_proj": "eh_proj",
    "attn_qkv": "input products",
    "attn_q": "input products",
    "gdn": "delta net",
    "attention": "attention",
    "mixer_residual": "output products",
    "swiglu": "ffn gate and up",
    "ffn_gate": "ffn gate and up",
    "ffn_residual": "ffn down",
}
_MATRICES = {
    "mixer_residual": ("ssm_out", "attn_output"),
    "swiglu": ("ffn_gate", "ffn_up"),
    "ffn_residual": ("ffn_down",),
}


@dataclass(frozen=True)
class Pass:
    """What a layer's bytes depend on: tokens of the pass, and tokens before it."""

    tokens: int
    position: int


def check_pass(manifest: EngineManifest, role: str, work: Pass, prefill: bool = False) -> None:
    """Raise UsageError for a pass that an engine does not hold. prefill: one of that profile will do as well."""
    options, profiles = manifest.options, manifest.engines[role].profiles
    most = max(profile.max_tokens for profile in profiles if prefill or profile.name == "decode")
    if not 1 <= work.tokens <= most:
        raise UsageError(
            f"--rows {work.tokens}: the {role} engine's {'' if prefill else 'decode '}passes take 1 to {most}"
        )
    if not 0 <= work.position <= options.context - work.tokens:
        raise UsageError(
            f"--position {work.position}: wanted 0 to {options.context - work.tokens}, what the engines hold beside "
            f"{work.tokens} tokens"
        )


class LayerKinds:
    """Of one engine."""

    def __init__(self, manifest: EngineManifest, engine: Engine, geometry: Geometry) -> None:
        self._geometry, self._max_rows = geometry, manifest.options.max_rows
        self._weights = {name: place for name, place in manifest.weights.items() if self._is_of(name, engine)}
        self._blocks = {
            int(binding.name.split(".")[1]) for binding in state_bindings(engine) if binding.name.startswith("blk.")
        }
        self._kv_rows = {
            binding.name.split(".cache")[0]: nbytes_of(binding) // manifest.options.context
            for binding in state_bindings(engine)
            if binding.name.endswith(".cache")
        }

    def kind(self, layer: str) -> str:
        node = node_of(layer)
        if match := re.fullmatch(r"blk\.(\d+)/layer", node):
            return LAYERS["delta net" if int(match[1]) in self._geometry.gdn_layers else "attention"]
        return _KINDS.get(_leaf(node), OTHER)

    def check_names(self, layers: Iterable[str], role: str, others: LayerKinds | None) -> None:
        """Raise UsageError for layers of no decoder layer of this engine. others: of the other engine, if any."""
        found = {int(match[1]) for layer in layers if (match := re.match(r"blk\.(\d+)[./]", node_of(layer)))}
        if found and found <= self._blocks:
            return
        of_other = others is not None and bool(found) and found <= others._blocks
        what = "they are the other engine's" if of_other else "the profile is of other engines"
        shown = ", ".join(f"blk.{block}" for block in sorted(found)[:3]) or "of no decoder layer"
        raise UsageError(f"--role {role}: the profile's layers are {shown}; {what}")

    def nbytes(self, layer: str, work: Pass) -> int:
        """Bytes of weights and state that the layer must move; 0 for what moves activations alone."""
        node, kind = node_of(layer), self.kind(layer)
        if kind == "embedding":
            return sum(place.nbytes // place.shape[0] * work.tokens for place in self._matrices(node))
        nbytes = sum(place.nbytes for place in self._matrices(node))
        block = node.split("/")[0]
        if kind in (LAYERS["delta net"], "delta net"):
            written = work.tokens if work.tokens <= self._max_rows else 1
            nbytes += sum(pool_size(self._geometry, slots) for slots in (1, written)) * _F32_BYTES  # read, written
        if kind in (LAYERS["attention"], "attention"):
            nbytes += (work.position + 2 * work.tokens) * self._kv_rows.get(block, 0)
        return nbytes

    def _matrices(self, node: str) -> list[WeightPlace]:
        return [self._weights[name] for name in self._names(node) if name in self._weights]

    def _names(self, node: str) -> list[str]:
        if node.endswith("/layer"):
            return [node.replace("/layer", ".weights")]
        leaf = _leaf(node)
        if leaf in ("output", "shared_head_head"):
            heads = [name for name in self._weights if name.endswith("shared_head_head.weight")]
            return heads or ["output.weight" if "output.weight" in self._weights else "token_embd.weight"]
        if leaf in ("token_embd", "embed_tokens"):
            return [name for name in self._weights if name.endswith("embed_tokens.weight")] or ["token_embd.weight"]
        if leaf == "eh_proj":
            return [name for name in self._weights if name.endswith("eh_proj.weight")]
        block = node.split("/")[0]
        leaves = _MATRICES.get(leaf, tuple(_leaf(part) for part in node.split("+")))
        return [f"{block}.{each}.weight" for each in leaves]

    @staticmethod
    def _is_of(name: str, engine: Engine) -> bool:
        """Engines that have their weights inside list none; all that were built together are looked up then."""
        return not engine.weights or name in engine.weights


def node_of(layer: str) -> str:
    """The graph's node that a layer of an engine is named after."""
    return _SUFFIX.sub("", _PROFILE.sub("", layer))


def _leaf(node: str) -> str:
    return node.split("+")[0].split("/")[-1].split(".")[0] if "/" in node else node
