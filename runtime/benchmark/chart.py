"""A report as a picture: speed by setting, cost of a pass by its rows, acceptance by position. Needs matplotlib."""

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

    depths = [entry for entry in report["depths"] if not entry["left_out"]]
    figure = Figure(figsize=(15, 4.6), layout="constrained")
    speed, cost, acceptance = figure.subplots(1, 3, width_ratios=(5, 3, 3))
    for index, entry in enumerate(depths):
        label = f"context {entry['depth']}"
        _bars(speed, entry, index, len(depths), label)
        passes = entry["passes"]
        cost.plot([p["rows"] for p in passes], [p["ms"]["median"] for p in passes], marker="o", label=label)
        deepest = max(entry["settings"], key=lambda setting: setting["draft_n"] or 0)
        shares = deepest["acceptance_by_position"]
        acceptance.plot(range(1, len(shares) + 1), shares, marker="o", label=label)
    speed.set(title="tokens a second (median; least and most)", xlabel="drafts a round")
    cost.set(title="ms a verify pass", xlabel="rows", ylim=(0, None))
    acceptance.set(title="share of drafts accepted, by position", xlabel="draft", ylim=(0, 1.02))
    for axes in (speed, cost, acceptance):
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if len(depths) > 1 and axes.has_data():
            axes.legend(frameon=False)
    figure.suptitle(f"{report['model']} on {report['backend']}")
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ResourceError(f"{path}: the chart cannot be written ({error.strerror or error})") from error


def _bars(axes: Any, entry: dict[str, Any], index: int, count: int, label: str) -> None:
    """One depth's bars, beside those of the others."""
    settings = [setting for setting in entry["settings"] if setting["tokens_per_second"]]
    width = 0.8 / count
    places = [i + (index - (count - 1) / 2) * width for i in range(len(settings))]
    speeds = [setting["tokens_per_second"] for setting in settings]
    medians = [speed["median"] for speed in speeds]
    errors = [
        [speed["median"] - speed["least"] for speed in speeds],
        [speed["most"] - speed["median"] for speed in speeds],
    ]
    axes.bar(places, medians, width, yerr=errors, capsize=2, label=label)
    axes.set_xticks(range(len(settings)), [setting["name"] for setting in settings])
