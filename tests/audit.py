"""`make audit`: the installed dependencies in public databases of known weaknesses.

Exit codes: 0 all were looked up and none has one; 1 some have; 2 no database knows them all, so nothing is said.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

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


def main() -> int:
    refusals = []
    for service in SERVICES:
        found, refusal = look_up(service)
        weak = {name: weaknesses for name, weaknesses in found.items() if weaknesses}
        for name, weaknesses in weak.items():
            print(f"{name}: {'; '.join(weaknesses)}")
        if weak:
            return 1
        if found and not refusal:
            print(f"{len(found)} packages looked up in {service}: no known weakness")
            return 0
        refusals.append(f"{service}: {refusal or 'it was asked about no package'}")
    print(f"not audited, run it where a database can be reached: {'; '.join(refusals)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
