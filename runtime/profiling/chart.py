"""A profile as a picture: time by kind of op, and how near each comes to the memory's speed. Needs matplotlib."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from engines.errors import ResourceError, UsageError


def check_chart_can_be_drawn() -> None:
    """Raise UsageError when matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--chart: matplotlib is not installed; pip install 'nextn-trt[bench]', or leave --chart out")


def draw(report: dict[str, Any], path: Path) -> None:
    """Write a PNG. Raises ResourceError when it cannot be written."""
    from matplotlib.figure import Figure

    passes = report["passes"]
    figure = Figure(figsize=(13, 1.2 + 3.2 * len(passes)), layout="constrained")
    for axes, entry in zip(figure.subplots(len(passes), 2, squeeze=False), passes, strict=True):
        _draw_pass(axes, entry)
    figure.suptitle(f"{report['model']} on {report['gpu']}")
    try:
        figure.savefig(path, format="png", dpi=110)
    except OSError as error:
        raise ResourceError(f"{path}: the chart cannot be written ({error.strerror or error})") from error


def _draw_pass(axes: Any, entry: dict[str, Any]) -> None:
    times, shares = axes
    kinds = entry["kinds"][::-1]
    names = [f"{kind['kind']} ({kind['layers']})" for kind in kinds]
    times.barh(names, [1000 * kind["ms"] for kind in kinds], color="#4c78a8")
    graph = f"; one graph {1000 * entry['graph']['ms']:.0f} us" if entry["graph"] else ""
    sums = f"layers apart {1000 * entry['layers_ms']:.0f} us{graph}"
    times.set(title=f"{entry['role']}, {entry['tokens']} tokens after {entry['position']}: {sums}", xlabel="us")
    shares.barh(names, [100 * (kind["roofline"] or 0) for kind in kinds], color="#54a24b")
    shares.axvline(100, color="#888", linewidth=1)
    shares.set(title="bytes moved, % of the memory's speed", xlim=(0, 110), yticks=[])
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.grid(axis="x", alpha=0.3)
