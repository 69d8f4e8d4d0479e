"""Engines as a build would make them, before it does: their bindings and weights, and the context that fits a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import onnx

from engines.engine_manifest import Engine, EngineManifest, EngineOptions, engine_profiles, pool_size
from engines.errors import ResourceError, UsageError
from engines.manifest import Geometry, Manifest
from engines.memory_plan import plan_memory
from engines.network import bindings, fix_sizes, load_graph
from engines.sizes import size_text
from engines.weight_places import weight_places
from export.int8_caches import with_int8_caches
from export.lower_layers import LayerForm, merge_layers
from export.survey import row_widths
from export.weight_inputs import external_weights

ROLES = ("trunk", "draft")
_F32_BYTES = 4
# Measured: a layer's workspace is about twice the rows between its matrices, which it keeps also quantised.
_WORKSPACE_FACTOR = 2
_CONTEXT_STEP = 256


def form_of(role: str, model: onnx.ModelProto, lowering: str) -> LayerForm:
    """A model in TensorRT form, lowered as the option says."""
    return merge_layers(model, f"{role}.packs") if lowering == "layers" else LayerForm(model)


def sized(form: LayerForm, geometry: Geometry, options: EngineOptions) -> onnx.ModelProto:
    """The model to build: its caches of the kind asked for, all sizes but T and R numbers."""
    model = with_int8_caches(form.model) if options.kv_cache == "int8" else form.model
    return fix_sizes(model, {"P": pool_size(geometry, options.max_rows), "L": options.context})


def planned_engines(forms: Mapping[str, LayerForm], geometry: Geometry, options: EngineOptions) -> EngineManifest:
    """The manifest that `engines.build` would write, without what only a build knows."""
    made, weights = {}, {}
    for role, form in forms.items():
        inputs, outputs = bindings(sized(form, geometry, options))
        names, limits = tuple(each.name for each in external_weights(form.model)), engine_profiles(role, options)
        made[role] = Engine(f"{role}.engine", form.model.ByteSize(), "", inputs, outputs, limits, names, form.notes)
        weights.update(weight_places(form))
    return EngineManifest("", "", "", "", "", options, made, weights)


def planned_activations(forms: Mapping[str, LayerForm], geometry: Geometry, prefill_chunk: int) -> int:
    """Bytes of scratch, an estimate: what a prefill pass keeps of every token. Logits are of one row."""
    widths = [width for form in forms.values() for width in map(sum, row_widths(form.model).values())]
    kept = [width + geometry.hidden_size for width in widths if width != geometry.vocab_size] or [0]
    return _WORKSPACE_FACTOR * _F32_BYTES * prefill_chunk * max(kept)


def fitting_context(folder: Path, manifest: Manifest, options: EngineOptions, free_bytes: int) -> int:
    """The largest context whose engines fit ``free_bytes`` of a GPU's memory, all other options being as they are.

    folder: an export for TensorRT. Raises ResourceError when not even the smallest fits, UsageError."""
    limit = manifest.geometry.context_length
    options = replace(options, context=limit, prefill_chunk=min(options.prefill_chunk, limit))
    models = {role: load_graph(manifest.file(folder, role)) for role in ROLES if role in manifest.files}
    forms = {role: form_of(role, model, options.lowering) for role, model in models.items()}
    activations = planned_activations(forms, manifest.geometry, options.prefill_chunk)
    engines = planned_engines(forms, manifest.geometry, options)
    plan = plan_memory(engines, manifest.geometry, forms, activations)
    fits = min(limit, plan.largest_context(free_bytes))
    if _CONTEXT_STEP < fits < limit:
        fits = fits // _CONTEXT_STEP * _CONTEXT_STEP
    if fits < options.max_rows:
        raise ResourceError(
            f"--context auto: no context of {options.max_rows} tokens or more fits {size_text(free_bytes)}: "
            f"{size_text(plan.total - plan.kv_caches)} are needed for all else; use a smaller quantisation"
        )
    return fits


def free_gpu_bytes() -> int:
    """Memory that the first GPU of this machine has free. Raises UsageError where none can be asked."""
    try:
        from cuda.bindings import runtime

        status, free, _ = runtime.cudaMemGetInfo()
    except (ImportError, RuntimeError) as error:
        raise UsageError(_no_gpu(str(error))) from error
    if int(status):
        raise UsageError(_no_gpu(status.name))
    return int(free)


def _no_gpu(why: str) -> str:
    return f"--context auto: no GPU here tells how much memory it has free ({why}); say so with --gpu-memory GB"
