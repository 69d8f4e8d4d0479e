"""What passes cost, measured before the first sequence where the backend can."""

from __future__ import annotations

import statistics

from runtime.engine import DraftEngine, PassCosts, TimedDraft, TimedTrunk, TrunkEngine

_REPEATS = 7


def measure_pass_costs(trunk: TrunkEngine, draft: DraftEngine, max_n: int) -> PassCosts | None:
    """Of rounds with 0..max_n drafts, medians; None where passes cannot be timed apart. Ends the engines' sequence."""
    if not (isinstance(trunk, TimedTrunk) and isinstance(draft, TimedDraft)):
        return None
    return PassCosts(
        verify_ms=tuple(statistics.median(trunk.time_verify(n + 1, _REPEATS)) for n in range(max_n + 1)),
        draft_ms=(0.0, *(statistics.median(draft.time_draft(n, _REPEATS)) for n in range(1, max_n + 1))),
    )
