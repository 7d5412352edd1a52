"""Read the JSON files of a run. A file that is missing or has the wrong type is empty."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def as_dict(value: Any) -> dict[str, Any]:
    """Return a value that is a dict; empty for all other types."""
    if isinstance(value, dict):
        return value
    return {}


def read_json(path: Path) -> dict[str, Any]:
    """Return the dict of a JSON file; empty if the file cannot be read."""
    try:
        return as_dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError):
        return {}
