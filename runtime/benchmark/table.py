"""A report as text for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


def table(report: dict[str, Any]) -> str:
    return "\n".join(_lines(report))


def _lines(report: dict[str, Any]) -> Iterator[str]:
    machine, how = report["machine"], report["how"]
    device = report["gpu"]["name"] if report["gpu"] else f"{machine['cpu']}, {machine['threads']} threads"
    yield f"{report['model']} on {report['backend']}: {device}"
    yield (
        f"{how['prompts']} prompts, up to {how['predict']} tokens each, greedy; medians (least, most) of "
        f"{how['repeats']} repeats after one to warm up"
    )
    if machine["load_average"] is not None and machine["load_average"] > machine["cores"] / 2:
        yield f"other programs were running: load average {machine['load_average']} on {machine['cores']} cores"
    yield f"read bandwidth {_number(report['bandwidth']['gb_per_s'])} GB/s ({report['bandwidth']['source']})"
    yield f"loaded in {report['load_s']:.1f} s" + (f"; memory: {report['memory']['text']}" if report["memory"] else "")
    for entry in report["depths"]:
        yield ""
        yield from _depth(entry)
    if report["device_passes"]:
        yield ""
        yield "on the device alone, at position 0"
        yield from _columns("rows", report["device_passes"], "rows")
        yield from _columns("drafts", report["device_drafts"], "drafts")
    if report["prefill"]:
        yield ""
        yield from _prefill(report["prefill"])
    if report["gpu"]:
        yield ""
        yield _clocks(report["gpu"]["watch"])


def _depth(entry: dict[str, Any]) -> Iterator[str]:
    title = f"context {entry['depth']}"
    if entry["left_out"]:
        yield f"{title}: left out, {entry['left_out']}"
        return
    yield f"{title} (prompts of {', '.join(map(str, entry['prompt_tokens']))} tokens)"
    rows: list[tuple[str, ...]] = [
        ("drafts", "tokens/s", "least", "most", "/ plain", "tokens/round", "accepted", "by position")
    ]
    rows += [_setting(setting) for setting in entry["settings"]]
    yield from _aligned(rows)
    yield from _columns("verify rows", entry["passes"], "rows")
    step = entry["draft_step"]
    if step:
        yield f"  draft step {_number(step['ms']['median'])} ms{_speed(step)}"
    if "state_is_finite" in entry:
        yield f"  all state is {'finite' if entry['state_is_finite'] else 'NOT FINITE'}"


def _setting(entry: dict[str, Any]) -> tuple[str, ...]:
    speed, ratio = entry["tokens_per_second"], entry["over_plain"]
    accepted = "-" if entry["acceptance_rate"] is None else f"{entry['accepted']}/{entry['drafted']}"
    by_place = " ".join(f"{share:.2f}" for share in entry["acceptance_by_position"])
    return (
        entry["name"],
        *(_number(speed and speed[key]) for key in ("median", "least", "most")),
        "-" if ratio is None else f"{ratio['median']:.3f}",
        "-" if entry["tokens_per_round"] is None else f"{entry['tokens_per_round']:.2f}",
        accepted,
        by_place + ("  NOT AS IT SHOULD BE" if entry["failures"] else ""),
    )


def _columns(title: str, entries: Sequence[dict[str, Any]], key: str) -> Iterator[str]:
    """Passes side by side."""
    lines = [(title, [str(entry[key]) for entry in entries])]
    lines.append(("ms", [_number(entry["ms"]["median"]) for entry in entries]))
    if any(entry.get("over_plain") for entry in entries):
        lines.append(("/ plain", [_ratio(entry["over_plain"]) for entry in entries]))
    lines.append(("GB/s", [_number(entry["gb_per_s"]) for entry in entries]))
    if any(entry["of_roofline"] for entry in entries):
        lines.append(("% of roofline", [_percent(entry["of_roofline"]) for entry in entries]))
    yield from _aligned([(name, *values) for name, values in lines])


def _prefill(entries: Sequence[dict[str, Any]]) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [("prompt tokens", "head", "tokens/s", "least", "most")]
    for entry in entries:
        if entry["left_out"]:
            rows.append((str(entry["tokens"]), "left out:", entry["left_out"], "", ""))
            continue
        speed = entry["tokens_per_second"]
        values = [_number(speed[key]) for key in ("median", "least", "most")]
        rows.append((str(entry["tokens"]), "with" if entry["with_head"] else "without", *values))
    yield from _aligned(rows)


def _clocks(watch: dict[str, Any]) -> str:
    if "absent" in watch:
        return f"clocks, temperature and power of the GPU are not known: {watch['absent']}"
    names = {"sm_mhz": "SM MHz", "memory_mhz": "memory MHz", "celsius": "°C", "watts": "W"}
    parts = [f"{names[name]} {v['median']:g} ({v['least']:g}, {v['most']:g})" for name, v in watch.items()]
    return "while it ran: " + ", ".join(parts)


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """All columns to the right but the first, and the last where it is text."""
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(max(map(len, rows)))]
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=False)),
        ]
        if len(row) == len(widths) and rows[0][-1] == "by position":
            cells[-1] = row[-1]
        yield "  " + "  ".join(cells).rstrip()


def _speed(entry: dict[str, Any]) -> str:
    if entry["gb_per_s"] is None:
        return ""
    share = "" if entry["of_roofline"] is None else f", {_percent(entry['of_roofline'])} % of roofline"
    return f", {_number(entry['gb_per_s'])} GB/s{share}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}"
