"""GGUF file -> exported folder: weights, graphs, tokenizer, template, manifest. All or nothing."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from engines.draft_head import DraftHeadOptions
from engines.errors import ResourceError, UsageError, printable
from engines.given_files import real_path
from engines.manifest import MANIFEST_NAME, Geometry, Manifest, file_digest
from engines.sizes import size_text
from engines.whole_files import whole_digests
from engines.work_folders import names_of, new_parents_removed, remove_leftovers, work_name
from export.blocks import BLOCK_FORMS
from export.config import ModelConfig, load_config
from export.draft_head import HEAD_NAME, IDS_NAME, check_options, count_cut_weights, cut_draft_head
from export.gguf_file import GGUFFile, GGUFTensor
from export.graph import Graph
from export.lower import lower, save_lowered
from export.model_graphs import draft_graph, replay_graph, trunk_graph
from export.plugin_limits import check_plugins_take
from export.raw_weights import RawWeightStore, place_gguf
from export.read_sizes import read_nbytes
from export.tokenizer import write_tokenizer
from export.version import exporter_version
from export.weights import ALIGNMENT, WeightStore

WEIGHTS_NAME = "weights.bin"
# Form of the graphs: the canonical one, or the one with plugin nodes that engines are built from.
TARGETS = ("onnxruntime", "tensorrt")
WHOLE_HEAD = DraftHeadOptions()
_SWAP_ATTEMPTS = 100
_OLD = ".old"


def export_model(
    model: Path,
    folder: Path,
    *,
    draft: bool = True,
    target: str = "onnxruntime",
    draft_head: DraftHeadOptions = WHOLE_HEAD,
    progress: Callable[[int], None] = lambda values: None,
    replaces: Callable[[], bool] = lambda: True,
) -> Manifest:
    """Export a GGUF into ``folder``, which is replaced as a whole once everything is written.

    ``target``: one of TARGETS. ``draft`` False leaves the draft head out, ``draft_head`` says how much of the LM head
    it gets. ``progress`` is told the number of weights handled, piece by piece (see `count_weights`). ``replaces`` is
    asked when all is written: whether it takes the place of what is there.

    Raises ModelFileError, UsageError (folder holds something else), ResourceError (disk).
    """
    file = GGUFFile.open(model)
    config = load_config(file, draft=draft)
    folder = _checked(folder)
    check_options(config, draft_head, file.path)
    if target == "tensorrt":
        check_plugins_take(config, file.path)
    else:
        _check_disk(folder, file, config, draft_head)
    part = folder.with_name(work_name(folder.name))
    with new_parents_removed(folder):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(folder.parent, f"{names_of(folder.name)}({re.escape(_OLD)})?")
            part.mkdir(parents=True)  # again, where another process that failed has just removed them
            manifest = _write_all(file, config, part, target, draft_head, progress)
            _sync(part)
            if replaces():
                _swap(part, folder)
        except OSError as error:
            raise ResourceError(f"{folder}: cannot write the export ({error.strerror or error})") from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return manifest


def count_weights(file: GGUFFile, config: ModelConfig, draft_head: DraftHeadOptions = WHOLE_HEAD) -> int:
    """Number of weights that an export handles, for a progress bar; a cut head is made and then stored."""
    stored = sum(int(np.prod(file.tensors[name].shape)) for name in config.tensor_names())
    return stored + 2 * count_cut_weights(config, draft_head)


def _write_all(
    file: GGUFFile,
    config: ModelConfig,
    part: Path,
    target: str,
    draft_head: DraftHeadOptions,
    progress: Callable[[int], None],
) -> Manifest:
    write = {"onnxruntime": _write_canonical, "tensorrt": _write_lowered}[target]
    cut = cut_draft_head(file, config, draft_head, part, progress)
    if cut is not None:
        file, config = cut.file, cut.config
    files, notes = write(file, config, part, progress)
    if cut is not None:
        notes.append(cut.note)
        if HEAD_NAME not in files.values():
            cut.tensor.path.unlink()
        if cut.ids is not None:
            (part / IDS_NAME).write_bytes(cut.ids.astype("<i4").tobytes())
            files["draft_ids"] = IDS_NAME
    elif not draft_head.changes_nothing:
        notes.append("draft head: its LM head is left whole, since it has no more rows and bits than asked for")
    tokenizer = write_tokenizer(file, part)
    files["tokenizer"] = "tokenizer.json"
    if tokenizer.has_chat_template:
        files["chat_template"] = "chat_template.jinja"
    manifest = Manifest(
        model_name=printable(file.get("general.name", str, file.path.stem)),
        content_key=file.content_key(),
        target=target,
        geometry=geometry_of(config),
        tokenizer=tokenizer,
        files={role: (name, (part / name).stat().st_size) for role, name in files.items()},
        digests={role: file_digest(part / name) for role, name in files.items()},
        notes=tuple(notes),
        draft_head_key=draft_head.key(),
        exporter=exporter_version(),
        whole=whole_digests(part, files) if target == "tensorrt" else {},  # which `engines.build` looks at
        read_nbytes={role: read_nbytes(part / files[role]) for role in ("trunk", "draft") if role in files},
    )
    manifest.save(part)
    return manifest


def _write_canonical(
    file: GGUFFile, config: ModelConfig, part: Path, progress: Callable[[int], None]
) -> tuple[dict[str, str], list[str]]:
    """Canonical graphs and their weights; role -> file name, and notes for the user."""
    graphs: dict[str, Graph] = {}
    with WeightStore(part / WEIGHTS_NAME, progress) as store:
        graphs["trunk"] = trunk_graph(file, config, store)
        if config.draft is not None:
            graphs["draft"] = draft_graph(file, config, store)
        if config.gdn_layers:
            graphs["replay"] = replay_graph(config)
    for role, graph in graphs.items():
        graph.save(part / f"{role}.onnx")
    return {"weights": WEIGHTS_NAME, **{role: f"{role}.onnx" for role in graphs}}, store.notes


def _write_lowered(
    file: GGUFFile, config: ModelConfig, part: Path, progress: Callable[[int], None]
) -> tuple[dict[str, str], list[str]]:
    """The graphs in TensorRT form; the weights stay in the .gguf, which is placed beside them."""
    with RawWeightStore(part / WEIGHTS_NAME, file, progress) as store:
        graphs = {"trunk": trunk_graph(file, config, store)}
        if config.draft is not None:
            graphs["draft"] = draft_graph(file, config, store)
    files = {f"blocks.{index}": name for index, name in enumerate(place_gguf(file, part))}
    if part / HEAD_NAME in store.used:
        files["draft_head"] = HEAD_NAME
    if store.bytes_written:
        files["weights"] = WEIGHTS_NAME
    else:
        (part / WEIGHTS_NAME).unlink()
    for role, graph in graphs.items():
        save_lowered(lower(graph, config, store), part / f"{role}.onnx")
        files[role] = f"{role}.onnx"
    return files, store.notes


def geometry_of(config: ModelConfig) -> Geometry:
    return Geometry(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        gdn_layers=config.gdn_layers,
        attention_layers=config.attention_layers,
        draft_layer=config.draft.layer if config.draft else None,
        num_kv_heads=config.attention.num_kv_heads,
        head_dim=config.attention.head_dim,
        gdn_v_heads=config.gdn.num_v_heads,
        gdn_head_dim=config.gdn.head_dim,
        conv_channels=config.gdn.conv_dim,
        conv_kernel=config.gdn.conv_kernel,
        context_length=config.context_length,
        num_heads=config.attention.num_heads,
    )


def _stored_bytes(tensor: GGUFTensor) -> int:
    values = int(np.prod(tensor.shape))
    form = BLOCK_FORMS.get(tensor.ggml_type)
    if form is None:
        return max(tensor.nbytes, 4 * values if tensor.ggml_type not in (1, 30) else 0) + ALIGNMENT
    per_block = form.block_bytes + (8 if form.has_offset else 4)
    return values // form.block_size * per_block + 3 * ALIGNMENT


def _checked(folder: Path) -> Path:
    """``folder`` without links and dots, since its name will be given to another one; refuses to replace anything but
    an export or an empty folder."""
    try:
        os.fspath(folder).encode()
    except UnicodeEncodeError:
        raise UsageError(f"{os.fspath(folder)!a}: the name of the folder is not UTF-8; choose another -o") from None
    given, folder = folder, real_path(folder)
    if folder in (Path.cwd(), *Path.cwd().parents):
        raise UsageError(f"{given}: is the current folder or holds it, and cannot be replaced; choose another -o")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: is a file; -o wants a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MANIFEST_NAME).is_file():
        raise UsageError(f"{folder}: holds files that are no export ({MANIFEST_NAME} is missing); choose another -o")
    return folder


def _check_disk(folder: Path, file: GGUFFile, config: ModelConfig, draft_head: DraftHeadOptions) -> None:
    """Refuse to start what the disk cannot hold."""
    needed = sum(_stored_bytes(file.tensors[name]) for name in config.tensor_names())
    needed += 8 * count_cut_weights(config, draft_head)  # twice, as float32 at the most
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise ResourceError(
            f"{folder}: the export needs {size_text(needed, free)}, {size_text(free, needed)} are free; "
            "free space or choose another folder (-o, --cache-dir)"
        )


def _swap(part: Path, folder: Path) -> None:
    """Put ``part`` in the place of ``folder``; into it, manifest last, where it cannot be moved (a mount point)."""
    old = folder.with_name(work_name(folder.name, _OLD))
    for attempt in range(_SWAP_ATTEMPTS):
        try:
            if folder.exists():
                os.replace(folder, old)
            os.replace(part, folder)
            return
        except OSError as error:
            if error.errno in (errno.EBUSY, errno.EXDEV):
                _refill(part, folder)
                return
            # Another export into the same folder took it away, or put its own there, in between.
            between = (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST)
            if error.errno not in between or not part.exists() or attempt + 1 == _SWAP_ATTEMPTS:
                raise
        finally:
            shutil.rmtree(old, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Let every file reach the disk before the folder gets the name of a whole one."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with open(path, "rb") as file:
                os.fsync(file.fileno())


def _refill(part: Path, folder: Path) -> None:
    """Replace the export inside ``folder`` file by file; without a manifest it is none in between."""
    (folder / MANIFEST_NAME).unlink(missing_ok=True)
    for path in sorted(part.iterdir(), key=lambda each: each.name == MANIFEST_NAME):
        shutil.move(path, folder / path.name)
