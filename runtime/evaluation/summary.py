"""Runs put together: by category and by length of the prompt, for each temperature and source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from runtime.evaluation.measure import PLAIN, Run

ALL = "all"
CATEGORY, LENGTH = "category", "length"


def summarise(runs: Sequence[Run], edges: Sequence[int]) -> list[dict[str, Any]]:
    """A group per temperature and: all, each category, each length split that has prompts. edges: tokens at which one
    length split ends and the next begins."""
    tokens = prompt_tokens(runs)
    groups = []
    for temperature in dict.fromkeys(run.temperature for run in runs):
        mine = [run for run in runs if run.temperature == temperature]
        groups.append(_group(temperature, ALL, ALL, mine))
        for category in dict.fromkeys(run.category for run in mine):
            groups.append(_group(temperature, CATEGORY, category, [run for run in mine if run.category == category]))
        for name, low, high in length_splits(edges):
            within = [run for run in mine if low <= tokens[run.prompt] < high]
            if within:
                groups.append(_group(temperature, LENGTH, name, within))
    return groups


def prompt_tokens(runs: Iterable[Run]) -> dict[int, int]:
    """By number of the prompt, as the first source counts them: servers may count otherwise, or not at all."""
    tokens: dict[int, int] = {}
    for run in runs:
        if not tokens.get(run.prompt):
            tokens[run.prompt] = run.prompt_tokens
    return tokens


def length_splits(edges: Sequence[int]) -> list[tuple[str, int, float]]:
    """(name, first, last + 1) in tokens."""
    bounds = [0, *edges, float("inf")]
    names = [f"below {edges[0]}"] if edges else ["any length"]
    names += [f"{low} to {high - 1}" for low, high in pairwise(edges)]
    names += [f"{edges[-1]} and more"] if edges else []
    return [(name, int(low), high) for name, (low, high) in zip(names, pairwise(bounds), strict=True)]


def _group(temperature: float, split: str, name: str, runs: Sequence[Run]) -> dict[str, Any]:
    sources = list(dict.fromkeys(run.source for run in runs))
    metrics = {source: _metrics([run for run in runs if run.source == source]) for source in sources}
    plain = metrics.get(PLAIN, {}).get("tokens_per_second")
    for each in metrics.values():
        speed = each["tokens_per_second"]
        each["over_plain"] = _rounded(speed / plain) if plain and speed else None
    return {"temperature": temperature, "split": split, "name": name, "sources": metrics}


def _metrics(runs: Sequence[Run]) -> dict[str, Any]:
    tokens, ms = sum(run.tokens for run in runs), sum(run.ms for run in runs)
    rounds = sum(run.rounds for run in runs)
    tells = all(run.drafted is not None for run in runs)
    drafted, accepted = sum(run.drafted or 0 for run in runs), sum(run.accepted or 0 for run in runs)
    return {
        "prompts": len(runs),
        "tokens": tokens,
        "ms": _rounded(ms),
        "times": "request" if any(run.ms_kind == "request" for run in runs) else "rounds",
        "tokens_per_second": _rounded(1000 * tokens / ms) if ms else None,
        "rounds": rounds,
        "tokens_per_round": _rounded(1 + accepted / rounds) if rounds and tells else None,
        "drafted": drafted if tells else None,
        "accepted": accepted if tells else None,
        "acceptance_rate": _rounded(accepted / drafted) if tells and drafted else None,
        "acceptance_by_position": _shares(runs),
    }


def _shares(runs: Sequence[Run]) -> list[float]:
    """Of the rounds that made a draft at a place, those that accepted it and so all before."""
    deepest = max((len(run.offered) for run in runs), default=0)
    offered = [sum(run.offered[i] for run in runs if i < len(run.offered)) for i in range(deepest)]
    accepted = [sum(run.accepted_at[i] for run in runs if i < len(run.accepted_at)) for i in range(deepest)]
    return [_rounded(a / o) for a, o in zip(accepted, offered, strict=True) if o]


def _rounded(value: float) -> float:
    """To five significant digits."""
    return float(f"{value:.5g}")
