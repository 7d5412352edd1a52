"""Choose one of several raters of a video or a recording: two are never merged."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from engine.contract import LockstepError
from formats.lab.events.columns import Purpose


def is_called(name: str, pattern: str) -> bool:
    """Return whether a name is the pattern, or fits the pattern with * and ?."""
    return name == pattern or fnmatch.fnmatchcase(name, pattern)


def some_of(names: Sequence[str], most: int = 6) -> str:
    """Return the first names, and the number of the others."""
    text = ", ".join(names[:most])
    if len(names) > most:
        text += f" and {len(names) - most} more"
    return text


def check_chosen(names: Sequence[str], chosen: Sequence[str], purpose: Purpose, where: str) -> None:
    """Raise LockstepError for a chosen name or pattern that is the name of no rater."""
    for pattern in chosen:
        if not any(is_called(name, pattern) for name in names):
            there = some_of(names)
            raise LockstepError(f"no {purpose.rater} {pattern!r}", where, f"there are {there}")


def choose(names: Sequence[str], chosen: Sequence[str]) -> int | None:
    """Return the place of the only rater of a file, or of the only chosen one; else None."""
    if len(names) == 1:
        return 0
    places = [n for n, name in enumerate(names) if any(is_called(name, each) for each in chosen)]
    return places[0] if len(places) == 1 else None


def several_raters(
    file: str, names: Sequence[str], files: Sequence[str], purpose: Purpose, where: str
) -> LockstepError:
    """Return the error of a file with several raters.

    files  the first rater of each such file, for an example
    """
    what = f"{file} has {len(names)} {purpose.rater}s: {some_of(names)}"
    if len(files) > 1:
        what += f" ({len(files)} such {purpose.of}s)"
    example = ",".join(dict.fromkeys(files[:3]))
    todo = f"choose one of each {purpose.of}: {purpose.choose} {example}, or a pattern such as "
    return LockstepError(what, where, f"{todo}'*_anna'")
