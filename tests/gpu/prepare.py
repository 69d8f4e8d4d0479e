"""Everything that the GPU tests read, made on a machine without a GPU: `python -m tests.gpu.prepare DIR`.

Per model an exported folder with its engines and the logits that ONNX Runtime gives over some text; of the trained
model also llama.cpp's logits over the same text, and what drafting on ONNX Runtime has accepted. On a GPU machine with
the whole project the tests make it themselves; for one that lacks packages, copy DIR there and give it to pytest as
--prepared (docs/gpu.md).
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from engines.draft_head import DraftHeadOptions
from engines.engine_manifest import EngineOptions
from engines.errors import EngineError
from engines.manifest import load_manifest
from tests.peer.speculation import NEW_TOKENS, recorded

if TYPE_CHECKING:
    from tests.exported import Exported

# Engines of single ops instead of whole layers, or with int8 KV caches, of the model that the rest of the name says.
SINGLE_OPS, INT8_CACHES = ".ops", ".int8"
# Whose layers are one kernel each on compute capability 9.0; the others are too narrow for that.
WIDE = "wide"
# The trained one; models of known text; random ones of various head sizes, tensor types and parts.
TRAINED_MODELS = ("trained", f"trained{INT8_CACHES}")
KNOWN_TEXT_MODELS = ("bigram_ring", "draft_perfect", "ring_stop_inside", "stops_at_once")
RANDOM_MODELS = (
    "heads_256",
    f"heads_256{INT8_CACHES}",
    "q4_k_m",
    f"q4_k_m{SINGLE_OPS}",
    f"q4_k_m{SINGLE_OPS}{INT8_CACHES}",
    "mixed_types",
    "split_kinds_in_pair",
    "other_types",
    "tied_no_head_norm",
    "yarn",
    WIDE,
)
# Odd in one way that numbers show.
ODD_MODELS = ("tied", "tied_copied", "norms_all_one", "gdn_no_decay", "gdn_fast_decay")
# The trained one with a smaller LM head for its drafts: a quarter of the rows, in Q4_K.
CUT_HEAD = "trained.cut"
_CUT = DraftHeadOptions(1024, "q4_k")
# A folder that `engines.accuracy` has prepared, of the model that the rest of the name says.
ACCURACY = "q4_k_m.accuracy"
MODELS = (*TRAINED_MODELS, *KNOWN_TEXT_MODELS, *RANDOM_MODELS, *ODD_MODELS)
MAX_ROWS = 8
CONTEXT = 4096
PREFILL_CHUNK = 256
# Rows of each recorded text that are compared: a prompt and the begin of its continuation. 24 texts.
TEXT_TOKENS = 88
# Drafts a round of the recorded acceptance.
DRAFTS = 3
_LEVELS = 4095
_CANONICAL = ".canonical"  # exports for ONNX Runtime
ONNXRUNTIME, LLAMACPP = "onnxruntime", "llamacpp"


def prepare(folder: Path, plugins: Path | None = None) -> Path:
    """Fill ``folder``; what is there and up to date stays."""
    # Not at the top: a machine that only reads what was prepared has no exporter.
    from engines.build import build_engines
    from export.exporter import export_model
    from export.version import exporter_version

    _forget_but_of(exporter_version(), folder)
    for name in (*MODELS, CUT_HEAD):
        model = model_file(folder, name)
        if not _is_current(folder / name):
            export_model(model, folder / name, target="tensorrt", draft_head=_draft_head(name))
        context = min(CONTEXT, load_manifest(folder / name).geometry.context_length)
        lowering = "ops" if SINGLE_OPS in name else "layers"
        kv_cache = "int8" if name.endswith(INT8_CACHES) else "f16"
        options = EngineOptions(MAX_ROWS, context, PREFILL_CHUNK, False, lowering, kv_cache)
        build_engines(folder / name, options, library=plugins)
    for name in (*TRAINED_MODELS, *RANDOM_MODELS, *ODD_MODELS):
        if not _reference(folder, name, ONNXRUNTIME).exists():
            _write_reference(folder, name, ONNXRUNTIME, onnxruntime_rows(folder, name))
    if not _reference(folder, "trained", LLAMACPP).exists():
        _write_reference(folder, "trained", LLAMACPP, llamacpp_rows(folder))
    _prepare_accuracy(folder)
    for name in (*TRAINED_MODELS, CUT_HEAD):
        if not _acceptance(folder, name).exists():
            _acceptance(folder, name).write_text(json.dumps(onnxruntime_acceptance(folder, name)))
    return folder


def _prepare_accuracy(folder: Path) -> None:
    """ONNX Runtime's side of `engines.accuracy`, without the weights that it read."""
    from engines.accuracy import compare
    from engines.accuracy.inputs import DEFAULT_TEXT
    from engines.accuracy.plan import CANONICAL, Plan

    made = folder / ACCURACY
    shutil.rmtree(made, ignore_errors=True)
    compare.prepare(model_file(folder, ACCURACY), made, Plan(12, 3, "ops", "f16"), DEFAULT_TEXT)
    compare.run_reference(made)
    shutil.rmtree(made / CANONICAL)


def _draft_head(name: str) -> DraftHeadOptions:
    return _CUT if name == CUT_HEAD else DraftHeadOptions()


def _forget_but_of(version: str, folder: Path) -> None:
    """Remove exports, and logits and counts got from them, unless that version of the exporter made them."""
    stamp = folder / "exporter"
    if stamp.is_file() and stamp.read_text() == version:
        return
    for name in (*MODELS, CUT_HEAD, ACCURACY, _CANONICAL):
        shutil.rmtree(folder / name, ignore_errors=True)
    for path in (*folder.glob("*.npz"), *folder.glob(f"*.{ONNXRUNTIME}.json")):
        path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    stamp.write_text(version)


