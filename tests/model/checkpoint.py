"""A model's parameters as float32 files of at most 15.2 MB, in the order of ``named_parameters``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

_PIECE_VALUES = 3_800_000


def save(model: nn.Module, folder: Path) -> None:
    flat = np.concatenate([p.detach().float().cpu().numpy().ravel() for p in model.parameters()])
    for i in range(0, len(flat), _PIECE_VALUES):
        flat[i : i + _PIECE_VALUES].tofile(folder / f"ck{i // _PIECE_VALUES}.bin")


def load(model: nn.Module, folder: Path) -> nn.Module:
    """``model``, filled from ``folder``. Exits with a message when the sizes differ."""
    files = sorted(folder.glob("ck*.bin"), key=lambda file: int(file.stem[2:]))
    wanted = sum(p.numel() for p in model.parameters())
    flat = np.concatenate([np.zeros(0, np.float32), *(np.fromfile(file, np.float32) for file in files)])
    if len(flat) != wanted:
        raise SystemExit(f"{folder}: {len(files)} files ck*.bin with {len(flat)} values; the model has {wanted}")
    for p in model.parameters():
        p.data.copy_(torch.from_numpy(flat[: p.numel()]).view_as(p))
        flat = flat[p.numel() :]
    return model
