"""Cut the draft head's LM head down: fewer rows, fewer bits (`engines.draft_head` says why).

The rows are the .gguf's own raw blocks, gathered into a file of their own, or requantised on the way. To what makes the
graphs the result is one more tensor of the model, named by the configuration in the place of the whole head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as GGMLType
from gguf.quants import dequantize

from engines.draft_head import ALL_ROWS, DraftHeadOptions
from engines.errors import UsageError
from export.config import ModelConfig
from export.draft_tokens import choose_tokens
from export.gguf_file import GGUFFile, GGUFTensor
from export.quantize_q4k import SUPERBLOCK, quantize_q4_k
from export.tensor_types import check_finite
from export.token_frequencies import coverage, wanted_counts

HEAD_NAME = "draft_head.bin"
IDS_NAME = "draft_ids.bin"
_LEAF = "shared_head_head"
_CHUNK_VALUES = 4 << 20


@dataclass(frozen=True)
class CutHead:
    """A model whose draft head has an LM head of its own.

    file, config: with that head as a tensor. ids: token of each row, int32 [N] ascending; None: of all. note: what was
    done, for the user."""

    file: GGUFFile
    config: ModelConfig
    ids: np.ndarray | None
    note: str

    @property
    def tensor(self) -> GGUFTensor:
        assert self.config.draft is not None
        return self.file.tensors[self.config.tensor(_LEAF, self.config.draft.layer)]


def check_options(config: ModelConfig, options: DraftHeadOptions, path: Path) -> None:
    """Raise UsageError when ``options`` ask for what the model at ``path`` cannot have."""
    options.validate()
    if options.changes_nothing:
        return
    if config.draft is None:
        raise UsageError(f"{path}: --draft-head-... needs a NextN draft head; the model has none, or it is left out")
    if options.head_type == "q4_k" and config.hidden_size % SUPERBLOCK:
        raise UsageError(
            f"--draft-head-type q4_k: rows of {config.hidden_size} values; Q4_K takes multiples of {SUPERBLOCK}"
        )


def count_cut_weights(config: ModelConfig, options: DraftHeadOptions) -> int:
    """Weights of the head that `cut_draft_head` makes, for a progress bar; 0 when it has nothing to do."""
    if options.changes_nothing or config.draft is None:
        return 0
    return min(options.rows or config.vocab_size, config.vocab_size) * config.hidden_size


def cut_draft_head(
    file: GGUFFile,
    config: ModelConfig,
    options: DraftHeadOptions,
    folder: Path,
    progress: Callable[[int], None] = lambda values: None,
) -> CutHead | None:
    """Write the cut head into ``folder`` as HEAD_NAME; None when ``options`` and the model leave nothing to do.

    progress: told the number of values written, piece by piece. Raises UsageError (options), ModelFileError (values
    that are not finite), OSError (disk)."""
    check_options(config, options, file.path)
    if config.draft is None:
        return None
    head = file.tensors[config.tensor(_LEAF, config.draft.layer)]
    counts = wanted_counts(file, options)
    ids = None
    if options.rows != ALL_ROWS and options.rows < config.vocab_size:
        ids = choose_tokens(file, options.rows, counts)
    smaller = options.head_type == "q4_k" and _bytes_per_row(head) > _q4_k_bytes(config.hidden_size)
    if ids is None and not smaller:
        return None
    if smaller:
        check_finite(head)  # Q4_K would hide what is not
    kind = GGMLType.Q4_K if smaller else head.ggml_type
    name = f"blk.{config.draft.layer}.draft_head.weight"
    path, rows = folder / HEAD_NAME, config.vocab_size if ids is None else len(ids)
    with open(path, "wb") as out:
        for piece in _pieces(head, ids):
            raw = quantize_q4_k(dequantize(piece, head.ggml_type)) if smaller else piece
            out.write(np.ascontiguousarray(raw).data.cast("B"))
            progress(len(piece) * config.hidden_size)
    cut = GGUFTensor(name, (rows, config.hidden_size), kind, path, 0, path.stat().st_size)
    return CutHead(
        file=replace(file, tensors={**file.tensors, name: cut}),
        config=replace(config, names={**config.names, (_LEAF, config.draft.layer): name}),
        ids=ids,
        note=_note(head, cut, ids, counts),
    )


def _pieces(head: GGUFTensor, ids: np.ndarray | None) -> Iterator[np.ndarray]:
    """Raw rows [n, row bytes] u8 of ``head``, those of ``ids`` or all, in order."""
    blocks = head.blocks()
    step = max(1, _CHUNK_VALUES // head.shape[1])
    for first in range(0, len(blocks) if ids is None else len(ids), step):
        wanted = slice(first, first + step)
        yield np.asarray(blocks[wanted if ids is None else ids[wanted]])


def _bytes_per_row(tensor: GGUFTensor) -> int:
    return tensor.nbytes // tensor.num_rows


def _q4_k_bytes(columns: int) -> int:
    values, nbytes = GGML_QUANT_SIZES[GGMLType.Q4_K]
    return columns // values * nbytes


def _note(head: GGUFTensor, cut: GGUFTensor, ids: np.ndarray | None, counts: np.ndarray | None) -> str:
    kinds = cut.ggml_type.name
    if cut.ggml_type != head.ggml_type:
        kinds = f"{head.ggml_type.name} as {kinds}"
    held = "" if counts is None or ids is None else f", {coverage(counts, ids):.4f} of the counted tokens"
    return (
        f"draft head: {cut.shape[0]} of {head.shape[0]} rows, {kinds}, "
        f"{cut.nbytes / 1e6:.1f} instead of {head.nbytes / 1e6:.1f} MB{held}"
    )
