"""DIR or MODEL.gguf of `engines.build` -> a folder with a sound export for TensorRT."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tqdm import tqdm

from engines.command import say
from engines.draft_head import DraftHeadOptions, refuse_for_folder
from engines.errors import EngineError, UsageError
from engines.given_files import real_path
from engines.manifest import load_manifest
from engines.whole_files import verify_whole


def exported_folder(
    model: Path,
    output: Path | None,
    draft: bool,
    draft_head: DraftHeadOptions,
    context: int | None = None,
    made: Callable[[Path], None] = lambda folder: None,
) -> Path:
    """The exported folder: ``model`` itself, or ``output`` with the .gguf exported into it unless it is that. ``made``
    is told of one that was not there before."""
    if model.is_dir():
        refuse_for_folder(draft_head, model)
        if output is not None and real_path(output) != real_path(model):
            raise UsageError(f"{model}: is an exported folder, whose engines go into it; leave -o out")
        return model
    if not model.exists():
        raise UsageError(f"{model}: no such file or folder; give a .gguf file or an exported folder")
    if output is None:
        raise UsageError(f"{model}: with a .gguf, give the folder for the export and the engines: -o DIR")
    from export.config import load_config
    from export.exporter import count_weights, export_model
    from export.gguf_file import GGUFFile
    from export.version import exporter_version

    file = GGUFFile.open(model)
    config = load_config(file, draft=draft)
    if context is not None and context > config.context_length:  # said before a long export
        raise UsageError(f"--context {context}: wanted 1 to {config.context_length}")
    has_draft = config.draft is not None
    wanted = (file.content_key(), exporter_version(), "tensorrt", has_draft, draft_head.key())
    with contextlib.suppress(EngineError):  # nothing there, or not usable: to be exported
        found = load_manifest(output)
        if (found.content_key, found.exporter, found.target, found.has_draft, found.draft_head_key) == wanted:
            with _told_if_damaged():
                verify_whole(output, found)
                return output
    total, new = count_weights(file, config, draft_head), not output.exists()
    with tqdm(total=total, unit="w", unit_scale=True, desc="export", file=sys.stderr, leave=False, disable=None) as bar:
        manifest = export_model(
            model, output, draft=draft, target="tensorrt", draft_head=draft_head, progress=bar.update
        )
    if new:
        made(output)
    for note in manifest.notes:
        say(f"note: {note}", to=sys.stderr)
    return output


@contextlib.contextmanager
def _told_if_damaged() -> Iterator[None]:
    """An export that is not as it was written is made anew; that is said."""
    try:
        yield
    except EngineError as error:
        say(f"note: {str(error).split(';')[0]}; exporting the model anew", to=sys.stderr)
