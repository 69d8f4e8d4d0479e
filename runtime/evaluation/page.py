"""A report as one HTML page: tables and charts, nothing loaded from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from runtime.evaluation.measure import DRAFTING
from runtime.evaluation.table import HEADINGS, notes, rows_of, title

_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#9d755d")
_BAR, _GAP, _HEIGHT, _LEFT, _TOP = 14, 14, 150, 44, 10
_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 76em; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 1em 0; } th, td { padding: .2em .8em; border-bottom: 1px solid #ddd; }
th { text-align: left; } td.n { text-align: right; font-variant-numeric: tabular-nums; }
svg { overflow: visible; } svg text { font-size: 11px; fill: #222; } .key { margin-right: 1.2em; }
.charts { display: flex; flex-wrap: wrap; gap: 0 2em; } .wide { overflow-x: auto; }
.failed { color: #b00020; font-weight: bold; }
"""

Bars = Sequence[tuple[str, Sequence[float | None]]]


def page(report: dict[str, Any]) -> str:
    return "\n".join(_lines(report)) + "\n"


def _lines(report: dict[str, Any]) -> Iterator[str]:
    how = report["how"]
    yield '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
    yield f"<title>{escape(title(report))}</title><style>{_STYLE}</style></head><body>"
    yield f"<h1>{escape(title(report))}</h1>"
    yield f"<p>{how['prompts']} prompts, up to {how['predict']} tokens each, {how['draft_n']} drafts a round.</p>"
    yield from (f'<p class="failed">{escape(line)}</p>' for line in report["failures"])
    for temperature in how["temperatures"]:
        yield f"<h2>{f'Temperature {temperature:g}' if temperature else 'Greedy'}</h2>"
        yield '<div class="charts">'
        yield from _charts(report, temperature)
        yield "</div>"
        yield from _table(rows_of(report, temperature))
    yield from (f"<p>{escape(line)}</p>" for line in notes(report))
    yield "</body></html>"


def _charts(report: dict[str, Any], temperature: float) -> Iterator[str]:
    groups = [group for group in report["groups"] if group["temperature"] == temperature]
    sources = list(dict.fromkeys(source for group in groups for source in group["sources"]))
    for what, key in (
        ("Tokens a second", "tokens_per_second"),
        ("Speed over plain decoding", "over_plain"),
        ("Tokens a round", "tokens_per_round"),
    ):
        values = [(g["name"], [g["sources"].get(source, {}).get(key) for source in sources]) for g in groups]
        yield from _bars(what, sources, values)
    if any(DRAFTING in group["sources"] for group in groups):
        shares = [(g["name"], g["sources"].get(DRAFTING, {}).get("acceptance_by_position", [])) for g in groups]
        deepest = max(len(each) for _, each in shares)
        padded = [(name, [*each, *[None] * (deepest - len(each))]) for name, each in shares]
        yield from _bars("Drafts accepted, by place", [f"draft {i + 1}" for i in range(deepest)], padded, most=1.0)


def _bars(heading: str, series: Sequence[str], groups: Bars, most: float = 0.0) -> Iterator[str]:
    """Bars side by side for every group; a missing value leaves a gap. most: where the axis ends; 0: as values need."""
    known = [value for _, values in groups for value in values if value is not None]
    if not known:
        return
    most = most or _round_number(max(known))
    span = _BAR * len(series) + _GAP
    width = _LEFT + span * len(groups)
    yield (
        f'<div class="wide"><h3>{escape(heading)}</h3><p>'
        + "".join(_key(name, i) for i, name in enumerate(series))
        + "</p>"
    )
    yield f'<svg role="img" aria-label="{escape(heading)}" width="{width}" height="{_HEIGHT + 70}">'
    for part in (0.0, 0.5, 1.0):
        y = _TOP + _HEIGHT * (1 - part)
        yield f'<line x1="{_LEFT}" x2="{width}" y1="{y:g}" y2="{y:g}" stroke="#ddd"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4:g}" text-anchor="end">{most * part:.3g}</text>'
    for index, (name, values) in enumerate(groups):
        left = _LEFT + _GAP / 2 + index * span
        for place, value in enumerate(values):
            if value is None:
                continue
            height = _HEIGHT * value / most
            yield (
                f'<rect x="{left + place * _BAR:g}" y="{_TOP + _HEIGHT - height:.1f}" width="{_BAR - 2}" '
                f'height="{height:.1f}" fill="{_colour(place)}"><title>{escape(name)}, {escape(series[place])}: '
                f"{value:.4g}</title></rect>"
            )
        x, y = left + len(series) * _BAR / 2, _TOP + _HEIGHT + 14
        yield f'<text x="{x:g}" y="{y}" text-anchor="end" transform="rotate(-35 {x:g} {y})">{escape(name)}</text>'
    yield "</svg></div>"


def _round_number(least: float) -> float:
    """The next of 1, 1.5, 2, 3, 4, 5, 6, 8 times a power of ten."""
    if least <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(least))
    return next(step * unit for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10, 15) if step * unit >= least)


def _key(name: str, index: int) -> str:
    mark = f'<svg width="10" height="10"><rect width="10" height="10" fill="{_colour(index)}"/></svg>'
    return f'<span class="key">{mark} {escape(name)}</span>'


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    yield '<div class="wide"><table><tr>' + "".join(f"<th>{escape(heading)}</th>" for heading in HEADINGS) + "</tr>"
    for row in rows:
        cells = [f"<td{' class=n' if 2 <= i < len(row) - 1 else ''}>{escape(cell)}</td>" for i, cell in enumerate(row)]
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</table></div>"
