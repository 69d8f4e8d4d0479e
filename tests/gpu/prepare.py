"""Everything that the GPU tests read, made on a machine without a GPU: `python -m tests.gpu.prepare DIR`.

Per model an exported folder with its engines, and of the trained model the logits that ONNX Runtime gives over the
recorded texts. On a GPU machine with the whole project the tests make it themselves; for one that lacks packages, copy
DIR there and give it to pytest as --prepared (docs/gpu.md).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from engines.engine_manifest import EngineOptions

MODELS = ("trained", "bigram_ring", "draft_perfect", "ring_stop_inside", "heads_256", "heads_9b", "q4_k_m")
MAX_ROWS = 8
CONTEXT = 4096
PREFILL_CHUNK = 256
REFERENCE_NAME = "reference.npz"
# Rows of each recorded text that are compared: a prompt and the begin of its continuation. 24 texts.
TEXT_TOKENS = 88
_LEVELS = 4095


def prepare(folder: Path, plugins: Path | None = None, models: tuple[str, ...] = MODELS) -> Path:
    """Fill ``folder``; what is there and up to date stays."""
    # Not at the top: a machine that only reads what was prepared has no exporter.
    from engines.build import build_engines
    from export.exporter import export_model
    from tests.named_inputs import write_named
    from tests.vocabulary_files import TRAINED_MODEL

    folder.mkdir(parents=True, exist_ok=True)
    options = EngineOptions(MAX_ROWS, CONTEXT, PREFILL_CHUNK, False)
    for name in models:
        model = TRAINED_MODEL if name == "trained" else folder / f"{name}.gguf"
        if not model.exists():
            write_named(name, folder)
        if not (folder / name).exists():
            export_model(model, folder / name, target="tensorrt")
        context = min(CONTEXT, _context_length(folder / name))
        build_engines(
            folder / name, EngineOptions(options.max_rows, context, options.prefill_chunk, False), library=plugins
        )
    if "trained" in models and not (folder / REFERENCE_NAME).exists():
        write_reference(folder)
    return folder


def texts() -> list[list[int]]:
    """Token ids of the recorded texts: prompts that were in no training text, and llama.cpp's continuation."""
    from tests.peer.speculation import recorded

    return [(run.prompt + run.greedy)[:TEXT_TOKENS] for run in recorded()]


def write_reference(folder: Path) -> None:
    """ONNX Runtime's logits over `texts` [24, 88, V], each row as levels between its least and its largest, and each
    row's best token."""
    from tests.exported import export, trunk_rows
    from tests.vocabulary_files import TRAINED_MODEL

    exported = export(TRAINED_MODEL, folder / ".canonical")
    trunk = exported.trunk()
    rows = np.stack([trunk_rows(trunk, text)[0] for text in texts()])
    least, largest = rows.min(axis=-1, keepdims=True), rows.max(axis=-1, keepdims=True)
    levels = np.rint((rows - least) / (largest - least) * _LEVELS).astype(np.uint16)
    np.savez_compressed(folder / REFERENCE_NAME, levels=levels, least=least, largest=largest, best=rows.argmax(axis=-1))


def read_reference(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Logits [24, 88, V] float64, off by up to 4e-3, which costs 3e-6 nats of KL; and best tokens [24, 88]."""
    with np.load(folder / REFERENCE_NAME) as file:
        least, largest = file["least"].astype(np.float64), file["largest"].astype(np.float64)
        return least + file["levels"] * ((largest - least) / _LEVELS), file["best"]


def _context_length(folder: Path) -> int:
    from engines.manifest import load_manifest

    return load_manifest(folder).geometry.context_length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plugins", type=Path, help="the plugin library (default: the one built here)")
    given = parser.parse_args()
    prepare(given.folder, given.plugins)


if __name__ == "__main__":
    main()
