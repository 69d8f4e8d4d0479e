"""What ONNX Runtime's engines need of the host's memory, part by part, before any of it is taken."""

from __future__ import annotations

from dataclasses import dataclass

from engines.errors import ResourceError
from engines.manifest import Geometry, Manifest
from engines.sizes import size_text
from runtime.onnx_session import CACHE_STEP, PREFILL_CHUNK

_F32_BYTES = 4
# Measured: beside the weights as they lie in the file ONNX Runtime keeps packed copies of most.
_WEIGHTS_SHARE = 1.6
# Measured: scores, their softmax and the mask of a prefill pass, each [rows, context].
_SCORES_AT_ONCE = 3.25
# Python, the libraries, the tokenizer, and whatever a pass keeps that does not depend on the context.
_RESERVE_BYTES = 256 << 20


@dataclass(frozen=True)
class OnnxMemoryPlan:
    """Bytes by part, for ``sequences`` of ``context`` tokens each. scores: of the longest prefill pass. other: what
    the caller will take besides."""

    weights: int
    kv_caches: int
    states: int
    scores: int
    other: int
    context: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_caches + self.states + self.scores + self.other + _RESERVE_BYTES

    def largest_context(self, available: int) -> int:
        """Tokens for which ``available`` bytes would do, all else being as it is; 0: none."""
        growing = self.kv_caches + self.scores
        steps = (available - (self.total - growing)) * _steps(self.context) // growing
        return max(0, steps * CACHE_STEP)

    def check(self, available: int) -> None:
        """Raise ResourceError when ``available`` bytes are not enough."""
        if self.total <= available:
            return
        fits = self.largest_context(available)
        cure = f"use --ctx-size {fits} or less, or auto" if fits else "use a smaller quantisation"
        left = size_text(available, self.total)
        raise ResourceError(
            f"not enough memory for a context of {self.context} tokens: needs {self}, {left} are available; {cure}, or "
            "close other programs"
        )

    def __str__(self) -> str:
        parts = [("weights", self.weights), ("KV caches", self.kv_caches), ("recurrent states", self.states)]
        parts += [("attention scores", self.scores), ("kept prompts", self.other), ("all else", _RESERVE_BYTES)]
        shown = ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in parts if nbytes)
        return f"{size_text(self.total)} ({shown})"


def plan_onnx_memory(
    manifest: Manifest, context: int, *, draft: bool, sequences: int = 1, other: int = 0
) -> OnnxMemoryPlan:
    geometry = manifest.geometry
    files = sum(nbytes for role, (_, nbytes) in manifest.files.items() if draft or role != "draft")
    caches = len(geometry.attention_layers) + (draft and geometry.draft_layer is not None)
    rows = _steps(context) * CACHE_STEP
    return OnnxMemoryPlan(
        weights=int(_WEIGHTS_SHARE * files),
        kv_caches=sequences * caches * 2 * geometry.num_kv_heads * geometry.head_dim * rows * _F32_BYTES,
        states=sequences * _states_nbytes(geometry),
        scores=int(_SCORES_AT_ONCE * PREFILL_CHUNK * _query_rows(geometry) * rows * _F32_BYTES),
        other=other,
        context=context,
    )


def _steps(context: int) -> int:
    """Caches grow by steps."""
    return -(-context // CACHE_STEP)


def _states_nbytes(geometry: Geometry) -> int:
    """Recurrent state is kept twice (see `runtime.engine_onnxruntime`)."""
    state = geometry.gdn_v_heads * geometry.gdn_head_dim**2
    window = (geometry.conv_kernel - 1) * geometry.conv_channels
    return len(geometry.gdn_layers) * (2 * state + window) * _F32_BYTES


def _query_rows(geometry: Geometry) -> int:
    """Rows of scores that a token has; the graph gives a KV head two at least."""
    return max(2 * geometry.num_kv_heads, geometry.num_heads)
