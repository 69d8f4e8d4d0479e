"""`python -m engines.trtexec DIR`: command lines that time built engines with the SDK's own tool.

For owners of the SDK: `trtexec` (TensorRT) or `tensorrt_rtx` (TensorRT-RTX). The engines must have their weights inside
(`python -m engines.build ... --embed-weights`): as inputs, the tool would fill them with random bytes, which as scales
are NaN. Token, position, slot and row numbers are written to files, as random ones would point anywhere.
`python -m runtime.profile DIR --trtexec FILE` reads what the tool exports.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np

from engines.command import Parser, report, run_command, say
from engines.engine_manifest import Engine, EngineManifest, Profile, load_engine_manifest
from engines.errors import EngineError, NextnError, ResourceError, UsageError
from plugins.load import find_library

# Of a decode pass: plain, and one of a verify pass.
_DECODE_TOKENS = (1, 4)
_TOOLS = {"tensorrt": "trtexec", "tensorrt_rtx": "tensorrt_rtx"}


def commands(folder: Path, position: int, library: Path | None = None) -> list[str]:
    """A command per engine, profile and size of pass, input files written beside the engines.

    Raises EngineError (no engines, or with weights as inputs), UsageError, ResourceError."""
    manifest = load_engine_manifest(folder)
    if not manifest.options.embed_weights:
        raise EngineError(
            f"{folder}: its engines take the weights as inputs, which the tool would fill with random bytes; "
            "build others with `python -m engines.build MODEL.gguf -o OTHER --embed-weights`"
        )
    if manifest.tensorrt not in _TOOLS:
        raise EngineError(
            f"{folder}: built by {manifest.tensorrt!r}, wanted {' or '.join(_TOOLS)}; run `python -m engines.build` "
            "again"
        )
    library = find_library(library)
    if not 0 <= position < manifest.options.context:
        raise UsageError(f"--position {position}: wanted 0 to {manifest.options.context - 1}")
    lines = []
    for role, engine in manifest.engines.items():
        for index, profile in enumerate(engine.profiles):
            for tokens in _sizes(profile):
                rows = min(tokens, profile.max_rows) if profile.name == "decode" else 1
                first = min(position, manifest.options.context - tokens)
                lines.append(_command(folder, manifest, role, engine, index, tokens, rows, first, library))
    return lines


def _sizes(profile: Profile) -> list[int]:
    if profile.name == "decode":
        return [tokens for tokens in _DECODE_TOKENS if tokens <= profile.max_tokens]
    return [profile.max_tokens]


def _command(
    folder: Path,
    manifest: EngineManifest,
    role: str,
    engine: Engine,
    profile: int,
    tokens: int,
    rows: int,
    position: int,
    library: Path,
) -> str:
    name = f"{role}.{engine.profiles[profile].name}.{tokens}"
    sizes = {"T": tokens, "R": rows}
    shapes, inputs = [], []
    numbers = {
        "tokens": np.zeros(tokens, np.int32),
        "rows": np.arange(tokens - rows, tokens, dtype=np.int32),
        "position": np.array([position], np.int32),
        "slot": np.array([0 if position else -1], np.int32),
    }
    for binding in engine.inputs:
        if any(isinstance(size, str) for size in binding.shape):
            dims = "x".join(str(size if isinstance(size, int) else sizes[size]) for size in binding.shape)
            shapes.append(f"{binding.name}:{dims}")
        if binding.name in numbers:
            path = folder / f"{name}.{binding.name}.bin"
            _write(path, numbers[binding.name])
            inputs.append(f"{binding.name}:{path}")
    return shlex.join(
        [
            _TOOLS[manifest.tensorrt],
            f"--loadEngine={folder / engine.file}",
            f"--dynamicPlugins={library}",
            f"--useProfile={profile}",
            f"--shapes={','.join(shapes)}",
            f"--loadInputs={','.join(inputs)}",
            "--useCudaGraph",
            "--noDataTransfers",
            "--separateProfileRun",
            "--dumpProfile",
            "--profilingVerbosity=detailed",
            f"--exportProfile={folder / name}.profile.json",
            f"--exportLayerInfo={folder / name}.layers.json",
        ]
    )


def _write(path: Path, array: np.ndarray) -> None:
    try:
        array.tofile(path)
    except OSError as error:
        raise ResourceError(f"{path}: cannot be written ({error.strerror or error})") from error


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = Parser(
        prog="python -m engines.trtexec", description="Command lines of trtexec or tensorrt_rtx for built engines."
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="engines with their weights inside")
    parser.add_argument("--position", type=int, default=0, metavar="N", help="tokens before the pass (default: 0)")
    parser.add_argument(
        "--plugins", type=Path, metavar="LIB.so", help="the plugin library (default: the one built here)"
    )
    try:
        given = parser.parse_args(arguments)
        say("\n".join(commands(given.folder, given.position, given.plugins)))
    except NextnError as error:
        return report(error)
    return 0


if __name__ == "__main__":
    run_command(main)
