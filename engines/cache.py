"""`python -m engines.cache`: the exports that .gguf files were given on first use; list them, remove some.

They lie in one folder, each named after its model's content, the exporter's own source and the draft head asked for, so
another version of any makes a new one and the old one stays until it is removed here.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from engines.command import Parser, report, run_command, say
from engines.errors import EngineError, NextnError, ResourceError, UsageError
from engines.given_files import home_path
from engines.manifest import load_manifest
from engines.work_folders import leftovers, remove_leftovers

CACHE_VARIABLE = "NEXTN_CACHE"
CACHE_NAME = "nextn-trt"
# Nothing else in the folder is looked at, let alone removed.
_ENTRY = re.compile(r"[0-9a-f]{32,}-[0-9a-f]{12}(-plain|-[0-9a-f]{20})?")
_DAY_SECONDS = 86400.0


def default_cache_dir() -> Path:
    """``$NEXTN_CACHE``, else ``$XDG_CACHE_HOME/nextn-trt``, else ``~/.cache/nextn-trt``."""
    if given := os.environ.get(CACHE_VARIABLE):
        return home_path(Path(given))
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else home_path(Path("~")) / ".cache") / CACHE_NAME


def entry_name(content_key: str, with_draft: bool, draft_head_key: str = "") -> str:
    """Of the folder that holds the export of a model by this version of the exporter.

    draft_head_key: that of `engines.draft_head.DraftHeadOptions`."""
    from export.version import exporter_version

    kind = draft_head_key if with_draft else "plain"
    return "-".join([content_key, exporter_version(), *([kind] if kind else [])])


def mark_used(folder: Path) -> None:
    """Remember that an entry was used now."""
    with contextlib.suppress(OSError):  # of someone else, or on a medium that cannot be written
        os.utime(folder)


@dataclass(frozen=True)
class Entry:
    """One folder of the cache. useless: why this version has no use for it, or "". last_used: seconds since 1970."""

    path: Path
    model: str
    nbytes: int
    last_used: float
    useless: str


def entries(cache: Path) -> list[Entry]:
    """Everything in the cache, last used first; what processes are still making is left out. Raises UsageError."""
    if (cache.exists() and not cache.is_dir()) or (cache.is_symlink() and not cache.exists()):
        raise UsageError(f"{cache}: is no folder")
    if not cache.exists():
        return []
    from export.version import exporter_version

    found = []
    version, left = exporter_version(), set(leftovers(cache, _ENTRY.pattern))
    for path in cache.iterdir():
        model = "?"
        if path in left:
            useless = "left by an export that was ended"
        elif _ENTRY.fullmatch(path.name) and path.is_dir():
            try:
                model = load_manifest(path).model_name
                useless = "" if version in path.name.split("-") else "of another version of the exporter"
            except EngineError:
                useless = "not readable by this version"
        else:
            continue
        nbytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        found.append(Entry(path, model, nbytes, path.stat().st_mtime, useless))
    return sorted(found, key=lambda entry: -entry.last_used)


def to_remove(found: list[Entry], older_than_days: float | None, max_bytes: float | None, now: float) -> list[Entry]:
    """What pruning takes away: what this version cannot use; what was not used for so long; and of the rest the least
    recently used, until no more than ``max_bytes`` are left. found: last used first."""
    gone, kept_bytes = [], 0
    for entry in found:
        old = older_than_days is not None and now - entry.last_used > older_than_days * _DAY_SECONDS
        large = max_bytes is not None and kept_bytes + entry.nbytes > max_bytes
        if entry.useless or old or large:
            gone.append(entry)
        else:
            kept_bytes += entry.nbytes
    return gone


def remove_killed_exports(cache: Path) -> None:
    """Remove what exports left whose process was ended."""
    remove_leftovers(cache, _ENTRY.pattern)


def _remove(gone: list[Entry]) -> None:
    for entry in gone:
        try:
            shutil.rmtree(entry.path)
        except OSError as error:
            raise ResourceError(f"{entry.path}: cannot be removed ({error.strerror or error})") from error
        say(f"removed {_line(entry)}")


def _line(entry: Entry) -> str:
    day = time.strftime("%Y-%m-%d", time.localtime(entry.last_used))
    note = f"  ({entry.useless})" if entry.useless else ""
    return f"{entry.nbytes / 1e9:8.3f} GB  {day}  {entry.model}  {entry.path.name}{note}"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m engines.cache",
        description="Exports of .gguf files, kept for their next use: size, day of last use, model, folder.",
        epilog=f"The cache is where {CACHE_VARIABLE} says, else nextn-trt in $XDG_CACHE_HOME or ~/.cache.",
    )
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="another cache")
    parser.add_argument("--prune", action="store_true", help="remove what this version cannot use")
    parser.add_argument(
        "--older-than", type=float, metavar="DAYS", help="like --prune, and also what was not used for so long"
    )
    parser.add_argument(
        "--max-gb", type=float, metavar="GB", help="like --prune, and also the least recently used beyond this size"
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        given = _parser().parse_args(arguments)
        for flag, value in (("--older-than", given.older_than), ("--max-gb", given.max_gb)):
            if value is not None and not value >= 0:
                raise UsageError(f"{flag} {value}: wanted a number from 0 on")
        cache = given.cache_dir or default_cache_dir()
        found = entries(cache)
        gone: list[Entry] = []
        if given.prune or given.older_than is not None or given.max_gb is not None:
            max_bytes = None if given.max_gb is None else given.max_gb * 1e9
            gone = to_remove(found, given.older_than, max_bytes, time.time())
            _remove(gone)
        left = [entry for entry in found if entry not in gone]
        for entry in left:
            say(_line(entry))
        say(f"{sum(entry.nbytes for entry in left) / 1e9:8.3f} GB in {len(left)} exports in {cache}")
    except NextnError as error:
        return report(error)
    return 0


if __name__ == "__main__":
    run_command(main)
