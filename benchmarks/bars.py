"""What a measured number is held to, for the tables and for --check."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Bar(NamedTuple):
    """`bar` is the least that will do, or with `at_most` the most."""

    what: str
    got: float
    bar: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        """A NaN, from contestants that had no round in common, meets no bar."""
        return self.got <= self.bar if self.at_most else self.got >= self.bar


def table(bars: Iterable[Bar]) -> list[str]:
    return ["## Bars", "", "| ratio | measured | bar | |", "|---|---:|---:|---|"] + [
        f"| {one.what} | {one.got:.3g} | at {'most' if one.at_most else 'least'} {one.bar:.3g} | "
        f"{'ok' if one.met else 'missed'} |"
        for one in bars
    ]


def exit_code(bars: list[Bar]) -> int:
    """What --check ends with. Where nothing was measured nothing was met."""
    return int(not bars or not all(one.met for one in bars))
