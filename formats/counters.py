"""Find channels that measure nothing: counters, clocks, constants, and copies of the label.

A counter of samples or a second clock identifies the place in a recording, and a copy of the label
is the label. A network learns from such a channel what no new recording repeats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

SHARE = 0.9
"""Share of the recordings with a change in which a counter rises; fewer count as a doubt."""

DOUBT = 0.5
"""Share of the recordings from which a channel is named as a doubt."""

FEW = 0.02
"""Share of the changes against the direction of a clock that is set from time to time."""

ROUNDS = 0.07
"""Largest share of the falls of a counter that begins again, such as modulo 16."""

STEEP = 0.999
"""Correlation with the row of a clock whose times are rounded or shaken."""

LEAST = 8
"""Fewest samples of a recording that show a constant, or a counter of equal steps."""

LEAST_OF_SIGNAL = 64
"""Fewest samples that show another course: a slow motion may rise for a second."""

SAMPLED, STEPS = 100, 2048
"""Most recordings, and most steps of each, that `warnings_of` reads."""


class Finding(NamedTuple):
    """A channel and the reason; `sure` is False for a doubt."""

    name: str
    reason: str
    sure: bool = True


def course_of(values: np.ndarray) -> str:
    """Return the course of (N,) numbers: rises, falls, constant, free, or "" for too few numbers.

    NaN is left out. A counter that begins again rises. In a short recording only equal steps count.
    """
    known = values[~np.isnan(values)]
    if len(known) < LEAST:
        return ""
    steps = np.diff(known)
    ups, downs = np.count_nonzero(steps > 0), np.count_nonzero(steps < 0)
    if ups + downs == 0:
        return "constant"
    if len(known) < LEAST_OF_SIGNAL:
        equal = np.ptp(steps) <= 1e-6 * np.abs(steps).max()
        return {1: "rises", -1: "falls"}[int(np.sign(steps[0]))] if equal else ""
    if downs <= FEW * ups or _is_steep(known) or _begins_again(known):
        return "rises"
    if ups <= FEW * downs or _is_steep(-known) or _begins_again(-known):
        return "falls"
    return "free"


def _is_steep(values: np.ndarray) -> bool:
    """Return whether the numbers rise in step with the rows."""
    if values[-1] - values[0] < 0.9 * np.ptp(values):  # a tenth of the time of the correlation
        return False
    return bool(np.corrcoef(values, np.arange(len(values)))[0, 1] > STEEP)


def _begins_again(values: np.ndarray) -> bool:
    """Return whether numbers rise evenly and fall to the lowest ones: modulo 256, or 0 to 59."""
    steps = np.diff(values)
    rises, falls = steps[steps > 0], steps[steps < 0]
    if not len(rises) or len(falls) > ROUNDS * (len(rises) + len(falls)):
        return False
    usual = np.median(rises)
    even = ((rises > 0.5 * usual) & (rises < 2 * usual)).mean() >= SHARE
    landings = values[1:][steps < 0] - values.min()
    low = landings <= max(2 * usual, 0.05 * np.ptp(values))
    return bool(even and low.all() and -np.median(falls) > 3 * usual)


class Courses:
    """The courses of the channels, counted over recordings."""

    def __init__(self, channels: int):
        self.kinds = [Counter[str]() for _ in range(channels)]
        self.levels: list[set[float]] = [set() for _ in range(channels)]
        self.within = np.zeros(channels, bool)  # whether a channel changes while the label does not
        self.labelled = False

    def add(self, values: np.ndarray, labels: np.ndarray | None = None) -> None:
        """Count a recording: (N, C) numbers, and (N,) labels where the label changes in it."""
        same = np.ones(max(0, len(values) - 1), bool)
        changes = np.zeros(0, bool) if labels is None else np.diff(labels) != 0
        if 0 < changes.sum() < len(changes) / 2:
            self.labelled = True
            same = ~changes
        for c, column in enumerate(values.T):
            kind = course_of(column)
            self.kinds[c][kind] += 1
            if kind == "constant":
                self.levels[c].add(float(column[~np.isnan(column)][0]))
            with np.errstate(invalid="ignore"):
                self.within[c] |= bool((np.abs(np.diff(column))[same] > 0).any())

    def findings(self, names: Sequence[str]) -> list[Finding]:
        """Return the channels that measure nothing, and doubtful channels."""
        found = []
        for c, name in enumerate(names):
            if reason := self._reason(c):
                found.append(Finding(name, reason))
            elif doubt := self._doubt(c):
                found.append(Finding(name, doubt, False))
        return found

    def _reason(self, c: int) -> str:
        kinds, several = self.kinds[c], sum(self.kinds[c].values()) > 1
        changing = kinds["rises"] + kinds["falls"] + kinds["free"]
        for kind in ("rises", "falls"):
            if kinds[kind] and kinds[kind] >= SHARE * changing:
                return f"only {kind}, as a counter or a clock does"
        if not changing and kinds["constant"]:
            varies = several and len(self.levels[c]) > 1
            return "is constant in each recording" if varies else "never changes"
        if changing and self.labelled and not self.within[c]:
            return "changes only where the label changes"
        return ""

    def _doubt(self, c: int) -> str:
        kinds = self.kinds[c]
        changing = kinds["rises"] + kinds["falls"] + kinds["free"]
        for kind in ("rises", "falls"):
            if kinds[kind] > 1 and kinds[kind] >= DOUBT * changing:
                return f"only {kind} in {kinds[kind]} of {changing} recordings"
        return ""


def warnings_of(
    signal: np.ndarray, lengths: np.ndarray, names: Sequence[str], labels: np.ndarray | None
) -> list[Finding]:
    """Return the channels of stored recordings that measure nothing.

    signal   (sum of lengths, C)
    lengths  (R,) steps of each recording
    names    C names
    labels   (sum of lengths,) labels of the steps, or None
    A constant channel is found if the recordings differ. At most SAMPLED recordings are read.
    """
    ends = np.cumsum(lengths)
    courses = Courses(signal.shape[1])
    for n in range(0, len(lengths), max(1, len(lengths) // SAMPLED)):
        first = int(ends[n] - lengths[n])
        stop = first + min(int(lengths[n]), STEPS)
        part = None if labels is None else labels[first:stop]
        courses.add(np.asarray(signal[first:stop], np.float64), part)
    found = courses.findings(names)
    return [each for each in found if each.sure and each.reason != "never changes"]
