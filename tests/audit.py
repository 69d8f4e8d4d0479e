"""`make audit`: the installed dependencies in public databases of known weaknesses, or in a copy of one (ADVISORIES).

Exit codes: 0 all were looked up and none has one; 1 some have; 2 no database knows them all, so nothing is said, or the
copy is too old to say it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

from tests import advisories

MOST_DAYS = 30  # that a copy may be behind
SERVICES = ("pypi", "osv")  # of pip-audit; what the one does not know, or where it is not reached, the other is asked


def look_up(service: str) -> tuple[dict[str, list[str]], str]:
    """(weaknesses by package, why this is not an answer for all packages or "")."""
    command = [sys.executable, "-m", "pip_audit", "--local", "--skip-editable", "--progress-spinner", "off"]
    done = subprocess.run([*command, "-f", "json", "-s", service], capture_output=True, text=True)
    try:
        listed: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return {}, f"it cannot be reached ({last[:300]})"
    found = {
        f"{each['name']} {each['version']}": list(map(_shown, each["vulns"])) for each in listed if "vulns" in each
    }
    skipped = [each["name"] for each in listed if "vulns" not in each]
    if not skipped:
        return found, ""
    return found, f"it does not know {len(skipped)} of {len(listed)} packages ({', '.join(skipped[:5])})"


def _shown(weakness: dict[str, Any]) -> str:
    return f"{weakness['id']}, mended in {', '.join(weakness['fix_versions']) or 'no version yet'}"


def look_up_in_copy(folder: Path, today: date) -> int:
    """Exit code of the copy's answer."""
    newest = advisories.newest(folder)
    found = advisories.weaknesses(folder, advisories.installed())
    if _says_weak(found):
        return 1
    age = (today - newest).days
    print(f"{len(found)} packages looked up in {folder}: no weakness known by {newest}")
    if age <= MOST_DAYS:
        return 0
    print(
        f"not audited: what became known in the {age} days since then is not in it; bring a newer copy", file=sys.stderr
    )
    return 2


def _says_weak(found: dict[str, list[str]]) -> bool:
    for name, weaknesses in found.items():
        if weaknesses:
            print(f"{name}: {'; '.join(weaknesses)}")
    return any(found.values())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.audit", description=__doc__)
    parser.add_argument("--advisories", type=Path, metavar="FOLDER", help="checkout of pypa/advisory-database")
    given = parser.parse_args(arguments)
    if given.advisories is None:
        return look_up_in_services()
    try:
        return look_up_in_copy(given.advisories, date.today())
    except OSError as error:
        print(f"not audited: {error}", file=sys.stderr)
        return 2


def look_up_in_services() -> int:
    """Exit code of the first answer for all packages."""
    refusals = []
    for service in SERVICES:
        found, refusal = look_up(service)
        if _says_weak(found):
            return 1
        if found and not refusal:
            print(f"{len(found)} packages looked up in {service}: no known weakness")
            return 0
        refusals.append(f"{service}: {refusal or 'it was asked about no package'}")
    print(f"not audited, run it where a database can be reached: {'; '.join(refusals)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
