"""Times of layers as a report: by kind of op, with bytes moved and the share of what the memory's speed allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runtime.profiling.kinds import OTHER, LayerKinds, Pass, node_of


@dataclass(frozen=True)
class GraphTimes:
    """A pass as one recorded graph. ms: median of its replays."""

    ms: float
    kernels: int
    copies: int


def pass_entry(
    role: str,
    work: Pass,
    kinds: LayerKinds,
    layers: Sequence[tuple[str, float]],
    gb_per_s: float,
    graph: GraphTimes | None = None,
) -> dict[str, Any]:
    """layers: (name, milliseconds) in the order of the engine. gb_per_s: of the memory; 0: not known."""
    rows: list[dict[str, Any]] = [
        {"name": node_of(name), "layer": name, "kind": kinds.kind(name), "ms": ms, "bytes": kinds.nbytes(name, work)}
        for name, ms in layers
    ]
    nbytes, layers_ms = sum(row["bytes"] for row in rows), sum(row["ms"] for row in rows)
    entry: dict[str, Any] = {
        "role": role,
        "tokens": work.tokens,
        "position": work.position,
        "layers_ms": layers_ms,
        "bytes": nbytes,
        "least_ms": _least_ms(nbytes, gb_per_s),
        "kinds": _by_kind(rows, layers_ms, gb_per_s),
        "layers": [{**row, "roofline": _share(row["bytes"], row["ms"], gb_per_s)} for row in rows],
        "graph": None,
    }
    if graph is not None:
        entry["graph"] = {
            "ms": graph.ms,
            "launches": graph.kernels,
            "copies": graph.copies,
            # Above 0: idle between kernels; below: they overlap, which layers timed apart cannot.
            "gap_ms": graph.ms - layers_ms,
            "roofline": _share(nbytes, graph.ms, gb_per_s),
        }
    return entry


def _by_kind(rows: list[dict[str, Any]], layers_ms: float, gb_per_s: float) -> list[dict[str, Any]]:
    kinds: dict[str, dict[str, Any]] = {}
    for row in rows:
        entry = kinds.setdefault(row["kind"], {"kind": row["kind"], "layers": 0, "ms": 0.0, "bytes": 0})
        entry["layers"] += 1
        entry["ms"] += row["ms"]
        entry["bytes"] += row["bytes"]
    found = sorted(kinds.values(), key=lambda entry: (entry["kind"] == OTHER, -entry["ms"]))
    return [
        {
            **entry,
            "share": entry["ms"] / layers_ms if layers_ms else 0.0,
            "gb_per_s": entry["bytes"] / 1e6 / entry["ms"] if entry["ms"] else 0.0,
            "roofline": _share(entry["bytes"], entry["ms"], gb_per_s),
        }
        for entry in found
    ]


def _least_ms(nbytes: int, gb_per_s: float) -> float | None:
    return nbytes / 1e6 / gb_per_s if gb_per_s else None


def _share(nbytes: int, ms: float, gb_per_s: float) -> float | None:
    """Of the memory's speed; None for what moves nothing that counts, or a memory whose speed is not known."""
    return nbytes / 1e6 / ms / gb_per_s if nbytes and ms and gb_per_s else None


def table(report: dict[str, Any]) -> str:
    """For people."""
    speed = report["bandwidth"]
    head = f"{report['model']} on {report['gpu']}; memory {speed['gb_per_s']:.0f} GB/s ({speed['source']})"
    lines = [head if speed["gb_per_s"] else f"{report['model']} on {report['gpu']}; memory's speed not known"]
    for entry in report["passes"]:
        lines += ["", f"{entry['role']}, {entry['tokens']} tokens after {entry['position']}: {_sums(entry)}"]
        lines.append(f"  {'':20} {'layers':>6} {'us':>9} {'share':>6} {'MB':>9} {'GB/s':>6} {'roofline':>8}")
        for kind in entry["kinds"]:
            lines.append(
                f"  {kind['kind']:20} {kind['layers']:>6} {1000 * kind['ms']:9.1f} {kind['share']:6.1%}"
                f" {kind['bytes'] / 1e6:9.2f} {kind['gb_per_s']:6.0f} {_percent(kind['roofline']):>8}"
            )
    return "\n".join(lines)


def _sums(entry: dict[str, Any]) -> str:
    parts = [f"layers apart {1000 * entry['layers_ms']:.1f} us"]
    if graph := entry["graph"]:
        parts.append(
            f"one graph {1000 * graph['ms']:.1f} us ({graph['launches']} launches, {graph['copies']} copies, "
            f"{'gaps' if graph['gap_ms'] > 0 else 'overlap'} {1000 * abs(graph['gap_ms']):.1f} us, "
            f"{_percent(graph['roofline'])} of the roofline)"
        )
    if entry["least_ms"] is not None:
        parts.append(f"least {1000 * entry['least_ms']:.1f} us")
    return ", ".join(parts)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
