"""What a .gguf would become, before anything is written: tensors, graphs, and engines as `engines.build` would make
them, with their memory. Reads headers and vectors only."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from engines.build_flags import DEFAULT_OPTIONS, KV_CACHES
from engines.errors import ModelFileError, UsageError, printable
from engines.layer_kernels import layer_kernels
from engines.planned_engines import planned_activations, planned_engines
from engines.planned_model import PlannedModel
from export.config import ModelConfig, load_config
from export.exporter import geometry_of
from export.gguf_file import GGUFFile
from export.lower_layers import LayerForm
from export.oddities import oddities
from export.plugin_limits import check_plugins_take
from export.read_sizes import read_nbytes_of
from export.survey import layer_forms, node_counts, tensor_groups


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
        "file": printable(str(file.path)),
        "name": printable(file.get("general.name", str, file.path.stem)),
        "bytes": sum(each.nbytes for each in file.tensors.values()),
        "geometry": _geometry_facts(config),
        "tensors": [asdict(group) for group in groups],
        "tensorrt": {
            "refusal": refusal,
            **{role: _form_facts(form, config.hidden_size) for role, form in forms.items()},
        },
        "odd": oddities(file, config, groups, missing),
    }
    kinds = KV_CACHES if forms else ()
    engines = {kind: planned_engines(forms, geometry, replace(options, kv_cache=kind)) for kind in kinds}
    activations = planned_activations(forms, geometry, options.prefill_chunk)
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
