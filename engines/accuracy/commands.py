"""The same comparison as commands of Polygraphy's own; what it must be told of TensorRT-RTX, and of a missing GPU."""

from __future__ import annotations

import importlib.util
import os
import shlex
from pathlib import Path

from engines.accuracy.graphs import engine_graph
from engines.accuracy.plan import CANONICAL, Plan, roles_of
from engines.manifest import Manifest

_RTX = "POLYGRAPHY_USE_TENSORRT_RTX"


def use_rtx_switch() -> None:
    """Let Polygraphy take TensorRT-RTX, as `plugins.load` does where it is installed. Before Polygraphy is imported."""
    if importlib.util.find_spec("tensorrt_rtx") is not None:
        os.environ.setdefault(_RTX, "1")


def gpu_missing() -> str:
    """Why TensorRT cannot run here; "" when it can."""
    if not any(importlib.util.find_spec(name) for name in ("tensorrt_rtx", "tensorrt")):
        return "no TensorRT package"
    from polygraphy import cuda
    from polygraphy.exception import PolygraphyException
    from polygraphy.logger import G_LOGGER

    try:
        with G_LOGGER.verbosity(G_LOGGER.CRITICAL + 1):
            cuda.Stream().free()
    except (PolygraphyException, OSError):
        return "no NVIDIA GPU"
    return ""


def commands(folder: Path, plan: Plan, manifest: Manifest) -> list[str]:
    """Per role: ONNX Runtime's outputs, then TensorRT's beside them."""
    from engines.accuracy.compare import REFERENCE, limits
    from engines.accuracy.scripts import profile_shapes

    lines = []
    for role in roles_of(manifest):
        script, outputs = str(folder / f"{role}.py"), str(folder / f"{role}.{REFERENCE}.json")
        common = ["--data-loader-script", script]
        marked = str(folder / CANONICAL / f"{role}.marked.onnx")
        lines.append(_line(["polygraphy", "run", marked, "--onnxrt", *common, "--save-outputs", outputs]))
        shapes = profile_shapes(engine_graph(folder, role, plan, manifest), limits(plan))
        words = ["polygraphy", "run", script, "--model-type", "trt-network-script", "--trt"]
        words += ["--preview-features", "ALIASED_PLUGIN_IO_10_03"]
        for flag, which in (("min", 0), ("opt", 1), ("max", 1)):
            sizes = [f"{name}:[{','.join(map(str, shape[which]))}]" for name, shape in shapes.items()]
            words += [f"--trt-{flag}-shapes", *sizes]
        line = _line([*words, *common, "--load-outputs", outputs, "--compare-func-script", script])
        lines.append(f"{_RTX}=1 {line}" if os.environ.get(_RTX, "0") != "0" else line)
    return lines


def _line(words: list[str]) -> str:
    return shlex.join(words)
