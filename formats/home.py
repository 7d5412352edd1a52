"""Folders below the home folder."""

from __future__ import annotations

import os
from pathlib import Path

from engine.errors import LockstepError


def expand(path: str | Path) -> Path:
    """Return the path with the home folder in place of `~`.

    Raises LockstepError if no home folder is known: a container may run as a user without a name.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        todo = "set HOME, or give a path without ~"
        raise LockstepError("the home folder is not known", str(path), todo) from error


def cache_folder(wanted: str = "") -> Path:
    """Return the folder of Lockstep's caches: `wanted`, else $LOCKSTEP_CACHE, else
    ~/.cache/lockstep. Raises LockstepError as `expand`."""
    return expand(wanted or os.environ.get("LOCKSTEP_CACHE", "~/.cache/lockstep"))
