"""Bars for measured numbers, for the tables and for --check."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Bar(NamedTuple):
    """`bar` is the least that `got` may be, or with `at_most` the most."""

    what: str
    got: float
    bar: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        """NaN, from contestants without a common round, meets no bar."""
        return self.got <= self.bar if self.at_most else self.got >= self.bar


def table(bars: Iterable[Bar]) -> list[str]:
    return ["## Bars", "", "| ratio | measured | bar | |", "|---|---:|---:|---|"] + [
        f"| {one.what} | {one.got:.3g} | at {'most' if one.at_most else 'least'} {one.bar:.3g} | "
        f"{'ok' if one.met else 'missed'} |"
        for one in bars
    ]


def exit_code(bars: list[Bar]) -> int:
    """Return --check's exit code, 1 if a bar is missed or nothing was measured."""
    return int(not bars or not all(one.met for one in bars))
