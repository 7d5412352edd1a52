"""A sensor's recording as CSV: every cell checked by its line, cut where samples are missing, resampled evenly."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from engine.contract import LockstepError
from formats.arrays import csv_rows, text_lines

MOST = float(np.finfo(np.float32).max)

GAP = 20
"""Usual intervals without a sample that cut a recording; samples at random times stay below it."""

FEW = 3
"""Usual intervals that cut one where they are a quarter of a window; a lost sample or two and jitter stay below it."""

BLOCK = 50
"""Intervals whose median is compared with the usual one: for random times it is never FEW times as long or as short."""


def read(path: Path, time: str, channels: Sequence[str]) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return (N, 1 + C), the time in seconds, which rises, and the channels; (N,) the line of each row; and a sentence
    where many rows of one time were averaged. Raises LockstepError with file and line."""
    header, found = csv_rows(path, text_lines(path))
    if missing := [name for name in (time, *channels) if name not in header]:
        what = f"the header has {', '.join(header) or 'nothing'}"
        raise LockstepError(what, f"{path}:1", f"it needs {', '.join(missing)}, once")
    places, rows, lines = {name: header.index(name) for name in (time, *channels)}, [], []
    for line, row in found:
        if any(cell.strip() for cell in row):
            cells = {name: row[at].strip() if at < len(row) else "" for name, at in places.items()}
            rows.append([_number(name, cell, f"{path}:{line}", name == time) for name, cell in cells.items()])
            lines.append(line)
            if rows[-1][0] < rows[max(0, len(rows) - 2)][0]:
                what, todo = f"{time} goes back to {rows[-1][0]:g}", "sort the rows, or make two files of it"
                raise LockstepError(what, f"{path}:{lines[-1]}", todo)
    table = np.array(rows).reshape(-1, len(places))
    _, first, count = np.unique(table[:, 0], return_index=True, return_counts=True)
    if len(first) < max(2, len(table) / 2):
        what = f"{len(table)} samples have {len(first)} different values of {time}"
        raise LockstepError(what, str(path), "give each sample a time of its own")
    shared, notes = len(table) - len(first), []
    if shared > len(table) / 10:
        notes.append(f"{path}: {shared} of {len(table)} samples have the time of the one before: such are averaged")
    return np.add.reduceat(table, first) / count[:, None], np.array(lines)[first], notes


def _number(name: str, cell: str, where: str, time: bool) -> float:
    what, todo = f"{name} is {cell[:40]!r}", "write a number, with a decimal point, or delete the line"
    try:
        if abs(value := float(cell)) <= MOST:
            return value
        if np.isfinite(value):
            what, todo = f"{what}, beyond float32", "write what was measured, or delete the line"
    except ValueError:
        if not cell:
            what = f"{name} is empty"
        elif time and re.search(r"\d:\d|\d[-/.]\d+[-/.]\d", cell):  # of a clock or a calendar
            todo = "write seconds, as a number since the start of the recording"
    raise LockstepError(what, where, todo)


def even_pieces(
    table: np.ndarray, lines: np.ndarray, path: Path, rate_hz: float, shortest: int
) -> tuple[list[np.ndarray], list[str]]:
    """Cut what `read` returns at its gaps, over which nothing is known, and resample each piece -> ([(T, C) float32 at
    `rate_hz`, at least `shortest` steps], a sentence on each gap, on a different rate and on what is too short)."""
    time, notes, pieces, short = table[:, 0], [], [], 0
    usual = float(np.median(np.diff(time)))
    if not 0.19 < usual * rate_hz < 5.3:  # a fifth and five times, and jitter
        what, todo = f"a sample every {usual:g} s, taken at {rate_hz:g} Hz", "give the time in seconds, or another rate"
        raise LockstepError(what, str(path), todo)
    ends = np.flatnonzero(np.diff(time) > 1.001 * widest_gap(usual, shortest / rate_hz))
    for before, after, line in zip(time[ends], time[ends + 1], lines[ends + 1], strict=True):
        notes.append(f"{path}:{line}: no sample for {after - before:.3g} s, from {before:g} s on: cut there")
    blocks = np.median(np.diff(time)[: len(time[1:]) // BLOCK * BLOCK].reshape(-1, BLOCK), 1)
    if len(other := np.flatnonzero((blocks > FEW * usual) | (blocks * FEW < usual))):
        first = BLOCK * other[0]
        what = f"a sample every {blocks[other[0]]:.3g} s from {time[first]:g} s on, usually every {usual:.3g} s"
        notes.append(f"{path}:{lines[first]}: {what}: has the rate changed?")
    for part in np.split(table, ends + 1):
        if steps_at(part[:, 0], rate_hz) < shortest:
            short += len(part)
        else:
            pieces.append(resampled(part[:, 0], part[:, 1:], rate_hz))
    if not pieces:
        what = f"no stretch without a gap has the {shortest} steps of a window at {rate_hz:g} Hz"
        raise LockstepError(what, str(path), "leave the recording out, or take shorter windows")
    if short:
        notes.append(f"{path}: {short} of {len(time)} samples are left out, in stretches shorter than a window")
    return pieces, notes


def widest_gap(usual_s: float, window_s: float) -> float:
    """Return the seconds without a sample from which on a recording is cut: no window is mostly a line."""
    return min(GAP * usual_s, max(FEW * usual_s, window_s / 4))


def steps_at(time: np.ndarray, rate_hz: float) -> int:
    return int((time[-1] - time[0]) * rate_hz + 1e-6) + 1


def rate_of(time: np.ndarray) -> float:
    """Return the samples per second of (N,) times in seconds that rise: where most intervals are alike their mean,
    because times are often rounded, without those over a lost sample; else the mean of all."""
    intervals = np.diff(time)
    usual = np.median(intervals)
    alike = intervals[(intervals > 0.5 * usual) & (intervals < 1.5 * usual)]
    return float(1 / (alike if len(alike) > 0.8 * len(intervals) else intervals).mean())


def resampled(time: np.ndarray, values: np.ndarray, rate_hz: float) -> np.ndarray:
    """(N,) times in seconds that rise, (N, C) -> (T, C) float32 at `rate_hz`, from the first time on.

    Linear between samples. To a lower rate the samples are first taken evenly at their own rate, and what is above
    1.06 times half the new rate is lowered by 50 dB or more, because it would come back as a slow motion: a Kaiser
    window's low pass of 20 periods, its middle at 0.9 times half the new rate. Raises LockstepError without SciPy.
    """
    steps, own = steps_at(time, rate_hz), rate_of(time) if len(time) > 1 else rate_hz
    share = Fraction(1)
    if own > 1.1 * rate_hz:
        share = Fraction(rate_hz / own).limit_denominator(max(100, round(2 * own / rate_hz)))
    dense = rate_hz * share.denominator / share.numerator
    even = time[0] + np.arange(steps_at(time, dense)) / dense
    found = np.stack([np.interp(even, time, column) for column in values.T], 1)
    if share < 1:
        signal, most = _import_signal(), max(share.numerator, share.denominator)
        low_pass = signal.firwin(20 * most + 1, 0.9 / most, window=("kaiser", 5.0))
        found = signal.resample_poly(found, share.numerator, share.denominator, window=low_pass, padtype="line")
    return found[:steps].astype(np.float32)


def _import_signal() -> Any:
    try:
        import scipy.signal
    except ImportError:
        what = "a lower rate needs a low-pass filter, and SciPy is not installed"
        raise LockstepError(what, "the sensors' rate", "pip install scipy") from None
    return scipy.signal
