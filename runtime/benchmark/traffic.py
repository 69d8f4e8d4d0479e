"""Bytes that a pass reads: weights, recurrent state, KV cache. From the manifests."""

from __future__ import annotations

from dataclasses import dataclass

from engines.engine_manifest import load_engine_manifest
from engines.errors import EngineError
from engines.manifest import Geometry
from engines.memory_plan import nbytes_of, state_bindings
from runtime.session import Session

_F32_BYTES = 4


@dataclass(frozen=True)
class Traffic:
    """weights: that a pass multiplies with, the embedding's few rows left out; state: of all layers, once; kv_row: of
    all layers, a token."""

    weights: int
    state: int
    kv_row: int

    def nbytes(self, position: int) -> int:
        """Of a pass after ``position`` tokens, whatever its size."""
        return self.weights + self.state + position * self.kv_row


def traffic_of(session: Session, role: str) -> Traffic:
    """Of the trunk's verify pass, or of the draft head's step. Raises EngineError for an export that does not say."""
    geometry = session.manifest.geometry
    if role not in session.manifest.read_nbytes:
        raise EngineError(
            f"{session.folder}: does not say how many bytes of weights the {role} reads; it is an older export: run "
            "`python -m export` or `python -m engines.build` again"
        )
    kv_row = _kv_row_nbytes(session, role)
    return Traffic(session.manifest.read_nbytes[role], _state_nbytes(geometry) if role == "trunk" else 0, kv_row)


def _state_nbytes(geometry: Geometry) -> int:
    state = geometry.gdn_v_heads * geometry.gdn_head_dim**2
    window = (geometry.conv_kernel - 1) * geometry.conv_channels
    return len(geometry.gdn_layers) * (state + window) * _F32_BYTES


def _kv_row_nbytes(session: Session, role: str) -> int:
    geometry = session.manifest.geometry
    if session.backend == "tensorrt":
        engines = load_engine_manifest(session.folder)
        caches = [each for each in state_bindings(engines.engines[role]) if each.name.endswith(".cache")]
        return sum(map(nbytes_of, caches)) // engines.options.context
    layers = len(geometry.attention_layers) if role == "trunk" else 1
    return layers * 2 * geometry.num_kv_heads * geometry.head_dim * _F32_BYTES
