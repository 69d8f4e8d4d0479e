"""`python -m engines.build DIR|MODEL.gguf`: TensorRT engines of an exported model. Needs no GPU.

A .gguf is first exported into -o. Engines, and `engines.json` with all that the runtime needs, are put into the
exported folder; what is already there and made from the same things is kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

from tqdm import tqdm

from engines.build_flags import (
    CONTEXT_AUTO,
    DEFAULT_OPTIONS,
    KV_CACHES,
    LOWERINGS,
    PREFILL_CHUNK_MAX,
    build_parser,
    check_numbers,
)
from engines.command import report, run_command, say
from engines.draft_head import draft_head_options
from engines.engine_files import Undone, kept_engines, put_in_place, work_folder
from engines.engine_manifest import (
    Engine,
    EngineManifest,
    EngineOptions,
    WeightPlace,
    engine_profiles,
)
from engines.errors import EngineError, NextnError, ResourceError, UsageError
from engines.fresh_export import exported_folder
from engines.manifest import Manifest, load_manifest
from engines.network import Progress, bindings, build_engine, load_graph
from engines.planned_engines import ROLES, fitting_context, form_of, free_gpu_bytes, sized
from engines.weight_places import packed, weight_places
from engines.whole_files import verify_whole
from export.lower_layers import LayerForm
from export.version import exporter_version
from export.weight_inputs import external_weights
from plugins.load import library_digest, load_plugins, prepare_parser, tensorrt
from plugins.ops import MAX_DECODE_T

# Part of every build key, as is the exporter's source: raise it when the same inputs would give other engines.
_BUILDER_VERSION = 4


def build_engines(
    folder: Path,
    options: EngineOptions = DEFAULT_OPTIONS,
    *,
    library: Path | None = None,
    progress: Progress = lambda phase, fraction: None,
    layers: Callable[[str, list[str]], None] | None = None,
    sound: bool = False,
) -> tuple[EngineManifest, bool]:
    """Build the engines of an exported ``folder``; their manifest, and whether anything was built.

    library: the plugin library (default: see `plugins.load`). layers: told each role's layer listing, which is only
    there when something is built. sound: every byte of the export has been looked at.
    Raises UsageError (options), EngineError (a damaged export among others), ResourceError."""
    manifest = load_manifest(folder)
    options = _checked(options, manifest, folder)
    if not sound:
        verify_whole(folder, manifest)
    chosen, digest = tensorrt(), library_digest(load_plugins(library))
    models = {role: manifest.file(folder, role) for role in ROLES if role in manifest.files}
    key = _build_key(models, options, manifest, f"{chosen.name} {chosen.version}", digest)
    kept = kept_engines(folder, key)
    if kept is not None:
        return kept, False
    prepare_parser()
    made: dict[str, Engine] = {}
    weights: dict[str, WeightPlace] = {}
    try:
        with work_folder(folder) as work:
            for role, path in models.items():
                model = load_graph(path)
                listing: list[str] | None = [] if layers else None
                form = form_of(f"{work.name}/{role}", model, options.lowering)
                made[role] = _build_role(role, form, path, work, options, manifest, progress, listing)
                weights.update(weight_places(form))
                if layers and listing is not None:
                    layers(role, listing)
            result = EngineManifest(
                build_key=key,
                content_key=manifest.content_key,
                tensorrt=chosen.name,
                tensorrt_version=chosen.version,
                plugins=digest,
                options=options,
                engines=made,
                weights=weights,
            )
            put_in_place(folder, work, result)
    except OSError as error:
        raise ResourceError(f"{folder}: cannot write engines ({error.strerror or error}); free space") from error
    return result, True


def _build_role(
    role: str,
    form: LayerForm,
    path: Path,
    work: Path,
    options: EngineOptions,
    manifest: Manifest,
    progress: Progress,
    listing: list[str] | None,
) -> Engine:
    model, limits = sized(form, manifest.geometry, options), engine_profiles(role, options)
    inputs, outputs = bindings(model)
    file = work / f"{role}.engine"
    with packed(form, work.parent) if options.embed_weights else nullcontext():
        nbytes, digest = build_engine(
            model,
            path,
            limits,
            file,
            embed_weights=options.embed_weights,
            progress=lambda phase, fraction: progress(f"{role}: {phase}", fraction),
            layers=listing,
        )
    weights = () if options.embed_weights else tuple(each.name for each in external_weights(form.model))
    return Engine(file.name, nbytes, digest, inputs, outputs, limits, weights, form.notes)


def _checked(options: EngineOptions, manifest: Manifest, folder: Path) -> EngineOptions:
    if manifest.target != "tensorrt":
        raise EngineError(
            f"{folder}: exported for {manifest.target}; export with `python -m export --target tensorrt`, or give the "
            ".gguf to `python -m engines.build`"
        )
    limit = manifest.geometry.context_length
    for name, value, low, high in (
        ("--max-draft", options.max_rows - 1, 0, MAX_DECODE_T - 1),
        ("--context", options.context, 1, limit),
        ("--prefill-chunk", options.prefill_chunk, 1, PREFILL_CHUNK_MAX),
    ):
        if not low <= value <= high:
            raise UsageError(f"{name} {value}: wanted {low} to {high}")
    for flag, choice, choices in (
        ("--lowering", options.lowering, LOWERINGS),
        ("--kv-cache", options.kv_cache, KV_CACHES),
    ):
        if choice not in choices:
            raise UsageError(f"{flag} {choice}: wanted {' or '.join(choices)}")
    if options.context < options.max_rows:
        raise UsageError(f"--context {options.context}: wanted at least --max-draft + 1 = {options.max_rows}")
    return replace(options, prefill_chunk=min(options.prefill_chunk, options.context))


def _build_key(
    models: dict[str, Path], options: EngineOptions, manifest: Manifest, tensorrt_id: str, plugins: str
) -> str:
    digest = hashlib.blake2b(digest_size=20)
    # The draft head's own LM head is no part of the .gguf; embedded, its values are part of the engine.
    head = manifest.digests.get("draft_head")
    versions = [_BUILDER_VERSION, exporter_version(), tensorrt_id, plugins]
    facts = [*versions, asdict(options), manifest.content_key, sorted(models), head]
    if options.embed_weights:  # whose values are then part of the engines; the key of the content is of samples
        facts.append(manifest.whole)
    digest.update(json.dumps(facts).encode())
    for role in sorted(models):
        digest.update(models[role].read_bytes())
    return digest.hexdigest()


def _options(given: argparse.Namespace, folder: Path) -> EngineOptions:
    """What the flags ask for, for the export in ``folder``."""
    manifest = load_manifest(folder)
    longest = manifest.geometry.context_length
    context = min(DEFAULT_OPTIONS.context, longest) if given.context is None else given.context
    options = EngineOptions(
        given.max_draft + 1, context, given.prefill_chunk, given.embed_weights, given.lowering, given.kv_cache
    )
    if context != CONTEXT_AUTO:
        return options
    _checked(replace(options, context=longest), manifest, folder)
    free_bytes = free_gpu_bytes() if given.gpu_memory is None else int(given.gpu_memory * 1e9)
    options = replace(options, context=fitting_context(folder, manifest, options, free_bytes))
    say(f"note: --context auto: {options.context} of the model's {longest}", to=sys.stderr)
    return options


def _built(
    given: argparse.Namespace, folder: Path, layers: Callable[[str, list[str]], None] | None
) -> tuple[EngineManifest, bool]:
    options = _options(given, folder)
    with tqdm(total=1.0, bar_format="{desc}{bar}", file=sys.stderr, leave=False, disable=None) as bar:

        def progress(phase: str, fraction: float) -> None:
            bar.set_description_str(f"{phase} ", refresh=False)
            bar.n = fraction
            bar.refresh()

        return build_engines(
            folder,
            options,
            library=given.plugins,
            progress=progress,
            layers=layers,
            sound=not given.model.is_dir(),  # just exported, or looked at when it was found
        )


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""

    def show(role: str, listing: list[str]) -> None:
        for line in listing:
            say(f"{role}: {line}")

    try:
        given = build_parser().parse_args(arguments)
        check_numbers(given)
        if given.context == CONTEXT_AUTO and given.gpu_memory is None:
            free_gpu_bytes()  # refuses where there is none: said before a long export
        with Undone() as undone:
            folder = exported_folder(
                given.model, given.output, not given.no_draft, draft_head_options(given), given.context, undone.made
            )
            manifest, built = _built(given, folder, show if given.layers else None)
    except NextnError as error:
        return report(error)
    for role, engine in manifest.engines.items():
        state = "built" if built else "up to date"
        say(f"{folder / engine.file}: {role}, {engine.nbytes / 1e6:.1f} MB, {state}")
        for note in engine.notes:
            say(f"note: {role}: {note}", to=sys.stderr)
    return 0


if __name__ == "__main__":
    run_command(main)
