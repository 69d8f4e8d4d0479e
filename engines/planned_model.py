"""What is known of a model before it is exported or built: what `engines.description` tells the runtime."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engines.engine_manifest import EngineManifest
from engines.manifest import Geometry


@dataclass(frozen=True)
class PlannedModel:
    """facts: of the file, ready for JSON. engines: by kind of KV cache, as they would be built for ``context`` tokens;
    ``nbytes`` of an engine is that of its graph. reads: bytes of weights that a pass of each role reads. activations:
    bytes, an estimate. engines and reads are empty where the plugins do not take the model."""

    facts: dict[str, Any]
    geometry: Geometry
    engines: dict[str, EngineManifest]
    reads: dict[str, int]
    activations: int
    context: int
