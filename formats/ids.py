"""Find names that stand for one person or class: 1, 01 and 1.0, or S1 and S01.

A spreadsheet drops the zero of 01, and pandas writes 1.0 where a cell of the column is empty. Two
spellings of one person would stand on both sides of a split.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from engine.contract import LockstepError

NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?")


def id_key(name: str) -> str:
    """Return a text that is equal for names that are equal as numbers."""
    name = name.strip()
    if NUMBER.fullmatch(name):
        return f"{float(name):.12g}"
    return re.sub(r"\d+", lambda digits: digits[0].lstrip("0") or "0", name)


def equal_ids(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return pairs of different names that are equal as numbers."""
    first: dict[str, str] = {}
    found = []
    for name in dict.fromkeys(names):
        known = first.setdefault(id_key(name), name)
        if known != name:
            found.append((known, name))
    return found


class Ids:
    """The names of one kind, such as persons, and the place of each.

    join  whether names that are equal as numbers are one; else such names are refused
    """

    def __init__(self, kind: str, join: bool):
        self.kind, self.join = kind, join
        self._known: dict[str, tuple[str, str]] = {}  # {key: (name, place)}

    def name(self, text: str, where: str) -> str:
        """Return the name, as it was first written. Raises LockstepError for a second spelling."""
        first, place = self._known.setdefault(id_key(text), (text, where))
        if first != text and not self.join:
            what = f"the {self.kind} {text!r} is {first!r} as a number ({place})"
            todo = f"--join-numbers takes both as {first!r}; if they are two, rename one"
            raise LockstepError(what, where, todo)
        return first


def find_equal(text: str, names: Iterable[str]) -> str:
    """Return the name that is equal to a text, or equal as a number; else the text."""
    known = [*names]
    if text in known:
        return text
    return next((name for name in known if id_key(name) == id_key(text)), text)