def _is_current(folder: Path) -> bool:
    """Whether the folder is a whole export."""
    try:
        load_manifest(folder).verify(folder)
    except EngineError:
        return False
    return True


def model_file(folder: Path, name: str) -> Path:
    """The .gguf of a model, written into ``folder`` unless it is there."""
    from tests.named_inputs import write_named
    from tests.vocabulary_files import TRAINED_MODEL

    name = name.removesuffix(INT8_CACHES).removesuffix(SINGLE_OPS).removesuffix(".accuracy")
    path = TRAINED_MODEL if name in ("trained", CUT_HEAD) else folder / f"{name}.gguf"
    folder.mkdir(parents=True, exist_ok=True)
    return path if path.exists() else write_named(name, folder)


def texts(folder: Path, name: str) -> list[list[int]]:
    """Token ids to compare logits over. The trained model: prompts that were in no training text, with llama.cpp's
    continuation; others: ids drawn evenly."""
    if name in TRAINED_MODELS:
        return [(run.prompt + run.greedy)[:TEXT_TOKENS] for run in recorded()]
    manifest = load_manifest(folder / name)
    n = 400 if name.startswith("gdn_") else min(96, manifest.geometry.context_length)
    return [np.random.default_rng(3).integers(0, manifest.geometry.vocab_size, n).tolist()]


def onnxruntime_rows(folder: Path, name: str) -> np.ndarray:
    """ONNX Runtime's logits over `texts`, [N, T, V] f32."""
    from tests.exported import trunk_rows

    trunk = _canonical(folder, name).trunk()
    return np.stack([trunk_rows(trunk, text)[0] for text in texts(folder, name)])


def _canonical(folder: Path, name: str) -> Exported:
    """For ONNX Runtime; keys and values rounded to int8 where the engines keep them so."""
    from tests.exported import export
    from tests.rounded_caches import with_rounded_caches

    exported = export(model_file(folder, name), folder / _CANONICAL / name, _draft_head(name))
    if not name.endswith(INT8_CACHES):
        return exported
    rounded = folder / _CANONICAL / f"{name}.rounded"
    shutil.rmtree(rounded, ignore_errors=True)
    return with_rounded_caches(exported, rounded, "int8")


def llamacpp_rows(folder: Path) -> np.ndarray:
    """llama.cpp's logits over the texts of the trained model, [N, T, V] f32. Of its values as float32: for quantised
    weights llama.cpp rounds activations to 8 bits, which alone costs 3e-3 nats of KL here."""
    from tests.dequantized import write_dequantized
    from tests.peer.llamacpp import LlamaCpp

    with tempfile.TemporaryDirectory() as made:
        peer = LlamaCpp(write_dequantized(model_file(folder, "trained"), Path(made) / "f32.gguf"))
        rows = np.stack([peer.trunk_rows(text)[0] for text in texts(folder, "trained")])
        peer.close()
    return rows


def onnxruntime_acceptance(folder: Path, name: str) -> dict[str, int]:
    """Drafts made, and accepted, over the recorded prompts by the product's loop on ONNX Runtime."""
    from tests.exported import generate_tokens

    trunk, draft = _canonical(folder, name).engines()
    stats = [generate_tokens(trunk, draft, one.prompt, NEW_TOKENS, DRAFTS)[2] for one in recorded()]
    return {"drafted": sum(each.draft_n for each in stats), "accepted": sum(each.draft_n_accepted for each in stats)}


def read_acceptance(folder: Path, name: str) -> float:
    """Accepted / drafted of `onnxruntime_acceptance`."""
    counts = json.loads(_acceptance(folder, name).read_text())
    return float(counts["accepted"] / counts["drafted"])


def _write_reference(folder: Path, name: str, program: str, rows: np.ndarray) -> None:
    """Logits [N, T, V], each row as levels between its least and its largest, and each row's best token."""
    least, largest = rows.min(axis=-1, keepdims=True), rows.max(axis=-1, keepdims=True)
    levels = np.rint((rows - least) / (largest - least) * _LEVELS).astype(np.int16) - _known(folder, name, program)
    path = _reference(folder, name, program)
    np.savez_compressed(path, levels=levels, least=least, largest=largest, best=rows.argmax(axis=-1))


def _known(folder: Path, name: str, program: str) -> np.ndarray | np.int16:
    """What stored levels are counted from. ONNX Runtime's, for another program, or the model's with its caches exact:
    almost the same, so that next to nothing is left to store."""
    exact = name.removesuffix(INT8_CACHES)
    if (name, program) == (exact, ONNXRUNTIME):
        return np.int16(0)
    with np.load(_reference(folder, exact, ONNXRUNTIME)) as file:
        return file["levels"]


def read_reference(folder: Path, name: str, program: str) -> tuple[np.ndarray, np.ndarray]:
    """Logits [N, T, V] float64, off by half a level of 1/4095 of their range, which costs 3e-6 nats of KL; and best
    tokens [N, T]."""
    with np.load(_reference(folder, name, program)) as file:
        least, largest = file["least"].astype(np.float64), file["largest"].astype(np.float64)
        levels = file["levels"] + _known(folder, name, program)
        return least + levels * ((largest - least) / _LEVELS), file["best"]


def _reference(folder: Path, name: str, program: str) -> Path:
    return folder / f"{name}.{program}.npz"


def _acceptance(folder: Path, name: str) -> Path:
    return folder / f"{name}.{ONNXRUNTIME}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plugins", type=Path, help="the plugin library (default: the one built here)")
    given = parser.parse_args()
    prepare(given.folder, given.plugins)


if __name__ == "__main__":
    main()
