"""Passes over prompts that begin alike end alike, as far as they are alike."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.prompt_passes import fixed_pass_ends, last_at_or_before

END = 9
TOKENS = st.lists(st.sampled_from([1, 2, END]), max_size=60)


@given(TOKENS, TOKENS, TOKENS, st.integers(1, 20))
def test_what_follows_does_not_matter(shared: list[int], one: list[int], other: list[int], longest: int) -> None:
    cut = [fixed_pass_ends(shared + rest, longest, {END}) for rest in (one, other, [])]
    assert [[end for end in ends if end <= len(shared)] for ends in cut] == [cut[2]] * 3


@given(TOKENS, st.integers(1, 20))
def test_no_pass_is_too_long_or_too_short(tokens: list[int], longest: int) -> None:
    ends = fixed_pass_ends(tokens, longest, {END})
    for begin, end in pairwise([0, *ends]):
        assert end - begin == longest or (tokens[end - 1] == END and longest // 4 <= end - begin < longest)
    assert len(tokens) - max(ends, default=0) < longest


@pytest.mark.parametrize(
    ("marks", "ends"),
    [([], [1024]), ([63], [1024]), ([64], [64, 1088]), ([70, 100, 200], [70, 200]), ([600, 1500], [600, 1500])],
)
def test_messages_end_passes_of_some_length(marks: list[int], ends: list[int]) -> None:
    tokens = [END if place in marks else 1 for place in range(1, 1600)]
    assert fixed_pass_ends(tokens, 1024, {END})[: len(ends)] == ends


def test_the_last_end_before_a_place() -> None:
    assert last_at_or_before([64, 300, 900], [10, 64, 299, 300, 2000]) == {64, 300, 900}
    assert last_at_or_before([], [5]) == set()
