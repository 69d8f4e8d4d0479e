"""`make audit` says "no weakness" only of what was looked up."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import audit

CLEAN: dict[str, Any] = {"name": "a", "version": "1", "vulns": []}
WEAK: dict[str, Any] = {"name": "b", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["3"]}]}
UNKNOWN: dict[str, Any] = {"name": "c", "skip_reason": "Dependency not found"}
NO_ANSWER = None


@pytest.mark.parametrize(
    ("answers", "code", "says"),
    [
        ({"pypi": [CLEAN]}, 0, "1 packages looked up in pypi: no known weakness"),
        ({"pypi": [CLEAN, WEAK]}, 1, "b 2: CVE-1, mended in 3"),
        ({"pypi": [CLEAN, UNKNOWN], "osv": [CLEAN, CLEAN | {"name": "c"}]}, 0, "2 packages looked up in osv"),
        ({"pypi": NO_ANSWER, "osv": [CLEAN]}, 0, "looked up in osv"),
        ({"pypi": [UNKNOWN, WEAK]}, 1, "CVE-1"),
        (
            {"pypi": [CLEAN, UNKNOWN], "osv": NO_ANSWER},
            2,
            "not audited, .* pypi: it does not know 1 of 2 .* osv: it cannot",
        ),
        ({"pypi": [], "osv": []}, 2, "asked about no package"),
    ],
)
def test_outcomes(
    answers: dict[str, list[dict[str, Any]] | None],
    code: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        listed = answers[command[-1]]
        out = "" if listed is None else json.dumps({"dependencies": listed, "fixes": []})
        return subprocess.CompletedProcess(command, 1, out, "Traceback\nConnectionError: no route")

    monkeypatch.setattr(audit.subprocess, "run", run)
    assert audit.main() == code
    said = capsys.readouterr()
    assert re.search(says, said.out + said.err), said


def test_make_runs_it() -> None:
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    assert "$(BIN)/python -m tests.audit\n" in makefile
