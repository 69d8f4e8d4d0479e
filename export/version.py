"""Which exporter this is: what another one made is made anew. Standard library only."""

from __future__ import annotations

import hashlib
from pathlib import Path


def exporter_version() -> str:
    """Digest of the exporter's source."""
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
