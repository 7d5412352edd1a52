"""Parts of the JSON files of a run. A part of the wrong type is empty."""

from __future__ import annotations

from typing import Any


def as_dict(value: Any) -> dict[str, Any]:
    """Return a value that is a dict; empty for all other types."""
    if isinstance(value, dict):
        return value
    return {}
