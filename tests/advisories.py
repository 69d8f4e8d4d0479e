"""A copy of the Python Packaging Advisory Database, for machines that reach none: `make audit ADVISORIES=FOLDER`.

FOLDER: a checkout of https://github.com/pypa/advisory-database. Each weakness is a file vulns/PACKAGE/ID.yaml in the
OSV schema (https://ossf.github.io/osv-schema), whose rules for what a version is affected by are followed here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import date
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import yaml
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

_MODIFIED = re.compile(r"^modified: *['\"]?(\d{4}-\d{2}-\d{2})", re.MULTILINE)


def installed() -> dict[str, str]:
    """Version by package, of what this interpreter finds; packages that are worked on in their own folder left out."""
    found = {}
    for each in distributions():
        origin = json.loads(each.read_text("direct_url.json") or "{}")
        if not origin.get("dir_info", {}).get("editable"):
            found[canonicalize_name(each.metadata["Name"])] = each.version
    return found


def newest(folder: Path) -> date:
    """When the copy was last added to. Raises FileNotFoundError for a folder that is none."""
    dates = [
        found for path in (folder / "vulns").rglob("*.yaml") for found in _MODIFIED.findall(path.read_text("utf-8"))
    ]
    if not dates:
        raise FileNotFoundError(f"{folder}: no vulns/PACKAGE/ID.yaml; give a checkout of pypa/advisory-database")
    return date.fromisoformat(max(dates))


def weaknesses(folder: Path, packages: dict[str, str]) -> dict[str, list[str]]:
    """By package and version, what is known of it."""
    found: dict[str, list[str]] = {}
    for name, version in packages.items():
        known = found.setdefault(f"{name} {version}", [])
        for path in sorted((folder / "vulns" / name).glob("*.yaml")):
            entry = yaml.safe_load(path.read_text("utf-8"))
            if "withdrawn" not in entry and any(_affects(each, Version(version)) for each in _of(entry, name)):
                known.append(", ".join([entry["id"], *entry.get("aliases", [])]))
    return found


def _of(entry: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    for affected in entry["affected"]:
        package = affected["package"]
        if package["ecosystem"] == "PyPI" and canonicalize_name(package["name"]) == name:
            yield affected


def _affects(affected: dict[str, Any], version: Version) -> bool:
    if any(_version(each) == version for each in affected.get("versions", [])):
        return True
    ranges = [each["events"] for each in affected.get("ranges", []) if each["type"] == "ECOSYSTEM"]
    return any(_is_within(events, version) for events in ranges)


def _is_within(events: list[dict[str, str]], version: Version) -> bool:
    """Whether what was introduced before has not been mended since."""
    within = False
    for kind, value in sorted((each for event in events for each in event.items()), key=lambda each: _key(each[1])):
        if kind == "introduced" and version >= _key(value):
            within = True
        elif (kind in ("fixed", "limit") and version >= _key(value)) or (
            kind == "last_affected" and version > _key(value)
        ):
            within = False
    return within


def _key(value: str) -> Version:
    return Version("0.dev0") if value == "0" else _version(value) or Version("0.dev0")


def _version(text: str) -> Version | None:
    """None for one that is no version of Python's, as very old ones are."""
    try:
        return Version(str(text))
    except InvalidVersion:
        return None
