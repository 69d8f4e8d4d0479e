"""MODEL of the command lines -> exported folder: a folder as it is, a .gguf exported on first use into a cache.

The one place where the runtime reaches for `export`, and only once a .gguf was given: a machine that runs exported
folders needs neither the exporter nor its packages.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from engines.cache import default_cache_dir, entry_name, mark_used, remove_killed_exports
from engines.command import say
from engines.draft_head import DraftHeadOptions, refuse_for_folder
from engines.errors import EngineError, ModelFileError, ResourceError, UsageError, printable
from engines.evidence import Evidence
from engines.manifest import MANIFEST_NAME, load_manifest
from engines.planned_model import PlannedModel
from engines.work_folders import new_parents_removed

WHOLE_HEAD = DraftHeadOptions()


def exported_folder(
    model: Path, *, draft: bool, cache_dir: Path | None = None, draft_head: DraftHeadOptions = WHOLE_HEAD
) -> Path:
    """The exported folder of ``model``.

    A .gguf is looked up in the cache by its content, the exporter's own source and ``draft_head``, and exported if it
    is not there, with a progress bar on a terminal's stderr. draft False: a file whose draft head is missing or
    unusable is exported without one. Raises UsageError, ModelFileError or ResourceError.
    """
    if model.is_dir():
        refuse_for_folder(draft_head, model)
        return model
    if not model.exists():
        raise UsageError(f"{model}: no such file or folder; give a .gguf file or an exported folder")
    cache = cache_dir or default_cache_dir()
    try:
        return _cached_export(model, cache, True, draft_head)
    except ModelFileError:
        if draft:
            raise
        return _cached_export(model, cache, False, WHOLE_HEAD)


def described(model: Path, context: int) -> PlannedModel:
    """What a .gguf holds and would become (`engines.description`). Raises UsageError, ModelFileError."""
    if model.is_dir():
        raise UsageError(f"{model}: is a folder; give the .gguf file itself")
    try:
        from engines.description import describe
    except ImportError as error:
        raise EngineError(f"looking into a .gguf needs the exporter's packages ({error}); pip install them") from error
    return describe(model, context)


def evidence_of(model: Path, tokens: Sequence[int]) -> Evidence:
    """What the equations of a .gguf give for ``tokens`` (`engines.witness`), with a bar on a terminal's stderr.

    Raises UsageError, ModelFileError."""
    try:
        from tqdm import tqdm

        from engines.witness import give_evidence
    except ImportError as error:
        raise EngineError(f"reading a .gguf needs the exporter's packages ({error}); pip install them") from error
    label = f"equations of {model.name}"
    with tqdm(unit="w", unit_scale=True, desc=label, file=sys.stderr, leave=False, disable=None) as bar:
        return give_evidence(model, tokens, bar.update)


def content_key_of(model: Path) -> str:
    """What an export's manifest says of the .gguf that it was made from. Raises ModelFileError."""
    from export.gguf_file import GGUFFile

    return GGUFFile.open(model).content_key()


def _cached_export(model: Path, cache: Path, with_draft: bool, draft_head: DraftHeadOptions) -> Path:
    folder = cache / entry_name(content_key_of(model), with_draft, draft_head.key())
    if _is_whole(folder):
        mark_used(folder)
        return folder
    with new_parents_removed(folder):
        try:
            cache.mkdir(parents=True, exist_ok=True)
            remove_killed_exports(cache)
            if folder.exists() and not (folder / MANIFEST_NAME).is_file():
                shutil.rmtree(folder)
        except OSError as error:
            raise ResourceError(
                f"{cache}: cannot hold the export ({error.strerror or error}); choose another --cache-dir"
            ) from error
        _export(model, folder, with_draft, draft_head)
    return folder


def _export(model: Path, folder: Path, with_draft: bool, draft_head: DraftHeadOptions) -> None:
    from tqdm import tqdm

    from export.config import load_config
    from export.exporter import count_weights, export_model
    from export.gguf_file import GGUFFile

    file = GGUFFile.open(model)
    total = count_weights(file, load_config(file, draft=with_draft), draft_head)
    label = printable(f"exporting {model.name}")
    with tqdm(total=total, unit="w", unit_scale=True, desc=label, file=sys.stderr, leave=False, disable=None) as bar:
        manifest = export_model(
            model,
            folder,
            draft=with_draft,
            draft_head=draft_head,
            progress=bar.update,
            # Another process may have made the same meanwhile, and be using it.
            replaces=lambda: not _is_whole(folder),
        )
    for note in manifest.notes:
        say(f"note: {note}", to=sys.stderr)


def _is_whole(folder: Path) -> bool:
    """Whether the folder is an export with all its files."""
    if not (folder / MANIFEST_NAME).is_file():
        return False
    try:
        load_manifest(folder).verify(folder)
    except EngineError:
        return False
    return True
