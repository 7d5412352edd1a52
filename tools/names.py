"""Shorten a list of names for a message."""

from __future__ import annotations

from collections.abc import Sequence


def some_names(names: Sequence[str], most: int) -> str:
    """Return at most `most` names, with `...` for the rest."""
    text = ", ".join(names[:most])
    if len(names) > most:
        text += ", ..."
    return text
