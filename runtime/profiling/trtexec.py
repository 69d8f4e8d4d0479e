"""What `trtexec` and `tensorrt_rtx` export: --exportProfile (times of layers) and --exportLayerInfo.

A profile is a list: first {"count": runs}, then an object a layer with "name", "averageMs" and, from newer versions,
"medianMs". Layer information is {"Layers": [...]}, each a name or, at detailed verbosity, an object with "Name".
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from engines.errors import UsageError
from engines.given_files import given_text


def read_profile(path: Path) -> list[tuple[str, float]]:
    """(layer, milliseconds a pass) in order. Raises UsageError."""
    entries = _load(path)
    try:
        layers = [entry for entry in entries if "name" in entry]
        times = [(str(layer["name"]), float(layer.get("medianMs", layer["averageMs"]))) for layer in layers]
    except (TypeError, KeyError, ValueError, OverflowError) as error:
        raise UsageError(f"{path}: not what --exportProfile writes ({type(error).__name__}: {error})") from None
    for name, ms in times:
        if not (math.isfinite(ms) and ms >= 0):
            raise UsageError(f"{path}: layer {name!r} takes {ms} ms; not what --exportProfile writes")
    if not times:
        raise UsageError(f"{path}: has no layers; make it with --exportProfile and --separateProfileRun")
    return times


def read_layer_names(path: Path) -> list[str]:
    """Of all layers of an engine, in order. Raises UsageError."""
    raw = _load(path)
    try:
        return [layer if isinstance(layer, str) else str(layer["Name"]) for layer in raw["Layers"]]
    except (TypeError, KeyError) as error:
        raise UsageError(f"{path}: not what --exportLayerInfo writes ({type(error).__name__}: {error})") from None


def check_same_engine(profile: list[tuple[str, float]], names: list[str], path: Path) -> None:
    """Raise UsageError when timed layers are none of the engine's."""
    strange = [name for name, _ in profile if name not in names]
    if strange:
        raise UsageError(f"{path}: lists no layer {strange[0]!r}, which the profile has; they are of two engines")


def _load(path: Path) -> Any:
    try:
        return json.loads(given_text("", path, "give a file of JSON"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read as JSON ({error})") from None
