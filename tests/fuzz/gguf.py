"""`make fuzz`: coverage-guided damage to model files; whatever comes, a file is exported or refused in one line.

    python -m tests.fuzz.gguf [CORPUS] [FLAGS OF LIBFUZZER]      what was found stays in CORPUS for the next time
    python -m tests.fuzz.gguf INPUT                              one input again, and the .gguf it stands for

A hang, a crash, any other exception, too much memory or files left behind end it with the input that did it. An input
is a header and one byte behind it, which says what the tensor data are and what is done with the file: tensors of any
size need no bytes to be searched, and a mutator that knows the format changes one thing of a header at a time.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path

import atheris

from tests.fuzz.instrument import instrumented

with instrumented("export"):
    from engines.errors import ModelFileError, ResourceError, UsageError
    from export.config import load_config
    from export.exporter import TARGETS, export_model
    from export.gguf_file import GGUFFile

import numpy as np

from engines.manifest import load_manifest
from tests.fuzz.header import mutate, parse
from tests.memory import peak_bytes
from tests.named_inputs import ARRAY_BOMB, HTML_PAGE, LFS_POINTER, NAMED
from tests.tiny_gguf import Spec, build

# Of a process at its largest, beyond the size of the file; what Python and the libraries take is part of it.
MEMORY_BEYOND_FILE = 300 << 20
LONGEST_INPUT = 64 << 10
LARGEST_FILE = 8 << 20
FLAGS = (f"-max_len={LONGEST_INPUT}", "-timeout=10", "-rss_limit_mb=2048", "-print_final_stats=1")

SMALL = Spec(embd=32, ff=32, layers=2, interval=2, heads=2, kv_heads=1, head_dim=16, rope_dim=8, sections=(2, 1, 1, 0),
             state=16, k_heads=1, v_heads=2)  # fmt: skip
SEEDS = {
    "small": SMALL,
    "blocks": Spec(embd=256, ff=256, layers=2, interval=2, heads=1, kv_heads=1, head_dim=256, rope_dim=64, state=128,
                   sections=(11, 11, 10, 0), k_heads=1, v_heads=2, types="mixed"),
    "tied": Spec(embd=32, ff=32, layers=1, interval=1, heads=1, kv_heads=1, head_dim=16, rope_dim=8, state=16,
                 sections=(2, 1, 1, 0), k_heads=1, v_heads=1, tied=True, draft=False, yarn_factor=4.0),
}  # fmt: skip
HEADERS = ("split_first", "mmproj", "nextn_promised", "nextn_only", "rope_scaling_unknown", "bos_is_comma")

# The byte behind the header.
_DATA_KINDS, _CUT, _PLAIN, _TENSORRT, _EXPORT = 4, 1 << 2, 1 << 3, 1 << 4, 1 << 5
_EVERY_EXPORT = 5  # of mutated inputs one is exported: it takes as long as a hundred others


def model_file(content: bytes) -> bytes:
    """The .gguf that an input stands for."""
    control = content[-1] if content else 0
    found = parse(content[:-1])
    if found is None:
        return content[:-1]
    parts, end = found
    start = -(-end // parts.alignment()) * parts.alignment()
    nbytes = start - end + parts.data_nbytes() - bool(control & _CUT)
    if not 0 < nbytes <= LARGEST_FILE:
        return content[:-1]
    return content[:end] + _data(control % _DATA_KINDS)[:nbytes].tobytes()


@cache
def _data(kind: int) -> np.ndarray:
    """Zeros, NaNs, anything, or small numbers in any of the formats of floats."""
    if kind < 2:
        return np.full(LARGEST_FILE, -kind & 0xFF, np.uint8)
    if kind == 2:
        return np.random.default_rng(0).integers(0, 256, LARGEST_FILE, np.uint8)
    return np.tile(np.float32([0.01, -0.02, 0.03, 0.04]), LARGEST_FILE // 16).view(np.uint8)


def one_change(content: bytes, longest: int, seed: int) -> bytes:
    """libFuzzer's mutator: mostly one that knows the format."""
    chance = random.Random(seed)
    found = parse(content[:-1]) if content else None
    if found is None or chance.random() < 0.15:
        return bytes(atheris.Mutate(content, longest))
    parts, end = found
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        mutate(parts, chance)
    control = chance.randrange(32) | (_EXPORT if chance.randrange(_EVERY_EXPORT) == 0 else 0)
    changed = parts.packed() + content[end:-1] + bytes([control if chance.random() < 0.5 else content[-1] & ~_EXPORT])
    return changed if len(changed) <= longest else content[:longest]


def one_input(path: Path, content: bytes) -> None:
    """Open, check and, where the input says so, export the file."""
    control = content[-1] if content else 0
    file_bytes = model_file(content)
    path.write_bytes(file_bytes)
    out = path.parent / "out"
    try:
        file = GGUFFile.open(path)
        load_config(file, draft=not control & _PLAIN)
        file.content_key()
        for tensor in file.tensors.values():
            tensor.rows_f32(0, min(1, tensor.num_rows))
        if control & _EXPORT:
            export_model(path, out, draft=not control & _PLAIN, target=TARGETS[bool(control & _TENSORRT)])
            load_manifest(out).verify(out)
    except (ModelFileError, UsageError, ResourceError) as error:
        assert "\n" not in str(error), str(error)
        assert not out.exists(), "left behind"
    shutil.rmtree(out, ignore_errors=True)
    assert os.listdir(path.parent) == [path.name], os.listdir(path.parent)
    assert peak_bytes() < len(file_bytes) + MEMORY_BEYOND_FILE, f"{peak_bytes() >> 20} MiB at the most"


def write_seeds(folder: Path) -> None:
    """Whole models of several kinds in both ways of exporting them, and headers that are refused."""
    inputs: dict[str, tuple[bytes, int]] = {
        name: (content, 0) for name, content in (("bomb", ARRAY_BOMB), ("html", HTML_PAGE), ("lfs", LFS_POINTER))
    }
    for name, spec in SEEDS.items():
        path = build(spec).write(folder / f"{name}.gguf")
        # Zeros are sound values of every type.
        for control in (3, _EXPORT, _EXPORT | _TENSORRT, 3 | _EXPORT, 2 | _EXPORT | _PLAIN, 1):
            inputs[f"{name}.{control}"] = (path.read_bytes(), control)
    for name in HEADERS:
        inputs[name] = (NAMED[name](folder / f"{name}.gguf").read_bytes(), 3)
    for path in folder.iterdir():
        path.unlink()
    for name, (content, control) in inputs.items():
        found = parse(content)
        (folder / name).write_bytes((content if found is None else content[: found[1]]) + bytes([control]))


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, seeds = Path(name) / "work", Path(name) / "seeds"
        folder.mkdir()
        seeds.mkdir()
        given = [each for each in sys.argv[1:] if not each.startswith("-")]
        if len(given) == 1 and Path(given[0]).is_file():
            kept = Path(given[0]).with_suffix(".gguf")
            kept.write_bytes(model_file(Path(given[0]).read_bytes()))
            print(f"the model file is {kept}", file=sys.stderr)
        else:
            write_seeds(seeds)
            sys.argv += [str(seeds)]
        flags = [*FLAGS, *sys.argv[1:]]
        atheris.Setup(
            [sys.argv[0], *flags],
            lambda content: one_input(folder / "fuzzed.gguf", content),
            custom_mutator=one_change,
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()
