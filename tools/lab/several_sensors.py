"""Refuse recordings of several sensors that would be read as recordings of one, or join them.

Three things show a second sensor: names of files that differ in the sensor only, files of one
person with the same times, and a column whose values separate rows of the same times.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from engine.errors import LockstepError
from formats.cells import simple_name, unit_key
from formats.lab import sensor_tables
from formats.lab.sensor_tables import Reading, Sheet
from formats.lab.sensors import streams
from formats.times import EARLIEST

FILES = "files"
"""The value of --join that joins files, not rows."""

FEW_CODES = 12
"""Most values of a column of numbers that may name the sensor of a row."""

SAMPLED = 2000
"""Rows that show whether a column of numbers has few values."""

SOON_S = 100.0
"""Seconds after which a first time belongs to a clock that was running before the recording."""

JITTERED = 20
"""Fewest different intervals of a jittered clock."""

# ---- files
# --------------------------------------------------------------------------------------------------


def check_names(paths: Sequence[Path], root: Path, table: Path | None) -> None:
    """Raise LockstepError if the names of two files differ in the sensor only.

    table  that lists the files, or None
    """
    if root.is_file():
        return
    inside = [path for path in paths if path.is_relative_to(root)]
    twins = streams.find_twins(inside, root)
    if twins is None:
        return
    first, other = (path.relative_to(root).as_posix() for path in twins)
    what = f"{first} and {other} are two sensors of one recording"
    sensors = [streams.split_name(path.relative_to(root)).sensor for path in twins]
    joined = f"--join {FILES} makes channels such as {sensors[0]}_x and {sensors[1]}_x"
    raise LockstepError(
        what, str(root), f"{_files_cure(inside, root, twins.first, table)}, {joined}"
    )


def _files_cure(paths: Sequence[Path], root: Path, path: Path, table: Path | None) -> str:
    """Return the option that takes the sensor of a file."""
    if table is not None:
        return f"list the files of one sensor in {table}"
    pattern = streams.pattern_of_one(paths, root, path)
    if not pattern:
        return "name the files of one sensor in --files"
    return f"--files {shlex.quote(pattern)} takes one"


class _Span(NamedTuple):
    """The times of a file on its clock, in seconds, and a number that is equal for equal times."""

    path: Path
    start_s: float
    end_s: float
    times: int

    @property
    def is_dated(self) -> bool:
        """Return whether the clock was running before the recording."""
        return self.start_s > EARLIEST or (self.start_s > SOON_S and self.start_s % 1 != 0)

    def is_beside(self, other: _Span) -> bool:
        """Return whether more than half of the shorter file was recorded with the other."""
        if self.times == other.times != 0 and self.start_s == other.start_s:
            return True
        both = min(self.end_s, other.end_s) - max(self.start_s, other.start_s)
        shorter = min(self.end_s - self.start_s, other.end_s - other.start_s)
        return self.is_dated and other.is_dated and both > 0.5 * shorter


class Clocks:
    """The times of the files of a folder, to find two files of one recording.

    listed  whether a table lists the files: each is then a recording of its own
    """

    def __init__(self, root: Path, listed: bool):
        self.root, self.listed = root, listed
        self.known: dict[tuple[str, str], list[_Span]] = {}

    def check(self, sheet: Sheet, person: str, label: str) -> str:
        """Compare a file with the earlier files of the same person and label.

        Return a warning for two files that were recorded at the same time, or "".

        person  empty if unknown: then files in one folder below the root are of one recording
        label   empty if unknown; nobody sits and walks at the same time
        Raises LockstepError for files of the same jittered times.
        """
        if sheet.time is None or len(sheet.time) < 2 or self.listed or self.root.is_file():
            return ""
        end_s = sheet.start_s + float(sheet.time.max())
        span = _Span(sheet.path, sheet.start_s, end_s, _number_of_times(sheet.time))
        owner = person
        if not person and sheet.path.parent != self.root:
            owner = str(sheet.path.parent)
        earlier = self.known.setdefault((owner, label), [])
        twins = [other for other in earlier if other.is_beside(span)]
        earlier.append(span)
        for other in twins:
            if other.times == span.times != 0:
                raise LockstepError(*self._refusal(other, span))
        if not twins:
            return ""
        names = f"{twins[0].path} and {span.path.name}"
        return f"{names} were recorded at the same time: two sensors? --files takes one"

    def _refusal(self, first: _Span, other: _Span) -> tuple[str, str, str]:
        names = [span.path.relative_to(self.root).as_posix() for span in (first, other)]
        what = f"{names[0]} and {names[1]} have the same times: two sensors of one recording?"
        one = _files_cure([first.path, other.path], self.root, first.path, None)
        todo = (
            f"{one}, --join {FILES} joins them; if they are of two persons, name the persons in "
            "--file-subject; if each is a recording of its own, list the files in recordings.csv"
        )
        return what, str(self.root), todo


def _number_of_times(time: np.ndarray) -> int:
    """Return a hash of (N,) jittered times; 0 for even times, which many recordings share.

    Rounded even times have few different intervals.
    """
    if len(np.unique(np.diff(time).round(6))) < JITTERED:
        return 0
    return hash(np.ascontiguousarray(time).tobytes())


def read_joined(files: dict[str, Path], how: Reading, readings: dict[str, Reading]) -> Sheet:
    """Read the files of one recording, by sensor, and join them. Raises LockstepError.

    readings  settings of each sensor, which the first recording sets from `how`
    """
    sheets = {}
    for sensor, path in files.items():
        own = readings.setdefault(sensor, replace(how, channels=[*how.channels], units={}))
        sheets[sensor] = sensor_tables.read(path, own)
    return streams.join_files(sheets)


# ---- rows
# --------------------------------------------------------------------------------------------------


def check_rows(sheet: Sheet) -> None:
    """Raise LockstepError if a column that is not read separates rows of the same times."""
    columns = sheet.others | _columns_of_codes(sheet)
    for rows in sheet.recordings() if columns else ():
        time = np.arange(len(rows)) if sheet.time is None else sheet.time[rows]
        for name, (codes, names) in columns.items():
            measured = name in sheet.channels
            if streams.are_simultaneous(time, codes[rows], measured):
                _refuse_column(sheet, name, rows, codes, names)
    for name, (_, names) in sheet.others.items():
        units = {unit_key(each): each for each in names if each}
        if simple_name(name) in ("unit", "units") and len(units) > 1:
            what = f"the rows have several units: {name} is {' or '.join(units.values())}"
            todo = "convert the rows to one unit, or write a table for each unit"
            raise LockstepError(what, str(sheet.path), todo)


def _columns_of_codes(sheet: Sheet) -> dict[str, tuple[np.ndarray, list[str]]]:
    """Return the channels of few whole numbers, as `Sheet.others`."""
    found = {}
    step = max(1, len(sheet.values) // SAMPLED)
    for name, column in zip(sheet.channels, sheet.values.T, strict=True):
        some = np.unique(column[::step])
        if len(some) > FEW_CODES or np.isnan(some).any() or (some != np.round(some)).any():
            continue
        levels, codes = np.unique(column, return_inverse=True)
        if 1 < len(levels) <= FEW_CODES:
            found[name] = codes, [f"{level:g}" for level in levels]
    return found


def _refuse_column(
    sheet: Sheet, name: str, rows: np.ndarray, codes: np.ndarray, names: Sequence[str]
) -> None:
    present = [*dict.fromkeys(codes[rows].tolist())]
    some = ", ".join(names[code] for code in present[:4])
    first = rows[codes[rows] == present[1]][0]
    column = shlex.quote(name)
    recording = name
    if used := sheet.used.get("recording"):
        recording = f"{used},{name}"
    channel = f"{simple_name(names[present[0]]) or 'name'}_{sheet.channels[0]}"
    join = f"--join {column} makes channels such as {channel}"
    apart = f"--recording {shlex.quote(recording)} takes each as a recording of its own"
    words = {word for code in present for word in simple_name(names[code]).split("_")}
    todo = f"{apart}, {join}"
    if words & streams.MOTION:
        todo = f"{join}; or write a table for each sensor"
    what = f"{name} separates rows of the same times: {some}"
    raise LockstepError(what, sheet.at(first), todo)
