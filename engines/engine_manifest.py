"""What `engines.build` leaves beside an exported model: `engines.json`, all that the runtime needs to know of engines.

Standard library only.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from engines.errors import EngineError
from engines.given_files import read_bytes, reason
from engines.kinds import check_kinds
from engines.manifest import MOST_BYTES, Geometry, check_file_name
from engines.sealed_json import is_sealed, write_sealed

_DTYPES = ("float32", "float16", "int8", "int32", "int64")
ENGINES_NAME = "engines.json"
FORMAT_VERSION = 3
# Rows of a draft head's prefill pass that may get logits: so many of its guesses can be compared with the text.
GUESS_ROWS = 8
# Verify passes of one row leave their hidden row in so many places in turn.
ONE_ROW_PLACES = 2
STEP_COLUMNS = 32  # of a state that a step is kept for at a time


@dataclass(frozen=True)
class EngineOptions:
    """What an engine can do. max_rows: tokens of a decode or verify pass, draft_n + 1; context: KV rows;
    prefill_chunk: tokens of a prefill pass; embed_weights: the weights are inside, not inputs; lowering: "layers", a
    plugin a decoder layer, or "ops"; kv_cache: "f16", or "int8" for rows of half the size."""

    max_rows: int
    context: int
    prefill_chunk: int
    embed_weights: bool
    lowering: str = "layers"
    kv_cache: str = "f16"


@dataclass(frozen=True)
class Binding:
    """An input or output. ``shape``: numbers, or T (tokens of a pass) and R (rows that get logits).
    ``alias``: of an output, the input to whose address it must be bound."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    alias: str = ""


@dataclass(frozen=True)
class Profile:
    """Limits of one optimisation profile, in the engine's order."""

    name: str
    max_tokens: int
    max_rows: int


def engine_profiles(role: str, options: EngineOptions) -> tuple[Profile, ...]:
    """Decode and verify, where the trunk gives logits of every row, the head of one; prefill, the other way round."""
    rows, prefill_rows = (options.max_rows, 1) if role == "trunk" else (1, min(GUESS_ROWS, options.prefill_chunk))
    return Profile("decode", options.max_rows, rows), Profile("prefill", options.prefill_chunk, prefill_rows)


@dataclass(frozen=True)
class Engine:
    """An engine file: its size and content hash, its bindings, the names of the weights it takes as inputs, and which
    layers are not as the options want them."""

    file: str
    nbytes: int
    digest: str
    inputs: tuple[Binding, ...]
    outputs: tuple[Binding, ...]
    profiles: tuple[Profile, ...]
    weights: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class WeightPiece:
    """Bytes of a model's tensor: where they lie, ``file`` in the exported folder, and from which byte of the weight on
    they belong."""

    tensor: str
    file: str
    offset: int
    nbytes: int
    at: int


