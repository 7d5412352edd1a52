"""Bars for measured numbers, for the tables and for --check."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Bar(NamedTuple):
    """`bar` is the least that `got` may be, or with `at_most` the most. `reason` is why nothing was
    measured: `got` is then NaN."""

    what: str
    got: float
    bar: float
    at_most: bool = False
    reason: str = ""

    @property
    def met(self) -> bool:
        """NaN, from contestants without a common round, meets no bar."""
        return self.got <= self.bar if self.at_most else self.got >= self.bar

    @property
    def measured(self) -> str:
        return f"not measured: {self.reason}" if self.reason else f"{self.got:.3g}"

    @property
    def state(self) -> str:
        if self.reason:
            return "open"
        return "ok" if self.met else "missed"


def table(bars: Iterable[Bar]) -> list[str]:
    return ["## Bars", "", "| ratio | measured | bar | |", "|---|---:|---:|---|"] + [
        f"| {one.what} | {one.measured} | at {'most' if one.at_most else 'least'} {one.bar:.3g} | "
        f"{one.state} |"
        for one in bars
    ]


def exit_code(bars: list[Bar]) -> int:
    """Return --check's exit code, 1 if a bar is missed or nothing was measured."""
    return int(not bars or not all(one.met for one in bars))
