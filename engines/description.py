"""What a .gguf would become, before anything is written: tensors, graphs, and engines as `engines.build` would make
them, with their memory. Reads headers and vectors only."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from engines.build import DEFAULT_OPTIONS, KV_CACHES
from engines.engine_manifest import Engine, EngineManifest, EngineOptions, Profile, pool_size
from engines.errors import ModelFileError, UsageError
from engines.layer_kernels import layer_kernels
from engines.manifest import Geometry
from engines.network import bindings, fix_sizes
from engines.planned_model import PlannedModel
from engines.weight_places import weight_places
from export.config import ModelConfig, load_config
from export.exporter import geometry_of
from export.gguf_file import GGUFFile
from export.int8_caches import with_int8_caches
from export.lower_layers import LayerForm
from export.oddities import oddities
from export.plugin_limits import check_plugins_take
from export.read_sizes import read_nbytes_of
from export.survey import layer_forms, node_counts, row_widths, tensor_groups
from export.weight_inputs import external_weights

_F32_BYTES = 4
# Measured: a layer's workspace is about twice the rows between its matrices, which it keeps also quantised.
_WORKSPACE_FACTOR = 2


def describe(model: Path, context: int = 0) -> PlannedModel:
    """Describe the file. context: tokens that engines would hold; 0: what `engines.build` would take.

    Raises UsageError, or ModelFileError for a file that cannot be exported even without its draft head."""
    file = GGUFFile.open(model)
    config, missing = _config(file)
    if not 0 <= context <= config.context_length:
        raise UsageError(f"--ctx-size {context}: the model was made for 1 to {config.context_length} tokens")
    options = replace(DEFAULT_OPTIONS, context=context or min(DEFAULT_OPTIONS.context, config.context_length))
    options = replace(options, prefill_chunk=min(options.prefill_chunk, options.context))
    if options.context < options.max_rows:
        raise UsageError(f"--ctx-size {context}: engines take {options.max_rows} tokens at least")
    groups = tensor_groups(file, config)
    geometry, refusal = geometry_of(config), _refusal(config, file)
    forms = {} if refusal else layer_forms(file, config)
    facts = {
        "file": str(file.path),
        "name": file.get("general.name", str, file.path.stem),
        "bytes": sum(each.nbytes for each in file.tensors.values()),
        "geometry": _geometry_facts(config),
        "tensors": [asdict(group) for group in groups],
        "tensorrt": {
            "refusal": refusal,
            **{role: _form_facts(form, config.hidden_size) for role, form in forms.items()},
        },
        "odd": oddities(file, config, groups, missing),
    }
    engines = {kind: _engines(forms, geometry, replace(options, kv_cache=kind)) for kind in KV_CACHES} if forms else {}
    widths = [width for form in forms.values() for width in map(sum, row_widths(form.model).values())]
    activations = _WORKSPACE_FACTOR * _F32_BYTES * options.prefill_chunk * max(_hidden_widths(widths, config))
    reads = {role: read_nbytes_of(form.model) for role, form in forms.items()}
    return PlannedModel(facts, geometry, engines, reads, activations, options.context)


def _config(file: GGUFFile) -> tuple[ModelConfig, str]:
    """The model, and why its draft head had to be left out."""
    try:
        return load_config(file), ""
    except ModelFileError as error:
        try:
            return load_config(file, draft=False), str(error).removeprefix(f"{file.path}: ")
        except ModelFileError:
            raise error from None


def _refusal(config: ModelConfig, file: GGUFFile) -> str:
    try:
        check_plugins_take(config, file.path)
    except ModelFileError as error:
        return str(error).removeprefix(f"{file.path}: ")
    return ""


def _geometry_facts(config: ModelConfig) -> dict[str, Any]:
    facts = asdict(config)
    del facts["names"]
    return {
        **facts,
        "attention_layers": list(config.attention_layers),
        "gdn_layers": len(config.gdn_layers),
        "tied_lm_head": config.tied,
    }


def _form_facts(form: LayerForm, hidden_size: int) -> dict[str, Any]:
    plugins, standard = node_counts(form.model)
    return {
        "plugin_nodes": plugins,
        "standard_nodes": standard,
        "layer_nodes": len(form.packs),
        "layer_kernels": layer_kernels(form.model, hidden_size),
        "notes": list(form.notes),
        "reads_bytes": read_nbytes_of(form.model),
    }


def _engines(forms: dict[str, LayerForm], geometry: Geometry, options: EngineOptions) -> EngineManifest:
    """The manifest that `engines.build` would write, without what only a build knows."""
    made, weights = {}, {}
    for role, form in forms.items():
        model = with_int8_caches(form.model) if options.kv_cache == "int8" else form.model
        sizes = {"P": pool_size(geometry, options.max_rows), "L": options.context}
        inputs, outputs = bindings(fix_sizes(model, sizes))
        rows = options.max_rows if role == "trunk" else 1
        profiles = Profile("decode", options.max_rows, rows), Profile("prefill", options.prefill_chunk, 1)
        names = tuple(each.name for each in external_weights(form.model))
        made[role] = Engine(f"{role}.engine", form.model.ByteSize(), "", inputs, outputs, profiles, names, form.notes)
        weights.update(weight_places(form))
    return EngineManifest("", "", "", "", "", options, made, weights)


def _hidden_widths(widths: list[int], config: ModelConfig) -> list[int]:
    """Widths of what a prefill pass keeps of every token: logits are of one row."""
    return [width + config.hidden_size for width in widths if width != config.vocab_size] or [0]
