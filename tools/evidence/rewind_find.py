"""Find the step of a log at which the loss or the norm of the gradient jumped.

A value is compared with the values before it. The usual value m is the median of the last NEAR
values. The deviation s is measured on the residuals of the last BEFORE values from a line by Theil
and Sen: 1.4826 times the median size, or the size that 80 % have at most / 1.2816, if larger; and
at least FLOOR * |m|. With n < BEFORE values before, s is sqrt((BEFORE - 2) / (n - 2)) times as
large, because a line fits few values closely. A value above m + LIMIT * s and above RISE * m is a
jump. All values are logarithms, if none is negative: the noise of a loss falls with the loss.
Values below the rounding of the largest value before count as the rounding. The last step of an
epoch may have fewer samples: s and log(RISE) are larger by the square root of the ratio.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

BEFORE = 20
"""The most values before a value with which the value is compared."""

NEAR = 5
"""The values before a value whose median is the usual value: a loss falls."""

LEAST = 4
"""The fewest values before a value."""

LIMIT = 6.0
FLOOR = 0.05
RISE = 1.5
ROUNDING = 1e-6
"""Rounding of float32, relative to the largest value before."""

MAD = 1.4826
"""Deviation of a normal distribution / median of the absolute differences from the median."""

Q80 = 1.2816
"""The size that 80 % of the differences have at most / deviation of a normal distribution."""

NAMES = ("loss", "grad_norm")
WORDS = {"loss": "loss", "grad_norm": "gradient norm"}


def _deviation(values: np.ndarray) -> float:
    """Return the deviation of values (N,) from a line: the slope is the median of the slopes of all
    pairs."""
    one, two = np.triu_indices(len(values), 1)
    slope = np.median((values[two] - values[one]) / (two - one))
    residuals = values - slope * np.arange(len(values))
    sizes = np.abs(residuals - np.median(residuals))
    return max(MAD * float(np.median(sizes)), float(np.quantile(sizes, 0.8)) / Q80)


class Level(NamedTuple):
    """A value of a step beside the usual values before it.

    usual  the median of the values before
    limit  a value above is a jump
    score  the distance from the usual value, in deviations
    """

    name: str
    step: int
    value: float
    usual: float
    limit: float
    score: float

    @property
    def jumped(self) -> bool:
        return self.value > self.limit

    def __str__(self) -> str:
        words = WORDS[self.name.partition("/")[0]]
        turn = self.name.partition("/")[2]
        if turn:
            words += f" of {turn}"
        return f"{words} {self.value:.4g}, usually {self.usual:.4g}"


class Series(NamedTuple):
    """A number of the log over the steps, the finite values only.

    noise  the noise of each value, relative to a value of a whole step; empty: 1 for all
    """

    name: str
    steps: list[int]
    values: list[float]
    noise: Sequence[float] = ()

    def level(self, place: int) -> Level | None:
        """Return the level of the value at a place; None with too few values before."""
        before = np.array(self.values[max(0, place - BEFORE) : place])
        if len(before) < LEAST:
            return None
        value = self.values[place]
        rounding = ROUNDING * max(map(abs, self.values[:place]))
        logarithmic = bool((before >= 0).all()) and value > 0 and rounding > 0
        if logarithmic:
            before = np.log(np.maximum(before, rounding))
            value = math.log(max(value, rounding))
        usual = float(np.median(before[-NEAR:]))
        floor = FLOOR if logarithmic else FLOOR * abs(usual)
        noise = self.noise[place] if self.noise else 1.0
        few = math.sqrt((BEFORE - 2) / (len(before) - 2))
        deviation = max(_deviation(before), floor, 1e-12) * few * noise
        rise = (math.log(RISE) if logarithmic else (RISE - 1) * abs(usual)) * noise
        limit = usual + max(LIMIT * deviation, rise)
        score = (value - usual) / deviation
        if logarithmic:
            usual, limit = math.exp(usual), math.exp(limit)
        return Level(self.name, self.steps[place], self.values[place], usual, limit, score)

    def levels(self) -> list[Level]:
        """Return the levels of all values with enough values before."""
        found = (self.level(place) for place in range(len(self.values)))
        return [level for level in found if level is not None]


def series_of(lines: Iterable[dict[str, Any]]) -> list[Series]:
    """Return the series of loss and gradient norm in lines of a training; with turns, of each
    turn."""
    found: dict[str, Series] = {}
    noises: dict[str, list[float]] = {}
    lines = [*lines]
    for line, noise in zip(lines, noise_of(lines), strict=True):
        turn = _turn_of(line)
        for name, value in line.items():
            kind = name.partition("/")[0]
            is_number = isinstance(value, int | float) and math.isfinite(value)
            if kind not in NAMES or not is_number:
                continue
            if kind == "grad_norm" and turn:  # a norm is of the last step alone
                name = f"{name}/{turn}"
            series = found.setdefault(name, Series(name, [], [], []))
            series.steps.append(int(line["step"]))
            series.values.append(float(value))
            noises.setdefault(name, []).append(noise[kind])
    return [series._replace(noise=noises[name]) for name, series in found.items()]


def noise_of(lines: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Return the noise of loss and gradient norm of each line, by the samples of its steps: 1 for
    whole steps.

    A loss is of all steps since the line before, a gradient norm of the last step. Where steps have
    fewer samples than a whole step, the last step of an epoch lacks them, and an epoch ends with a
    line.
    """
    counts = [(0, 0)]
    for one, two in itertools.pairwise(lines):
        steps, samples = (two.get(name, 0) - one.get(name, 0) for name in ("step", "samples"))
        counts.append((steps, samples) if steps > 0 and samples > 0 else (0, 0))
    whole = max((samples / steps for steps, samples in counts if steps), default=0.0)
    noise = []
    for steps, samples in counts[: len(lines)]:
        of_loss = of_norm = 1.0
        if steps:
            of_loss = math.sqrt(whole * steps / samples)
            of_norm = math.sqrt(whole / max(1.0, whole - (whole * steps - samples)))
        noise.append({"loss": of_loss, "grad_norm": of_norm})
    return noise


def _turn_of(line: dict[str, Any]) -> str:
    """Return the turn of a line that has the loss of one turn alone; else an empty text."""
    turns = [name.partition("/")[2] for name in line if name.startswith("loss/")]
    return turns[0] if len(turns) == 1 else ""


def jumps(series: Sequence[Series], begin: int = 0, end: int = 0) -> list[Level]:
    """Return the jumps after step `begin` up to step `end` (0: the last), the highest first."""
    found = []
    for each in series:
        for level in each.levels():
            if level.jumped and begin < level.step and (not end or level.step <= end):
                found.append(level)
    return sorted(found, key=lambda level: -level.score)


def onset(found: Sequence[Level], every: int = 1) -> int:
    """Return the first step of the jump that contains the highest level.

    Steps of a jump follow each other without a gap of more than two lines.

    found  the highest first
    every  steps between two lines
    """
    steps = {level.step for level in found}
    first = found[0].step
    while earlier := [step for step in steps if first - 2 * every <= step < first]:
        first = min(earlier)
    return first


def at_step(series: Sequence[Series], step: int) -> list[Level]:
    """Return the levels of loss and gradient norm at a step."""
    found = []
    for each in series:
        if step in each.steps:
            level = each.level(each.steps.index(step))
            if level is not None:
                found.append(level)
    return found
