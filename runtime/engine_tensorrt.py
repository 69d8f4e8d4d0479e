"""Trunk and draft engines on TensorRT: what `engines.build` made, checked, loaded and given its memory."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from engines.engine_manifest import EngineManifest, load_engine_manifest
from engines.errors import EngineError, UsageError
from engines.manifest import Geometry, Manifest
from engines.memory_plan import MemoryPlan, plan_memory
from plugins.load import find_library, library_digest, load_plugins, tensorrt
from runtime import cuda
from runtime.control_block import ControlBlock
from runtime.device_weights import DeviceWeights
from runtime.draft_tokens import DraftTokens, load_draft_tokens
from runtime.engine import SEQUENCES_DEFAULT, EngineLimits
from runtime.host_copies import HostCopies
from runtime.queued_work import UnderWay
from runtime.recurrent_slots import RecurrentSlots
from runtime.tensorrt_draft import DraftBuffers, TensorrtDraft
from runtime.tensorrt_session import EngineLoader, EngineSession
from runtime.tensorrt_trunk import Shared, TensorrtTrunk
from runtime.token_choice import TokenChoice

_ROW_NUMBERS = 64
_F32_BYTES = 4


def open_engines(
    folder: Path,
    manifest: Manifest,
    *,
    context_size: int,
    threads: int = 0,
    max_rows: int = 4,
    draft: bool = True,
    num_sequences: int = 1,
) -> tuple[TensorrtTrunk, TensorrtDraft | None]:
    """Load an exported folder with its engines. max_rows: draft_n of the longest round + 1; threads: not used.
    num_sequences: whose memory is planned for, though that of the first alone is taken here; 0: as many as there is
    memory for, up to SEQUENCES_DEFAULT.

    Raises EngineError (driver, GPU, engines or plugins missing, or not fitting each other), UsageError (sizes beyond
    the engines'), ResourceError (memory)."""
    engines = load_engine_manifest(folder)
    _check_sizes(folder, engines, context_size, max_rows)
    library = _check_made_for(folder, engines, manifest)
    device = cuda.open_device()
    loader = EngineLoader(device)
    load_plugins(library)
    stream = cuda.Stream()
    roles = ["trunk", "draft"] if draft and "draft" in engines.engines else ["trunk"]
    draft_tokens = _draft_tokens(folder, engines, manifest) if "draft" in roles else DraftTokens(0)
    most_rows = max(profile.max_rows for role in roles for profile in engines.engines[role].profiles)
    choice = TokenChoice(library, device, stream, most_rows)
    free_and_total = cuda.free_and_total_bytes()  # before engines are loaded, which take memory that is planned
    _plan(engines, manifest.geometry, roles, 0, num_sequences, *free_and_total)
    sessions = {role: EngineSession(loader, folder, engines, role, stream) for role in roles}
    activations = max(session.activation_nbytes for session in sessions.values())  # what only loaded engines tell
    plan = _plan(engines, manifest.geometry, roles, activations, num_sequences, *free_and_total)

    shared = Shared(
        stream=stream,
        control=ControlBlock(stream, engines.options.prefill_chunk),
        choice=choice,
        geometry=manifest.geometry,
        manifest=engines,
        logits=cuda.DeviceBuffer(engines.options.max_rows * manifest.geometry.vocab_size * _F32_BYTES),
        row_numbers=stream.upload(np.arange(_ROW_NUMBERS, dtype=np.int32)),
        under_way=UnderWay(),
        host=HostCopies(stream),
        slots=RecurrentSlots(library, stream, manifest.geometry),
        plan=plan,
    )
    weights = _upload(folder, engines, roles, stream)
    memory = shared.sequence_memory(roles)
    trunk = TensorrtTrunk(sessions["trunk"], shared, memory, context_size, max_rows)
    head = None
    if "draft" in roles:
        head = TensorrtDraft(sessions["draft"], shared, memory, DraftBuffers(shared, draft_tokens))
    scratch = cuda.DeviceBuffer(plan.activations)
    for role, engine in (("trunk", trunk), ("draft", head)):
        if engine is not None:
            sessions[role].bind({**weights.addresses, **engine.fixed_addresses()}, scratch, weights)
            engine.warm_up()
    return trunk, head


def engine_limits(folder: Path) -> EngineLimits:
    """Of the engines in a folder. Raises EngineError when there are none."""
    options = load_engine_manifest(folder).options
    return EngineLimits(context=options.context, draft_n=options.max_rows - 1)


def _plan(
    engines: EngineManifest,
    geometry: Geometry,
    roles: Sequence[str],
    activations: int,
    num_sequences: int,
    free: int,
    total: int,
) -> MemoryPlan:
    """What engines will need of ``free`` bytes. num_sequences: as in `open_engines`. Raises ResourceError."""
    numbers: Sequence[int] = [num_sequences] if num_sequences else range(SEQUENCES_DEFAULT, 0, -1)
    plans = [plan_memory(engines, geometry, roles, activations, number) for number in numbers]
    plan = next((plan for plan in plans if plan.fits(free)), plans[-1])
    plan.check(free, total)
    return plan


def _check_sizes(folder: Path, engines: EngineManifest, context_size: int, max_rows: int) -> None:
    options = engines.options
    if context_size > options.context:
        raise UsageError(
            f"--ctx-size {context_size}: the engines in {folder} hold {options.context} tokens; build them with "
            f"--context {context_size}"
        )
    if max_rows > options.max_rows:
        raise UsageError(
            f"--spec-draft-n-max {max_rows - 1}: the engines in {folder} take {options.max_rows - 1} drafts a round; "
            f"build them with --max-draft {max_rows - 1}"
        )


def _check_made_for(folder: Path, engines: EngineManifest, manifest: Manifest) -> Path:
    """The plugin library, once everything is known to belong together."""
    if engines.content_key != manifest.content_key:
        raise EngineError(
            f"{folder}: the engines were built for another model than the one exported there; "
            "run `python -m engines.build` again"
        )
    built, found = f"{engines.tensorrt} {engines.tensorrt_version}", f"{tensorrt().name} {tensorrt().version}"
    if built != found:
        raise EngineError(
            f"{folder}: the engines were built by {built}, this is {found}; install that version, or run "
            "`python -m engines.build` again"
        )
    library = find_library()
    if library_digest(library) != engines.plugins:
        raise EngineError(
            f"{folder}: the engines were built with another plugin library than {library}; "
            "run `python -m engines.build` again"
        )
    return library


def _draft_tokens(folder: Path, engines: EngineManifest, manifest: Manifest) -> DraftTokens:
    """What the draft engine's logits stand for."""
    tokens = load_draft_tokens(folder, manifest)
    logits = next(each for each in engines.engines["draft"].outputs if each.name == "logits")
    if logits.shape[1] != tokens.count:
        raise EngineError(
            f"{folder}: the draft engine gives logits of {logits.shape[1]} tokens, the export's draft head knows "
            f"{tokens.count}; run `python -m engines.build` again"
        )
    return tokens


def _upload(folder: Path, engines: EngineManifest, roles: list[str], stream: cuda.Stream) -> DeviceWeights:
    names = {name for role in roles for name in engines.engines[role].weights}
    places = {name: place for name, place in engines.weights.items() if name in names}
    total = sum(piece.nbytes for place in places.values() for piece in place.pieces)
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="weights", file=sys.stderr, leave=False, disable=None
    ) as bar:
        return DeviceWeights(folder, places, stream, bar.update)
