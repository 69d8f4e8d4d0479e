"""The least time that reading takes: what a pass moves through the GPU's memory, over the memory's speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engines.engine_manifest import EngineManifest, pool_size
from engines.manifest import Geometry
from engines.memory_plan import nbytes_of, state_bindings

_F32_BYTES = 4


@dataclass(frozen=True)
class Traffic:
    """Bytes of a pass of one engine. weights: read once, whatever its rows; state: recurrent, read and written; kv_row:
    read for every token before."""

    weights: int
    state: int
    kv_row: int

    def nbytes(self, position: int) -> int:
        return self.weights + self.state + position * self.kv_row


def traffic_of(engines: EngineManifest, geometry: Geometry, reads: dict[str, int]) -> dict[str, Traffic]:
    """By role. reads: bytes of weights."""
    found = {}
    for role, engine in engines.engines.items():
        caches = [each for each in state_bindings(engine) if each.name.endswith(".cache")]
        state = len(geometry.gdn_layers) * pool_size(geometry, 1) * _F32_BYTES * 2 if role == "trunk" else 0
        found[role] = Traffic(reads[role], state, sum(map(nbytes_of, caches)) // engines.options.context)
    return found


def bounds(traffic: dict[str, Traffic], gb_per_s: float, position: int, draft_n: int) -> dict[str, Any]:
    """Least milliseconds of a pass and most tokens a second after ``position`` tokens: plainly, and with ``draft_n``
    drafts a round that are all accepted (None without a draft head)."""
    pass_ms = traffic["trunk"].nbytes(position) / gb_per_s / 1e6
    found: dict[str, Any] = {
        "position": position,
        "pass_ms": pass_ms,
        "tokens_per_second": 1000 / pass_ms,
        "draft_ms": None,
        "draft_n": draft_n,
        "drafting_tokens_per_second": None,
    }
    if "draft" in traffic:
        draft_ms = traffic["draft"].nbytes(position) / gb_per_s / 1e6
        most = 1000 * (draft_n + 1) / (pass_ms + draft_n * draft_ms)
        found |= {"draft_ms": draft_ms, "drafting_tokens_per_second": most}
    return found
