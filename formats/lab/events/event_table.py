"""Read tables of events: a row for each event of a behaviour or an activity.

    video,start_s,stop_s,label        of videos
    file,start_s,stop_s,label         of recordings of sensors

file             name of the video or the recording; without the column, the name of the table
start, stop      numbers in the unit of the name (`start_s`, `Start (s)`, onset_ms), or h:mm:ss, or
                 dates of a recording; `duration` in place of a stop. `stop_frame` is the first
                 frame after the event, `end_frame` the last frame of the event
label            the behaviour or activity
subject, rater, group  optional: the animal or person, the person who rated, the cage of the video

Names of columns: see `formats/lab/events/columns.py`. More columns are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from engine.contract import LockstepError
from formats.cells import SECONDS, number_of
from formats.lab.events.columns import FRAMES, HOURS, MINUTES, VIDEOS, Column, Columns, Purpose
from formats.lab.events.event import Event, overlaps
from formats.tables import Row, Table
from formats.times import TimeUnit, dates, elapsed_s, find_unit_of_events, has_one_colon

DATE, CLOCK = "date", "clock"
UNITS = {"s": "seconds", CLOCK: "h:mm:ss", DATE: "dates", FRAMES: FRAMES}
ROUNDED_S, ROUNDED_FRAMES = 0.1, 1.0
"""Differences of two lengths that are rounding, or the last frame."""

MOST = 1e9  # seconds or frames: no video is longer


@dataclass
class Rated:
    """The events of a rater in a file, sorted by start. Times are seconds or frames."""

    video: str
    observation: str
    group: str = ""
    events: list[Event] = field(default_factory=list)


@dataclass
class EventTable:
    """The events of a table.

    unit   s, FRAMES, CLOCK for times of the day, or DATE for seconds since 1970
    notes  sentences on changed data
    """

    table: Table
    columns: Columns
    rated: list[Rated]
    unit: str
    notes: list[str] = field(default_factory=list)

    def where(self, event: Event) -> str:
        return self.table.head.where(event.line)

    def __str__(self) -> str:
        columns = self.columns
        named = {"label": columns.label, "rater": columns.rater, "subject": columns.subject}
        named["group"] = columns.group
        others = [f"{role} {name}" for role, name in named.items() if name]
        unit = self.columns.unit or UNITS[self.unit]
        link = "with the length" if columns.is_duration else "to"
        times = f"from {columns.start.name} {link} {columns.stop.name} in {UNITS.get(unit, unit)}"
        return f"{times}; {', '.join(others)}"


class _Times:
    """The times of a column.

    values    (N,) seconds or frames
    unit      of EventTable
    is_known  whether the name of the column or the cells give the unit
    note      on a name that the numbers contradict, or empty
    """

    def __init__(self, table: Table, column: Column, purpose: Purpose):
        self.table, self.column, self.of_video = table, column, purpose is VIDEOS
        self.cells = [table.text(row, column.name) for row in table.rows]
        self.unit, self.is_known, self.note = "s", bool(column.unit), ""
        if column.unit == FRAMES:
            self.unit, self.values = FRAMES, self._frames(purpose)
        else:
            self.values = self._seconds()

    def _frames(self, purpose: Purpose) -> np.ndarray:
        """Return (N,) whole frames. Raises LockstepError, also for a recording without frames."""
        if not self.of_video:
            raise self._error(0, "events in frames: a recording has times", "give start_s, stop_s")
        values = self._numbers()
        option = purpose.rename
        todo = f"give a whole frame, or name the column of seconds: {option} start_s=...,stop_s=..."
        for n in np.flatnonzero(values != np.floor(values)).tolist():
            raise self._error(n, f"{self.column.name} is {values[n]:g}", todo)
        return values

    def _seconds(self) -> np.ndarray:
        stated = self.column.unit
        found = find_unit_of_events(stated, self.cells)
        if found.unit == "clock":
            return self._clock()
        if found.unit not in SECONDS:
            return self._dates(found)
        if self.of_video:
            return self._numbers() * SECONDS.get(stated, 1.0)
        self.note = found.note
        return self._numbers() * SECONDS[found.unit]

    def _numbers(self) -> np.ndarray:
        """Return (N,) numbers. Raises LockstepError, for videos also for a number below 0."""
        values = np.array([self._number(n) for n in range(len(self.cells))])
        if not self.of_video:
            return values
        for n in np.flatnonzero(~((values >= 0) & (values < MOST))).tolist():
            what = f"{self.column.name} is {self.cells[n]}"
            raise self._error(n, what, f"give a number from 0 to {MOST:g}")
        return values

    def _number(self, n: int) -> float:
        """Return the number of a cell; a column of seconds may have h:mm:ss, too."""
        if ":" in self.cells[n] and self.column.unit == "s":
            return self._elapsed(n)
        return self.table.number(self.table.rows[n], self.column.name)

    def _clock(self) -> np.ndarray:
        """Return (N,) seconds of h:mm:ss. Raises LockstepError where h:mm may be m:ss."""
        self.is_known = True
        if not self.of_video:
            self.unit = CLOCK
        is_sure = self.of_video or self.column.unit in (MINUTES, HOURS)
        if not is_sure and all(map(has_one_colon, self.cells)):
            name, cell = self.column.name, self.cells[0]
            todo = f"write 0:{cell} or {cell}:00, or name the column {name} (m:ss) or {name} (h:mm)"
            raise self._error(0, f"{name} is {cell!r}: hours or minutes?", todo)
        places = range(len(self.cells))
        if self.column.unit == "s":
            return np.array([self._number(n) for n in places])
        return np.array([self._elapsed(n) for n in places])

    def _elapsed(self, n: int) -> float:
        value = elapsed_s(self.cells[n], self.column.unit == HOURS)
        if not np.isfinite(value):
            what = f"{self.column.name} is {self.cells[n][:40]!r}"
            raise self._error(n, what, "write seconds with a decimal point, or h:mm:ss.f")
        return value

    def _dates(self, found: TimeUnit) -> np.ndarray:
        """Return (N,) seconds since 1970. Raises LockstepError for a video: it begins at 0."""
        name = self.column.name
        if self.of_video:
            todo = "write seconds since the start of the video, or h:mm:ss"
            raise self._error(0, f"{name} is {self.cells[0][:40]!r}", todo)
        if found.cure:
            todo = "write dates as 2026-11-23 07:09:38.25"
            raise self._error(0, f"{name} is {self.cells[0]!r}", todo)
        self.unit = DATE
        values = dates(self.cells, found.unit) * 1e-6
        for n in np.flatnonzero(~np.isfinite(values)).tolist():
            todo = "write seconds with a decimal point, or h:mm:ss"
            raise self._error(n, f"{name} is {self.cells[n][:40]!r}", todo)
        return values

    def _error(self, n: int, what: str, todo: str) -> LockstepError:
        where = self.table.where(self.table.rows[n], self.column.name)
        return LockstepError(what, where, todo)


def names_unit(table: Table, columns: Columns) -> bool:
    """Return whether the names give the unit of the times of videos, or the cells are h:mm:ss."""
    if columns.unit or not table.rows:
        return bool(columns.unit)
    is_alike = columns.is_duration or columns.start.unit == columns.stop.unit
    return is_alike and all(_names_seconds(table, each) for each in (columns.start, columns.stop))


def _names_seconds(table: Table, column: Column) -> bool:
    cell = table.text(table.rows[0], column.name)
    return column.unit in SECONDS or (":" in cell and bool(np.isfinite(elapsed_s(cell))))


def read(table: Table, columns: Columns, purpose: Purpose) -> EventTable:
    """Return the events of each rater in each file.

    Raises LockstepError with line and column: for times without a unit, an event that stops before
    the start, an empty cell, and for events of one label that overlap without a column of raters.
    """
    path = table.head.path
    if not table.rows:
        raise LockstepError(f"no {purpose.event}s", str(path), "write a row for each")
    columns = _with_one_unit(columns, purpose)
    starts = _Times(table, columns.start, purpose)
    stops = _Times(table, columns.stop, purpose)
    _check_units(table, columns, purpose, (starts, stops))
    ends = stops.values + columns.is_last
    if columns.is_duration:
        ends = starts.values + stops.values
    stop_name = columns.stop.name
    rated: dict[tuple[str, str], Rated] = {}
    for n, row in enumerate(table.rows):
        event = _event(table, row, columns, float(starts.values[n]), float(ends[n]))
        if purpose is VIDEOS and event.stop_s < event.start_s:
            what, where = f"{event.behaviour} stops before it starts", table.where(row, stop_name)
            raise LockstepError(what, where, "fix the two times")
        file = path.stem
        if columns.file:
            file = _text(table, row, columns.file)
        rater = _text(table, row, columns.rater)
        of_rater = rated.setdefault((file, rater), Rated(file, rater))
        _add_group(of_rater, _text(table, row, columns.group), table.where(row))
        of_rater.events.append(event)
    for one in rated.values():
        one.events.sort(key=lambda event: (event.start_s, event.line))
        if not columns.rater:
            _check_overlaps(table, one, purpose)
    notes = [f"{path}: {each.note}" for each in (starts, stops) if each.note]
    if columns.length:
        notes += _contradictions(table, columns, columns.length, ends - starts.values)
    return EventTable(table, columns, [*rated.values()], starts.unit, notes)


def _with_one_unit(columns: Columns, purpose: Purpose) -> Columns:
    """Return the columns of a recording with the unit of one for both, if only one has a unit."""
    start, stop = columns.start, columns.stop
    if purpose is VIDEOS or bool(start.unit) == bool(stop.unit):
        return columns
    unit = start.unit or stop.unit
    return replace(columns, start=Column(start.name, unit), stop=Column(stop.name, unit))


def _check_units(
    table: Table, columns: Columns, purpose: Purpose, times: tuple[_Times, _Times]
) -> None:
    """Raise LockstepError for times without a unit, and for a start and a stop that differ."""
    starts, stops = times
    start, stop = columns.start.name, columns.stop.name
    where = table.head.where(max(1, table.head.line))
    is_sum = columns.is_duration and FRAMES not in (starts.unit, stops.unit)
    is_alike = is_sum or columns.start.unit == columns.stop.unit
    if purpose is VIDEOS and not (starts.is_known and stops.is_known and is_alike):
        what = f"the unit of {start} and {stop} is unknown"
        raise LockstepError(what, where, cure_of_units(columns, purpose))
    if starts.unit != stops.unit and not is_sum:
        what = f"{start} in {UNITS[starts.unit]} and {stop} in {UNITS[stops.unit]}"
        raise LockstepError(what, where, "write both times in one form")


def cure_of_units(columns: Columns, purpose: Purpose) -> str:
    """Return how to name the unit of a start and a stop, or of a start and a length."""
    units = {columns.start.unit, columns.stop.unit}
    if FRAMES in units and len(units) > 1 and "" not in units:
        return f"write {columns.start.name} and {columns.stop.name} both in seconds or in frames"
    role = "duration" if columns.is_duration else "stop"
    pair = f"start_s={columns.start.name},{role}_s={columns.stop.name}"
    return f"{purpose.rename} {pair} is seconds, start_frame=..., {role}_frame=... is frames"


def _contradictions(
    table: Table, columns: Columns, column: Column, lengths: np.ndarray
) -> list[str]:
    """Return a line on rows whose length is not that from start to stop.

    lengths  (N,) from start to stop, in seconds or frames
    """
    unit = column.unit or columns.start.unit
    if (unit == FRAMES) != (columns.start.unit == FRAMES):
        return []
    stated = [_length_in(table.text(row, column.name), unit) for row in table.rows]
    most = ROUNDED_FRAMES if unit == FRAMES else ROUNDED_S
    differing = np.flatnonzero(np.abs(np.array(stated) - lengths) > most).tolist()
    if not differing:
        return []
    first = table.rows[differing[0]]
    where = table.where(first, column.name)
    what = f"{column.name} is {table.text(first, column.name)}, and from {columns.start.name} to "
    what += f"{columns.stop.name} are {lengths[differing[0]]:g}"
    if len(differing) > 1:
        what += f" ({len(differing)} such rows)"
    return [f"{where}: {what}: start and stop count"]


def _length_in(cell: str, unit: str) -> float:
    """Return a length in seconds or frames; NaN for a cell without one."""
    if ":" in cell:
        return elapsed_s(cell)
    try:
        return number_of(cell) * SECONDS.get(unit, 1.0)
    except ValueError:
        return float("nan")


def _event(table: Table, row: Row, columns: Columns, start: float, stop: float) -> Event:
    label = _text(table, row, columns.label)
    subject = table.text(row, columns.subject) if columns.subject else ""
    return Event(label, start, stop, subject, row.line)


def _text(table: Table, row: Row, column: str) -> str:
    """Return the text of a cell; empty without the column. Raises LockstepError if empty."""
    if not column:
        return ""
    text = table.text(row, column)
    if not text:
        todo = "write it, or delete the row"
        raise LockstepError(f"{column} is empty", table.where(row, column), todo)
    return text


def _add_group(of_rater: Rated, group: str, where: str) -> None:
    """Keep the group of a video. Raises LockstepError for a second group of the video."""
    if of_rater.events and group != of_rater.group:
        what = f"{of_rater.video} is of group {group!r} here and of {of_rater.group!r} above"
        todo = "a video has one group: the animal, or the cage of several"
        raise LockstepError(what, where, todo)
    of_rater.group = group


def _check_overlaps(table: Table, rated: Rated, purpose: Purpose) -> None:
    for earlier, later in overlaps(rated.events):
        what = f"{later.behaviour} overlaps that of line {earlier.line}"
        todo = f"of two raters? {purpose.rename} rater=COLUMN names them; else make one of the two"
        raise LockstepError(what, table.head.where(later.line), todo)
