"""The stop strings of a request."""

from __future__ import annotations

from runtime.server.errors import bad_field
from runtime.server.schema import Common


def stop_strings(body: Common) -> list[str]:
    """Raises ApiError for an empty one, which would end every text before it begins."""
    stops = [body.stop] if isinstance(body.stop, str) else list(body.stop or ())
    if "" in stops:
        raise bad_field("stop", "an empty string cannot end a text")
    return stops
