"""What was measured as one JSON-ready object. All that is printed or drawn is in it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from runtime.benchmark.measure import SettingRuns
from runtime.benchmark.traffic import Traffic
from runtime.controller import Round
from runtime.engine import TrunkEngine

FORMAT = 1


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median, least and most; None of nothing."""
    if not values:
        return None
    return {
        "median": _rounded(statistics.median(values)),
        "least": _rounded(min(values)),
        "most": _rounded(max(values)),
    }


def depth_entry(
    depth: int,
    results: Sequence[SettingRuns],
    prompts: Sequence[Sequence[int]],
    traffic: dict[str, Traffic],
    bandwidth: float | None,
) -> dict[str, Any]:
    """Of one context depth. traffic: by role; bandwidth: GB/s that the device reads, None: not known."""
    n_text = statistics.mean(len(text) for result in results for text in result.texts)
    position = int(statistics.mean(map(len, prompts)) + n_text / 2)
    return {
        "depth": depth,
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "settings": [_setting_entry(result, results[0]) for result in results],
        "passes": _pass_entries(results, traffic["trunk"].nbytes(position), bandwidth),
        "draft_step": _draft_entry(results, traffic, position, bandwidth),
    }


def device_entries(
    times: dict[int, list[float]], key: str, nbytes: int, bandwidth: float | None
) -> list[dict[str, Any]]:
    """Times of the device alone, in ms, by a size called ``key``; each reads ``nbytes`` (per unit of n for drafts).
    Those of passes also over one row's."""
    entries = []
    for size, values in times.items():
        median, read = statistics.median(values), nbytes * (size if key == "drafts" else 1)
        entry = {key: size, "ms": spread(values), **_rates(read, median, bandwidth)}
        if key == "rows":
            entry["over_plain"] = _rounded(median / statistics.median(times[1]))
        entries.append(entry)
    return entries


def _setting_entry(result: SettingRuns, plain: SettingRuns) -> dict[str, Any]:
    rounds = result.rounds
    drafted, accepted = sum(r.draft_n for r in rounds), sum(r.n_accept for r in rounds)
    ratios = [mine / other for mine, other in zip(result.tokens_per_second, plain.tokens_per_second, strict=True)]
    deepest = max((r.draft_n for r in rounds), default=0)
    return {
        "name": result.setting.name,
        "draft_n": result.setting.draft_n,
        "with_head": result.setting.has_head,
        "tokens_per_second": spread(result.tokens_per_second),
        "runs": [_rounded(value) for value in result.tokens_per_second],
        "over_plain": spread(ratios),
        "tokens_per_round": _rounded(sum(r.n_accept + 1 for r in rounds) / len(rounds)) if rounds else None,
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_rate": _rounded(accepted / drafted) if drafted else None,
        "acceptance_by_position": [_share(rounds, place) for place in range(deepest)],
        "draft_n_used": [sum(r.draft_n == n for r in rounds) for n in range(deepest + 1)],
        "failures": result.failures,
    }


def _share(rounds: Sequence[Round], place: int) -> float:
    """Of the drafts made at a place, those accepted."""
    made = [r for r in rounds if r.draft_n > place]
    return _rounded(sum(r.n_accept > place for r in made) / len(made))


def _fixed_rounds(results: Iterable[SettingRuns]) -> list[Round]:
    """Of settings that do not change their depth and keep no rows back for the head."""
    return [r for result in results if result.setting.draft_n or not result.setting.has_head for r in result.rounds]


def _pass_entries(results: Sequence[SettingRuns], nbytes: int, bandwidth: float | None) -> list[dict[str, Any]]:
    rounds = _fixed_rounds(results)
    by_rows = {rows: [r.verify_ms for r in rounds if r.draft_n == rows - 1] for rows in range(1, 66)}
    plain = [r.verify_ms for r in results[0].rounds]
    by_rows[1] = plain
    entries = []
    for rows, values in by_rows.items():
        if not values:
            continue
        median = statistics.median(values)
        ratio = _rounded(median / statistics.median(plain)) if plain and median else None
        entries.append({"rows": rows, "ms": spread(values), "over_plain": ratio, **_rates(nbytes, median, bandwidth)})
    return entries


def _draft_entry(
    results: Sequence[SettingRuns], traffic: dict[str, Traffic], position: int, bandwidth: float | None
) -> dict[str, Any] | None:
    values = [r.draft_ms / r.draft_n for r in _fixed_rounds(results) if r.draft_n]
    if not values or "draft" not in traffic:
        return None
    nbytes = traffic["draft"].nbytes(position)
    return {"ms": spread(values), **_rates(nbytes, statistics.median(values), bandwidth)}


def _rates(nbytes: int, ms: float, bandwidth: float | None) -> dict[str, Any]:
    gb_per_s = nbytes / 1e6 / ms if ms else None
    return {
        "bytes": nbytes,
        "gb_per_s": None if gb_per_s is None else _rounded(gb_per_s),
        "of_roofline": None if gb_per_s is None or not bandwidth else _rounded(gb_per_s / bandwidth),
    }


def _rounded(value: float) -> float:
    """To five significant digits."""
    return float(f"{value:.5g}")


def failures_of(report: dict[str, Any]) -> list[str]:
    """Everything that was not as it should be, a line each."""
    lines = []
    for entry in report["depths"]:
        place = f"context {entry['depth']}"
        for setting in entry.get("settings", []):
            lines += [f"{place}, drafts {setting['name']}: {failure}" for failure in setting["failures"]]
        if not entry.get("state_is_finite", True):
            lines.append(f"{place}: the state holds numbers that are not finite")
    return lines


def state_is_finite(trunk: TrunkEngine) -> bool:
    """Of every array that the trunk's last sequence left; True where the engine does not show them."""
    state = getattr(trunk, "state", None)
    return state is None or all(bool(np.isfinite(array).all()) for array in state().values())
