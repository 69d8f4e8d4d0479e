"""What is compared, and where it lies: a folder with two exports of a model and, per role, a script for Polygraphy.

canonical/        the export for ONNX Runtime; ROLE.marked.onnx has its layer outputs marked as outputs
lowered/          the export for TensorRT
weights.npz       what the weights are, row by row (`weight_bytes`)
ROLE.npz          the inputs: passes over real tokens, from real state
ROLE.py           what Polygraphy's command line takes as network, data loader and comparison
plan.json         the numbers below
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from engines.engine_manifest import pool_size
from engines.errors import EngineError
from engines.given_files import read_bytes, reason
from engines.manifest import MOST_BYTES, Geometry, Manifest, load_manifest

PLAN_NAME = "plan.json"
FORMAT = 2  # of plan.json, and of what the passes are given: 2: pools of one state and steps from it
CANONICAL, LOWERED = "canonical", "lowered"
ROLES = ("trunk", "draft")
_CACHE_STEP = 256


@dataclass(frozen=True)
class Plan:
    """prompt_n: tokens of the first, long pass; max_rows: of the verify pass, and slots of the state; lowering: "ops",
    every op's result is seen, or "layers", a node a layer, as engines are built; kv_cache: "f16" or "int8"."""

    prompt_n: int
    max_rows: int
    lowering: str
    kv_cache: str

    @property
    def context(self) -> int:
        """Rows of a cache: all passes, up to whole steps as on ONNX Runtime."""
        return -(-(self.prompt_n + self.max_rows + 1) // _CACHE_STEP) * _CACHE_STEP

    def sizes(self, geometry: Geometry) -> dict[str, int]:
        """Of the named dimensions of the state."""
        return {"P": pool_size(geometry, self.max_rows), "L": self.context}

    def save(self, folder: Path) -> None:
        (folder / PLAN_NAME).write_text(json.dumps({"format": FORMAT, **asdict(self)}), encoding="utf-8")


def load_plan(folder: Path) -> tuple[Plan, Manifest]:
    """Of a folder that was prepared. Raises EngineError."""
    try:
        raw = json.loads(read_bytes(folder / PLAN_NAME, MOST_BYTES).decode())
        if (found := raw.pop("format", None)) != FORMAT:
            raise ValueError(f"format {found}, wanted {FORMAT}")
        plan = Plan(**raw)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise EngineError(
            f"{folder}: not prepared ({reason(error)}); run `python -m engines.accuracy MODEL.gguf -o DIR`"
        ) from None
    return plan, load_manifest(folder / LOWERED)


def roles_of(manifest: Manifest) -> tuple[str, ...]:
    return tuple(role for role in ROLES if role in manifest.files)
