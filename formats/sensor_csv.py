"""A sensor's recording as CSV: every cell checked by its line, cut where samples are missing, resampled evenly."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

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
        raise LockstepError(what, str(path), f"{todo} (for a lower one filter first)")
    gap = min(GAP * usual, max(FEW * usual, shortest / rate_hz / 4))  # no window is mostly a line
    ends = np.flatnonzero(np.diff(time) > 1.001 * gap)
    for before, after, line in zip(time[ends], time[ends + 1], lines[ends + 1], strict=True):
        notes.append(f"{path}:{line}: no sample for {after - before:.3g} s, from {before:g} s on: cut there")
    blocks = np.median(np.diff(time)[: len(time[1:]) // BLOCK * BLOCK].reshape(-1, BLOCK), 1)
    if len(other := np.flatnonzero((blocks > FEW * usual) | (blocks * FEW < usual))):
        first = BLOCK * other[0]
        what = f"a sample every {blocks[other[0]]:.3g} s from {time[first]:g} s on, usually every {usual:.3g} s"
        notes.append(f"{path}:{lines[first]}: {what}: has the rate changed?")
    for part in np.split(table, ends + 1):
        steps = int((part[-1, 0] - part[0, 0]) * rate_hz + 1e-6) + 1
        if steps < shortest:
            short += len(part)
            continue
        even = part[0, 0] + np.arange(steps) / rate_hz
        columns = [np.interp(even, part[:, 0], column) for column in part.T[1:]]
        pieces.append(np.stack(columns, 1).astype(np.float32))
    if not pieces:
        what = f"no stretch without a gap has the {shortest} steps of a window at {rate_hz:g} Hz"
        raise LockstepError(what, str(path), "leave the recording out, or take shorter windows")
    if short:
        notes.append(f"{path}: {short} of {len(time)} samples are left out, in stretches shorter than a window")
    return pieces, notes
