"""Where the bytes of an engine's weights lie in an exported folder, and packs as files for engines that embed them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from onnx import TensorProto

from engines.engine_manifest import WeightPiece, WeightPlace
from engines.errors import EngineError, ResourceError
from engines.sizes import size_text
from export.lower_layers import LayerForm
from export.weight_inputs import external_weights
from plugins.ops import pack_offsets

_CHUNK_BYTES = 16 << 20


def weight_places(form: LayerForm) -> dict[str, WeightPlace]:
    """Of every weight that an engine takes as an input, by its name."""
    places = {}
    for tensor in external_weights(form.model):
        parts = form.packs.get(tensor.name, (tensor,))
        offsets, _ = pack_offsets([int(np.prod(part.dims)) for part in parts])
        pieces = tuple(_piece(part, at) for part, at in zip(parts, offsets, strict=True))
        places[tensor.name] = WeightPlace(tuple(tensor.dims), pieces)
    return places


@contextmanager
def packed(form: LayerForm, folder: Path) -> Iterator[None]:
    """The file of the packs, written into ``folder``, where it stays as long as the block runs.

    Raises ResourceError when the disk cannot hold it, EngineError when an exported file is cut off."""
    if not form.packs:
        yield
        return
    packs = [_piece(each, 0) for each in external_weights(form.model) if each.name in form.packs]
    path, needed = folder / packs[0].file, sum(pack.nbytes for pack in packs)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ResourceError(
            f"{path}: embedding the weights takes {size_text(needed, free)} for a while, {size_text(free, needed)} are "
            "free; free space, or build with --lowering ops"
        )
    places = weight_places(form)
    try:
        with open(path, "wb") as file:
            for pack in packs:
                for piece in places[pack.tensor].pieces:
                    file.seek(pack.offset + piece.at)
                    _copy(folder, piece, file)
            file.truncate(needed)
        yield
    finally:
        path.unlink(missing_ok=True)


def _copy(folder: Path, piece: WeightPiece, target: BinaryIO) -> None:
    """By way of a small buffer, so that the process's memory stays what it was."""
    buffer, left = memoryview(bytearray(_CHUNK_BYTES)), piece.nbytes
    with open(folder / piece.file, "rb", buffering=0) as source:
        source.seek(piece.offset)
        while left:
            count = source.readinto(buffer[: min(left, len(buffer))])
            if not count:
                raise EngineError(f"{folder / piece.file}: ends before {piece.tensor} does; export again")
            target.write(buffer[:count])
            left -= count


def _piece(tensor: TensorProto, at: int) -> WeightPiece:
    entries = _entries(tensor)
    return WeightPiece(tensor.name, entries["location"], int(entries["offset"]), int(entries["length"]), at)


def _entries(tensor: TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}
