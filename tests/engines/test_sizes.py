"""Sizes as people read them: MB below 1 GB, and two that differ look different."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.memory_plan import DRIVER_BYTES, MemoryPlan
from engines.sizes import size_text


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [(0, "0.0 MB"), (10_000_000, "10.0 MB"), (999_900_000, "999.9 MB"), (10**9, "1.00 GB"), (5_760_000_000, "5.76 GB")],
)
def test_units(nbytes: int, shown: str) -> None:
    assert size_text(nbytes) == size_text(nbytes, nbytes) == shown


@given(st.integers(0, 1 << 50), st.integers(-(10**7), 10**7))
def test_sizes_side_by_side_differ(one: int, more: int) -> None:
    other = max(0, one + more)
    assert (size_text(one, other) == size_text(other, one)) == (one == other)


def test_the_parts_of_a_plan_are_all_of_it() -> None:
    parts = {"weights": 9, "kv_caches": 8, "states": 7, "activations": 6, "buffers": 5, "recorded": 4, "code": 3}
    plan = MemoryPlan(**{name: size * 10**6 for name, size in parts.items()}, kv_cache="f16", context=9)
    shown = [float(each.split()[-2]) for each in str(plan).split("(")[1].rstrip(")").split(", ")]
    assert len(shown) == 8 and abs(sum(shown) - plan.total / 1e6) < 0.1
    assert str(plan).startswith(f"{plan.total / 1e6:.1f} MB") and f"driver {DRIVER_BYTES / 1e6:.1f} MB" in str(plan)
