"""JSON files with a digest of their own values: a changed digit is another number, and would be taken for it.

Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

SEAL = "seal"


def write_sealed(path: Path, values: dict[str, Any]) -> None:
    """Write ``values`` and their digest, whole or not at all (temporary name, fsync, rename)."""
    temporary = path.with_name(path.name + ".part")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump({**values, SEAL: _digest(values)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def is_sealed(raw: dict[str, Any]) -> bool:
    """Are these the values that were written?"""
    try:
        return raw.get(SEAL) == _digest(raw)
    except RecursionError:
        return False


def _digest(values: dict[str, Any]) -> str:
    text = json.dumps({key: value for key, value in values.items() if key != SEAL}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
