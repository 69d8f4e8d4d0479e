"""Exports that meet each other, a full disk or a folder that takes nothing: whole, or refused with nothing left."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.manifest import load_manifest

Tiny = Callable[[str], Path]
# One writes no more than so many bytes into any file, as on a disk that is full; the signal would end the process.
LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
from importlib import import_module
from engines.command import run_command
run_command(lambda: import_module(sys.argv[2]).main(sys.argv[3:]))
"""
# What exports a model, and the flag that names a folder.
EXPORTING = {
    "onnxruntime": ["export.__main__", "-o"],
    "tensorrt": ["export.__main__", "--target", "tensorrt", "-o"],
    "cache": ["runtime.generate", "--prompt-ids", "40", "--cache-dir"],
    "accuracy": ["engines.accuracy.__main__", "-o"],
}


def start(*command: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_exports_into_one_folder_at_once(tiny: Tiny, tmp_path: Path) -> None:
    """Whoever is last has the name; every one is whole while it has it."""
    folder = tmp_path / "x"
    running = [start("-m", "export", tiny(name), "-o", folder) for name in ("bigram_ring", "draft_perfect")]
    for each in running:
        _, said = each.communicate(timeout=120)
        assert each.returncode == 0, said
    load_manifest(folder).verify(folder)
    assert list(tmp_path.iterdir()) == [folder]


# For TensorRT the largest file is the model's own.
@pytest.mark.parametrize(
    ("name", "nbytes"),
    [(name, n) for name in EXPORTING for n in (0, 1000, 100_000) if (name, n) != ("tensorrt", 100_000)],
)
def test_a_full_disk(tiny: Tiny, tmp_path: Path, name: str, nbytes: int) -> None:
    """Folders that were made for it go again."""
    module, *flags = EXPORTING[name]
    done = start("-c", LIMITED, nbytes, module, tiny("bigram_ring"), *flags, tmp_path / "new" / "folders" / "x")
    _, said = done.communicate(timeout=120)
    assert done.returncode == 6, said
    assert said.startswith("error: ") and said.count("\n") == 1 and "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(tiny: Tiny, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    done = start("-m", "export", tiny("bigram_ring"), "-o", tmp_path / "x")
    _, said = done.communicate(timeout=120)
    tmp_path.chmod(0o700)
    assert done.returncode == 6 and said.startswith("error: ") and said.count("\n") == 1, said
