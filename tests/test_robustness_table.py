"""Every test that docs/robustness.md names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_named_tests_exist() -> None:
    rows = [line for line in (ROOT / "docs/robustness.md").read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 40
    for row in rows:
        tests = row.rstrip("| ").rpartition(" | ")[2].split(", ")
        for test in tests:
            found = re.fullmatch(r"`(tests/\S+\.py)::(test_\w+)`", test)
            assert found, (row, test)
            assert f"\ndef {found[2]}(" in (ROOT / found[1]).read_text(), test