@dataclass(frozen=True)
class WeightPlace:
    """What a weight is made of, int8 of ``shape``. Bytes that no piece fills are never used."""

    shape: tuple[int, ...]
    pieces: tuple[WeightPiece, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class EngineManifest:
    """``build_key`` names everything the engines were made from; ``plugins``: digest of the plugin library."""

    build_key: str
    content_key: str
    tensorrt: str
    tensorrt_version: str
    plugins: str
    options: EngineOptions
    engines: dict[str, Engine]
    weights: dict[str, WeightPlace]
    format_version: int = FORMAT_VERSION

    def save(self, folder: Path) -> None:
        """Write `engines.json` whole or not at all."""
        write_sealed(folder / ENGINES_NAME, asdict(self))

    def file(self, folder: Path, role: str) -> Path:
        """Path of an engine. Raises EngineError when it is missing or of another size."""
        if role not in self.engines:
            raise EngineError(f"{folder}: has no {role!r} engine (has {', '.join(sorted(self.engines))})")
        engine = self.engines[role]
        path = folder / engine.file
        found = path.stat().st_size if path.is_file() else None
        if found != engine.nbytes:
            raise EngineError(
                f"{path}: {'missing' if found is None else f'{found} bytes'}, {ENGINES_NAME} says {engine.nbytes} "
                "bytes; run `python -m engines.build` again"
            )
        return path


def load_engine_manifest(folder: Path) -> EngineManifest:
    """Read `engines.json`. Raises EngineError naming what is wrong with it."""
    path = folder / ENGINES_NAME
    try:
        raw = json.loads(read_bytes(path, MOST_BYTES).decode())
    except FileNotFoundError:
        raise EngineError(f"{folder}: no {ENGINES_NAME}; build engines with `python -m engines.build`") from None
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError(f"{path}: unreadable ({reason(error)}); run `python -m engines.build` again") from None
    found = raw.get("format_version") if isinstance(raw, dict) else None
    if found != FORMAT_VERSION:
        raise EngineError(f"{path}: format {found!r}, wanted {FORMAT_VERSION}; run `python -m engines.build` again")
    if not is_sealed(raw):
        raise EngineError(f"{path}: damaged, not what was written; run `python -m engines.build` again")
    try:
        manifest = EngineManifest(
            **{key: raw[key] for key in ("build_key", "content_key", "tensorrt", "tensorrt_version", "plugins")},
            options=EngineOptions(**raw["options"]),
            engines={role: _engine(entry) for role, entry in raw["engines"].items()},
            weights={
                name: WeightPlace(tuple(entry["shape"]), tuple(WeightPiece(**piece) for piece in entry["pieces"]))
                for name, entry in raw["weights"].items()
            },
        )
        check_kinds(manifest, EngineManifest, ENGINES_NAME)
        _check_places(manifest)
        _check_parts(manifest)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(f"{path}: incomplete ({error}); run `python -m engines.build` again") from None
    return manifest


def _check_places(manifest: EngineManifest) -> None:
    """Raise ValueError at the first file outside the folder, or piece outside its weight."""
    pieces = [piece for place in manifest.weights.values() for piece in place.pieces]
    for name in (*(engine.file for engine in manifest.engines.values()), *(piece.file for piece in pieces)):
        check_file_name(name)
    for weight, place in manifest.weights.items():
        for piece in place.pieces:
            if min(piece.offset, piece.nbytes, piece.at) < 0 or piece.at + piece.nbytes > place.nbytes:
                raise ValueError(f"a piece of {weight!r} lies outside of it")


def _check_parts(manifest: EngineManifest) -> None:
    """Raise ValueError where something lacks a part, or names one that is not there."""
    for engine in manifest.engines.values():
        if [profile.name for profile in engine.profiles] != ["decode", "prefill"]:
            raise ValueError(f"the profiles of {engine.file!r}")
        if any(each.dtype not in _DTYPES for each in (*engine.inputs, *engine.outputs)):
            raise ValueError(f"the types of {engine.file!r}")
    names = {each.name for engine in manifest.engines.values() for each in engine.inputs}
    weights = {weight for engine in manifest.engines.values() for weight in engine.weights}
    if "trunk" not in manifest.engines or not weights <= manifest.weights.keys():
        raise ValueError("the trunk, or a weight, is missing")
    aliases = {each.alias for engine in manifest.engines.values() for each in engine.outputs if each.alias}
    if not aliases <= names:
        raise ValueError(f"outputs of {min(aliases - names)!r}, which is no input")
    for each in (binding for engine in manifest.engines.values() for binding in (*engine.inputs, *engine.outputs)):
        varying = {size for size in each.shape if isinstance(size, str)}
        if not varying <= {"T", "R"} or (varying and each.name in aliases):
            raise ValueError(f"{each.name!r} has shape {each.shape!r}")
    options = manifest.options
    if not 1 <= options.max_rows <= options.context or options.prefill_chunk < 1:
        raise ValueError(f"options {options}")


def pool_size(geometry: Geometry, max_rows: int) -> int:
    """Float32 values of one layer's Gated DeltaNet pool with a slot per row of a verify pass: a state in the first, the
    step from the slot before in each of the others, a window in all."""
    heads, dim = geometry.gdn_v_heads, geometry.gdn_head_dim
    window = (geometry.conv_kernel - 1) * geometry.conv_channels
    return heads * dim**2 + (max_rows - 1) * step_size(heads, dim) + max_rows * window


def step_size(v_heads: int, head_dim: int) -> int:
    """Float32 values of a step: for each head and STEP_COLUMNS of its value columns the key, what goes into these
    columns, and the decay in as much room."""
    return v_heads * (head_dim // STEP_COLUMNS) * (head_dim + 2 * STEP_COLUMNS)


def _engine(raw: dict[str, Any]) -> Engine:
    def bindings(entries: list[dict[str, Any]]) -> tuple[Binding, ...]:
        return tuple(Binding(**{**entry, "shape": tuple(entry["shape"])}) for entry in entries)

    return Engine(
        **{key: raw[key] for key in ("file", "nbytes", "digest")},
        inputs=bindings(raw["inputs"]),
        outputs=bindings(raw["outputs"]),
        profiles=tuple(Profile(**entry) for entry in raw["profiles"]),
        weights=tuple(raw["weights"]),
        notes=tuple(raw["notes"]),
    )
