"""Where passes over a prompt end, on engines whose bits depend on it.

A prompt is cut by its own tokens: prompts that begin alike are cut alike as far as they are alike. A sequence taken up
where one of these passes ended then takes the very passes that it would have taken from the start.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

# A message ends a pass that has so many tokens or more: short passes cost as much as longer ones.
_LEAST_TOKENS = 64


def fixed_pass_ends(tokens: Sequence[int], longest: int, message_ends: Collection[int]) -> list[int]:
    """Ends of passes over ``tokens``, in tokens from the first on, ascending: after the token that ends a message, and
    after ``longest`` tokens. What is left at the end of ``tokens`` is no pass yet."""
    ends: list[int] = []
    began, least = 0, max(1, min(_LEAST_TOKENS, longest // 4))
    for place, token in enumerate(tokens, 1):
        if place - began == longest or (place - began >= least and token in message_ends):
            ends.append(place)
            began = place
    return ends


def last_at_or_before(ends: Sequence[int], places: Collection[int]) -> set[int]:
    """For each of ``places`` the last of ``ends`` that is not beyond it, where there is one."""
    found = (max((end for end in ends if end <= place), default=0) for place in places)
    return {end for end in found if end}
