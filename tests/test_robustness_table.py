"""Every test that docs/robustness.md names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_named_tests_exist() -> None:
    rows = [line for line in (ROOT / "docs/robustness.md").read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    for row in rows:
        found = re.search(r"`(tests/\S+\.py)::(test_\w+)` \|$", row)
        assert found, row
        assert f"\ndef {found[2]}(" in (ROOT / found[1]).read_text(), row
