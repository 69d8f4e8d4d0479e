"""A report as text for people, and its runs as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any

from runtime.evaluation.measure import Run

HEADINGS = ("", "source", "prompts", "tokens", "tokens/s", "/ plain", "tokens/round", "accepted", "by position")
_CSV_FIELDS = (
    "source",
    "temperature",
    "prompt",
    "category",
    "prompt_tokens",
    "tokens",
    "ms",
    "ms_kind",
    "rounds",
    "drafted",
    "accepted",
    "acceptance_by_position",
    "finish_reason",
)


def table(report: dict[str, Any]) -> str:
    return "\n".join(_lines(report))


def title(report: dict[str, Any]) -> str:
    parts = [report["model"] and f"{report['model']} on {report['backend']}"]
    parts += [f"{server['model']} at {server['url']}" for server in report["servers"]]
    return ", ".join(part for part in parts if part)


def rows_of(report: dict[str, Any], temperature: float) -> list[tuple[str, ...]]:
    """Cells of a table, by HEADINGS; the first cell is empty where a group goes on."""
    rows = []
    for group in report["groups"]:
        if group["temperature"] == temperature:
            for index, (source, metrics) in enumerate(group["sources"].items()):
                rows.append(("" if index else group["name"], source, *_cells(metrics)))
    return rows


def as_csv(runs: Sequence[Run]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_CSV_FIELDS)
    for run in runs:
        shares = [f"{a / o:.4f}" for a, o in zip(run.accepted_at, run.offered, strict=True) if o]
        values = {**vars(run), "ms": round(run.ms, 3), "acceptance_by_position": " ".join(shares)}
        writer.writerow(["" if values[name] is None else values[name] for name in _CSV_FIELDS])
    return out.getvalue()


def _lines(report: dict[str, Any]) -> Iterator[str]:
    how = report["how"]
    yield title(report)
    yield f"{how['prompts']} prompts, up to {how['predict']} tokens each, {how['draft_n']} drafts a round"
    for temperature in how["temperatures"]:
        yield ""
        yield f"temperature {temperature:g}" if temperature else "greedy"
        yield from _aligned([HEADINGS, *rows_of(report, temperature)])
    yield from notes(report)


def notes(report: dict[str, Any]) -> Iterator[str]:
    """What the figures are to be read with."""
    if any(m["times"] == "request" for group in report["groups"] for m in group["sources"].values()):
        yield "a server that sends no timings is timed by whole requests, the reading of prompts included"
    yield from (f"left out: {line}" for line in report["left_out"])


def _cells(metrics: dict[str, Any]) -> tuple[str, ...]:
    tells = metrics["drafted"]
    return (
        str(metrics["prompts"]),
        str(metrics["tokens"]),
        _number(metrics["tokens_per_second"], 1),
        _number(metrics["over_plain"], 2),
        _number(metrics["tokens_per_round"], 2),
        f"{metrics['accepted']}/{tells}" if tells else "-",
        " ".join(f"{share:.2f}" for share in metrics["acceptance_by_position"]),
    )


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if 2 <= i < len(row) - 1 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield ("  " + "  ".join(cells)).rstrip()
