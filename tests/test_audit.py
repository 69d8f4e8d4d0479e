"""`make audit` says "no weakness" only of what was looked up."""

from __future__ import annotations

import json
import re
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from tests import advisories, audit

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
    assert audit.main([]) == code
    said = capsys.readouterr()
    assert re.search(says, said.out + said.err), said


def test_make_runs_it() -> None:
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    assert "$(BIN)/python -m tests.audit $(if $(ADVISORIES),--advisories $(ADVISORIES))\n" in makefile


ENTRY = """id: PYSEC-{number}
aliases: [CVE-{number}]
modified: '{modified}T10:00:00Z'
{more}affected:
- package: {{name: {name}, ecosystem: PyPI}}
  ranges:
  - {{type: GIT, events: [introduced: '0']}}
  - {{type: ECOSYSTEM, events: [{events}]}}
  versions: [{versions}]
"""


@pytest.mark.parametrize(
    ("version", "events", "versions", "weak"),
    [
        ("1.2", "introduced: '0', fixed: '1.3'", "", True),
        ("1.3", "introduced: '0', fixed: '1.3'", "", False),
        ("1.3rc1", "introduced: '0', fixed: '1.3'", "", True),
        ("1.10", "introduced: '1.9', fixed: '1.11'", "", True),
        ("1.8", "introduced: '1.9', fixed: '1.11'", "", False),
        ("2.1", "introduced: '0', fixed: '1.0', introduced: '2.0', fixed: '2.2'", "", True),
        ("1.5", "introduced: '2.0', fixed: '2.2', introduced: '0', fixed: '1.0'", "", False),
        ("1.0", "introduced: '0', last_affected: '1.0'", "", True),
        ("1.0.1", "introduced: '0', last_affected: '1.0'", "", False),
        ("9", "introduced: '9'", "", True),
        ("1.0", "introduced: '2'", "'0.9', '1.0.0', 'not a version'", True),
        ("1.1", "introduced: '2'", "'0.9', '1.0.0'", False),
    ],
)
def test_what_a_copy_says_of_a_version(tmp_path: Path, version: str, events: str, versions: str, weak: bool) -> None:
    events = ", ".join(f"{{{each}}}" for each in events.split(", "))
    write_entry(tmp_path, events=events, versions=versions)
    found = advisories.weaknesses(tmp_path, {"a-b": version, "other": "1"})
    assert found == {f"a-b {version}": ["PYSEC-1, CVE-1"] if weak else [], "other 1": []}


def write_entry(folder: Path, **values: str) -> None:
    known = {
        "number": "1",
        "modified": "2030-05-01",
        "more": "",
        "name": "A_b",
        "versions": "",
        "events": "{introduced: '0'}",
    }
    path = folder / "vulns" / "a-b" / f"PYSEC-{values.get('number', 1)}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(ENTRY.format(**{**known, **values}))


@pytest.mark.parametrize(
    ("packages", "today", "code", "says"),
    [
        ({"c": "1"}, date(2030, 5, 20), 0, "1 packages looked up in .*: no weakness known by 2030-05-01\n$"),
        ({"c": "1"}, date(2030, 7, 1), 2, "not audited: what became known in the 61 days since then"),
        ({"c": "1", "a-b": "3"}, date(2030, 7, 1), 1, "a-b 3: PYSEC-1, CVE-1"),
    ],
)
def test_outcomes_of_a_copy(
    packages: dict[str, str],
    today: date,
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_entry(tmp_path)
    write_entry(tmp_path, number="2", more="withdrawn: '2030-01-01T00:00:00Z'\n", modified="2029-01-01")
    monkeypatch.setattr(advisories, "installed", lambda: packages)
    assert audit.look_up_in_copy(tmp_path, today) == code
    said = capsys.readouterr()
    assert re.search(says, said.out + said.err), said


def test_the_packages_of_this_interpreter() -> None:
    found = advisories.installed()
    assert found["pytest"] == pytest.__version__ and "nextn-trt" not in found


def test_a_folder_that_is_no_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.main(["--advisories", str(tmp_path)]) == 2
    assert "give a checkout of pypa/advisory-database" in capsys.readouterr().err
