"""A report as one HTML page: tables and charts, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from runtime.evaluation.measure import DRAFTING
from runtime.evaluation.table import HEADINGS, rows_of, title

_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#9d755d")
_BAR, _GAP, _HEIGHT, _LEFT, _TOP = 22, 18, 170, 44, 10
_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 72em; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 1em 0; } th, td { padding: .2em .8em; border-bottom: 1px solid #ddd; }
th { text-align: left; } td.n { text-align: right; font-variant-numeric: tabular-nums; }
svg { overflow: visible; max-width: 100%; } svg text { font-size: 11px; fill: #222; } .key { margin-right: 1.2em; }
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
        yield from _charts(report, temperature)
        yield from _table(rows_of(report, temperature))
    yield from (f"<p>Left out: {escape(line)}</p>" for line in report["left_out"])
    yield "</body></html>"


def _charts(report: dict[str, Any], temperature: float) -> Iterator[str]:
    groups = [group for group in report["groups"] if group["temperature"] == temperature]
    sources = list(dict.fromkeys(source for group in groups for source in group["sources"]))
    for what, key in (("Tokens a second", "tokens_per_second"), ("Tokens a round", "tokens_per_round")):
        values = [(g["name"], [g["sources"].get(source, {}).get(key) for source in sources]) for g in groups]
        yield from _bars(what, sources, values)
    if any(DRAFTING in group["sources"] for group in groups):
        shares = [(g["name"], g["sources"].get(DRAFTING, {}).get("acceptance_by_position", [])) for g in groups]
        deepest = max(len(each) for _, each in shares)
        padded = [(name, [*each, *[None] * (deepest - len(each))]) for name, each in shares]
        yield from _bars("Drafts accepted, by place", [f"draft {i + 1}" for i in range(deepest)], padded)


def _bars(heading: str, series: Sequence[str], groups: Bars) -> Iterator[str]:
    """Bars side by side for every group; a missing value leaves a gap."""
    known = [value for _, values in groups for value in values if value is not None]
    if not known:
        return
    most = max(known) or 1.0
    span = _BAR * len(series) + _GAP
    width = _LEFT + span * len(groups)
    yield f"<h3>{escape(heading)}</h3><p>" + "".join(_key(name, i) for i, name in enumerate(series)) + "</p>"
    yield f'<svg role="img" aria-label="{escape(heading)}" width="{width}" height="{_HEIGHT + 60}">'
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
        yield f'<text x="{x:g}" y="{y}" text-anchor="end" transform="rotate(-25 {x:g} {y})">{escape(name)}</text>'
    yield "</svg>"


def _key(name: str, index: int) -> str:
    mark = f'<svg width="10" height="10"><rect width="10" height="10" fill="{_colour(index)}"/></svg>'
    return f'<span class="key">{mark} {escape(name)}</span>'


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    yield "<table><tr>" + "".join(f"<th>{escape(heading)}</th>" for heading in HEADINGS) + "</tr>"
    for row in rows:
        cells = [f"<td{' class=n' if 2 <= i < len(row) - 1 else ''}>{escape(cell)}</td>" for i, cell in enumerate(row)]
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</table>"
