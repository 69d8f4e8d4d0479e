"""The witness says what the tests' own reference says, of every kind of model, and knows the usual faults by heart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engines.evidence import HEAD_LOGITS, LOGITS
from engines.witness import GROUPED, LATE, NEIGHBOURS, NEXT_PAIR, REORDERED, SWAPPED, UNSCALED, give_evidence
from tests.named_inputs import NAMED
from tests.oracle.model import Model

Tiny = Callable[[str], Path]
IDS = [5, 9, 3, 7, 11, 20, 1, 2]


@pytest.mark.parametrize("name", ["f32", "heads_256", "heads_odd", "yarn", "mixed_types", "tied_no_head_norm", "tied"])
def test_as_the_reference(tiny: Tiny, name: str) -> None:
    found, model = give_evidence(tiny(name), IDS), Model(tiny(name))
    trunk = model.trunk(IDS)
    head = model.head(IDS, np.vstack([np.zeros_like(trunk.hidden[:1]), trunk.hidden[:-1]]))
    want = {**trunk.state, LOGITS: trunk.logits, HEAD_LOGITS: head.logits}
    assert found.places.keys() == want.keys() and found.tokens == tuple(IDS)
    for place, values in want.items():
        np.testing.assert_allclose(found.places[place], values, rtol=1e-9, atol=1e-11)


def test_without_a_head_and_of_two_files(tiny: Tiny, tmp_path: Path) -> None:
    plain = give_evidence(tiny("nextn_absent"), IDS).places
    assert LOGITS in plain and HEAD_LOGITS not in plain
    split, whole = give_evidence(NAMED["split_first"](tmp_path / "x.gguf"), IDS), give_evidence(tiny("f32"), IDS)
    assert np.array_equal(split.places[LOGITS], whole.places[LOGITS])


def test_faults_are_told_apart(tiny: Tiny) -> None:
    """Every explanation is another than what is right, and than the others of its place."""
    seen: set[str] = set()
    explained = [give_evidence(tiny(name), IDS) for name in ("yarn", "heads_256")]
    for found, place, others in ((each, *item) for each in explained for item in each.explanations.items()):
        values = [found.places[place], *others.values()]
        for i, one in enumerate(values):
            for other in values[:i]:
                assert one.shape == other.shape and not np.allclose(one, other, rtol=1e-3), (place, list(others))
        seen |= others.keys()
    assert seen >= {GROUPED, LATE, NEXT_PAIR, NEIGHBOURS, UNSCALED, SWAPPED}
    assert any(fault.startswith(REORDERED) for fault in seen)
