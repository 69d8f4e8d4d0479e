"""What a pair of engines and its sequences need of the GPU's memory, part by part, before any of it is taken."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from engines.engine_manifest import (
    GUESS_ROWS,
    ONE_ROW_PLACES,
    Binding,
    Engine,
    EngineManifest,
    EngineOptions,
    WeightPlace,
)
from engines.errors import ResourceError
from engines.manifest import Geometry
from engines.sizes import size_text

# For code and launches.
DRIVER_BYTES = 256 << 20
# Graphs of some twenty passes: 10.5 MB measured for nine layers (docs/gpu.md).
_RECORDED_LAYER_BYTES = 1_200_000
_F32_BYTES = 4
_WEIGHT_ALIGNMENT = 256


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by part. kv_caches, states, recorded (passes): of all ``sequences``; so is a part of buffers, hidden rows.
    code: the engines' own constants and kernels. kv_cache: their kind, "f16" or "int8". context: tokens that these
    hold. driver: what it takes for itself, beside what is planned."""

    weights: int
    kv_caches: int
    states: int
    activations: int
    buffers: int
    recorded: int
    code: int
    kv_cache: str
    context: int
    sequences: int = 1
    driver: int = DRIVER_BYTES

    @property
    def total(self) -> int:
        held = self.weights + self.kv_caches + self.states + self.activations
        return held + self.buffers + self.recorded + self.code + self.driver

    def __str__(self) -> str:
        each = f" of {self.sequences} sequences" if self.sequences > 1 else ""
        parts = (
            ("weights", self.weights),
            (f"{self.kv_cache} KV caches{each}", self.kv_caches),
            (f"recurrent states{each}", self.states),
            ("activations", self.activations),
            ("buffers", self.buffers),
            (f"recorded passes{each}", self.recorded),
            ("engine code", self.code),
            ("driver", self.driver),
        )
        return f"{size_text(self.total)} ({', '.join(f'{name} {size_text(nbytes)}' for name, nbytes in parts)})"

    def largest_context(self, free: int) -> int:
        """Tokens that KV caches could hold in ``free`` bytes of GPU memory, all else being as it is; 0: none."""
        left = free - (self.total - self.kv_caches)
        return max(0, left * self.context // self.kv_caches)

    def fits(self, free: int) -> bool:
        """Whether ``free`` bytes of GPU memory are enough."""
        return self.total <= free

    def check(self, free: int, total: int) -> None:
        """Raise ResourceError when ``free`` of the GPU's ``total`` bytes are not enough."""
        if not self.fits(free):
            fits = self.largest_context(free)
            smaller = f"build engines with --context {fits} or less" if fits else "use a smaller quantisation"
            smaller_cache = "" if self.kv_cache == "int8" or not fits else " or with --kv-cache int8"
            fewer = f"serve fewer --sequences than {self.sequences}, " if self.sequences > 1 else ""
            raise ResourceError(
                f"not enough GPU memory: needs {self}, {size_text(free, self.total)} of {size_text(total)} are free; "
                f"{fewer}{smaller}{smaller_cache}, or close other programs"
            )


def plan_memory(
    manifest: EngineManifest, geometry: Geometry, roles: Iterable[str], activations: int, sequences: int = 1
) -> MemoryPlan:
    """The plan of the engines ``roles``, which share ``activations`` bytes of scratch and serve ``sequences``."""
    engines = [manifest.engines[role] for role in roles]
    names = {name for engine in engines for name in engine.weights}
    states = [binding for engine in engines for binding in state_bindings(engine)]
    caches = [binding for binding in states if binding.name.endswith(".cache")]
    return MemoryPlan(
        weights=weights_nbytes({name: manifest.weights[name] for name in names}),
        kv_caches=sequences * sum(map(nbytes_of, caches)),
        states=sequences * (sum(map(nbytes_of, states)) - sum(map(nbytes_of, caches))),
        activations=activations,
        buffers=_shared_nbytes(manifest.options, geometry) + sequences * _rows_nbytes(manifest.options, geometry),
        recorded=sequences * _num_layers(geometry) * _RECORDED_LAYER_BYTES,
        code=sum(engine.nbytes for engine in engines),
        kv_cache=manifest.options.kv_cache,
        context=manifest.options.context,
        sequences=sequences,
    )


def check_one_more(manifest: EngineManifest, geometry: Geometry, roles: Sequence[str], free: int, total: int) -> None:
    """Raise ResourceError when ``free`` of the GPU's ``total`` bytes do not hold one more sequence."""
    two, one = (plan_memory(manifest, geometry, roles, 0, n).total for n in (2, 1))
    needed = two - one
    if needed > free:
        raise ResourceError(
            f"not enough GPU memory for one more sequence: needs {size_text(needed, free)}, "
            f"{size_text(free, needed)} of {size_text(total)} are free; serve fewer --sequences, build engines with a "
            "smaller --context, or close other programs"
        )


def _num_layers(geometry: Geometry) -> int:
    return len(geometry.gdn_layers) + len(geometry.attention_layers) + (geometry.draft_layer is not None)


def _shared_nbytes(options: EngineOptions, geometry: Geometry) -> int:
    """Of the head's hidden rows and of logits: what sequences share beside scratch."""
    rows = 3 * options.prefill_chunk + 4 * options.max_rows
    return (rows * geometry.hidden_size + (options.max_rows + GUESS_ROWS) * geometry.vocab_size) * _F32_BYTES


def _rows_nbytes(options: EngineOptions, geometry: Geometry) -> int:
    """Of a sequence's hidden rows: of its last passes, and those put aside for the head, by powers of two."""
    rows = options.prefill_chunk + options.max_rows
    return (rows + ONE_ROW_PLACES + (1 << (rows - 1).bit_length())) * geometry.hidden_size * _F32_BYTES


def state_bindings(engine: Engine) -> list[Binding]:
    """The inputs that an output shares its memory with: what the engine keeps between passes."""
    kept = {binding.alias for binding in engine.outputs if binding.alias}
    return [binding for binding in engine.inputs if binding.name in kept]


def nbytes_of(binding: Binding) -> int:
    """Of an array whose shape is known."""
    sizes = [size for size in binding.shape if isinstance(size, int)]
    assert len(sizes) == len(binding.shape), binding
    return int(np.prod(sizes, dtype=np.int64)) * np.dtype(binding.dtype).itemsize


def weights_nbytes(places: Mapping[str, WeightPlace]) -> int:
    """Device memory that the weights take."""
    return sum(padded(place.nbytes) for place in places.values())


def padded(nbytes: int) -> int:
    """Kernels read whole 16-byte pieces, and every weight begins aligned."""
    return -(-nbytes // _WEIGHT_ALIGNMENT) * _WEIGHT_ALIGNMENT
