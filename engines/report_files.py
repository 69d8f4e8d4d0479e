"""Reports that a command line leaves in files: where they may go, and what they look like."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from engines.errors import ResourceError, UsageError
from engines.given_files import write_text


def check_places(**paths: Path | None) -> None:
    """By flag; before the work whose outcome they are to hold. Raises UsageError, ResourceError."""
    taken: dict[str, str] = {}
    for flag, path in paths.items():
        if path is None:
            continue
        if path.is_dir() or not path.parent.is_dir():
            raise UsageError(f"--{flag} {path}: {'is a folder' if path.is_dir() else 'no such folder'}; name a file")
        real = os.path.realpath(path)
        is_stream = path.exists() and not path.is_file()  # a pipe, a device: written to as it is
        if not os.access(path if is_stream else os.path.dirname(real), os.W_OK):
            raise ResourceError(f"--{flag} {path}: cannot be written there; name a file in a folder that takes one")
        if not is_stream and real in taken:
            raise UsageError(f"--{flag} {path}: is the file of --{taken[real]} too; name another")
        taken[real] = flag


def write_report(path: Path | None, text: str) -> None:
    """Nothing without a path; half a character, of a server's name say, becomes "?". Raises ResourceError."""
    if path is None:
        return
    try:
        write_text(path, text.encode("utf-8", "replace").decode())
    except OSError as error:
        raise ResourceError(f"{path}: the report cannot be written ({error.strerror})") from error


def json_text(value: Any, indent: int | None = None) -> str:
    """As JSON, which has no number for what is not finite: null then."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
