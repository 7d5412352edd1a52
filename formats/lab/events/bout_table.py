"""Read tables of bouts: a row for each bout of a behaviour, with its start and its stop.

    video            file name of the video; without the column, the name of the table is the name
                     of the video
    start_s, stop_s  seconds since the start of the video, as numbers or h:mm:ss; other units are in
                     the names, too: start_ms, stop_frame. `stop_frame` is the first frame after the
                     bout, `end_frame` the last frame of the bout
    label            the behaviour
    subject, rater, group  optional: the animal, the person who rated, the cage of the video

Columns are found by usual names in any letters (`Start (s)`, onset, behavior, observer), or are
named by the caller. More columns are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from engine.contract import LockstepError
from formats.cells import SECONDS, simple_name, split_unit
from formats.lab.boris import Event, seconds_of
from formats.lab.clips import rename
from formats.tables import Head, Row, Table, find_head

FRAMES = "frames"

USUAL = {
    "video": "video video_name video_file media media_file media_file_name file file_name filename",
    "label": "label behaviour behavior class activity action annotation event",
    "subject": "subject animal individual",
    "rater": "rater observer annotator coder experimenter",
    "group": "group",
}
"""The names of columns."""

TIMES = {
    "start start_time time_start": "stop stop_time time_stop end end_time time_end",
    "begin begin_time": "end end_time",
    "onset": "offset",
    "from": "to until",
}
"""The names of columns of starts, each with those of stops, without units."""

LAST_FRAME = ("end", "last")
"""Names of a column with the last frame of a bout, not with the first frame after it."""

MOST = 1e9  # seconds or frames: no video is longer


class Column(NamedTuple):
    """A column by its name in the file; `unit` is of SECONDS, FRAMES, or empty."""

    name: str
    unit: str = ""


@dataclass(frozen=True)
class Roles:
    """The columns of a table of bouts; an optional column may be empty."""

    start: Column
    stop: Column
    label: str
    video: str = ""
    subject: str = ""
    rater: str = ""
    group: str = ""

    @property
    def unit(self) -> str:
        """Return the unit of both times; empty if the names do not give one unit."""
        return self.start.unit if self.start.unit == self.stop.unit else ""

    def __str__(self) -> str:
        named = {"label": self.label, "rater": self.rater, "subject": self.subject}
        named["group"] = self.group
        others = [f"{role} {name}" for role, name in named.items() if name]
        unit = "seconds" if self.unit == "s" else self.unit
        return f"bouts from {self.start.name} to {self.stop.name} in {unit}; {', '.join(others)}"


@dataclass
class Rated:
    """The bouts of a rater in a video, sorted by start. Times are seconds or frames."""

    video: str
    rater: str
    group: str = ""
    events: list[Event] = field(default_factory=list)


def head_of(path: Path, lines: Sequence[str], columns: Mapping[str, str]) -> Head | None:
    """Return the head of a table with renamed columns; None for an empty file."""
    if not any(map(str.strip, lines)):
        return None
    head = find_head(path, lines)
    head.names = rename(path, head.names, columns)
    return head


def roles_of(names: Sequence[str]) -> Roles | None:
    """Return the columns of a table of bouts; None if start, stop or label is missing."""
    times = [
        (_column(names, starts.split()), _column(names, stops.split()))
        for starts, stops in TIMES.items()
    ]
    others = {role: _column(names, usual.split()) for role, usual in USUAL.items()}
    named = {role: column.name for role, column in others.items() if column}
    for start, stop in times:
        if start and stop and "label" in named:
            return Roles(start, stop, **named)
    return None


def _column(names: Sequence[str], usual: Sequence[str]) -> Column | None:
    """Return the column of the first usual name that is there, with its unit."""
    columns = [(_base_of(name), Column(name, _unit_of(name))) for name in names if name]
    for wanted in usual:
        for base, column in columns:
            if base == wanted:
                return column
    return None


def _base_of(name: str) -> str:
    """Return a name without its unit: start_frame -> start"""
    words = [word for word in simple_name(name).split("_") if word not in ("frame", "frames")]
    if _unit_of(name) == FRAMES:
        return "_".join(words)
    return split_unit(name).name


def _unit_of(name: str) -> str:
    if {"frame", "frames"} & {*simple_name(name).split("_")}:
        return FRAMES
    unit = split_unit(name).unit
    return unit if unit in SECONDS else ""


def read(path: Path, lines: Sequence[str], columns: Mapping[str, str]) -> tuple[Roles, list[Rated]]:
    """Return the columns, and the bouts of each rater in each video.

    Raises LockstepError with line and column: for times without a unit, a bout that stops before it
    starts, an empty cell, and for bouts of a behaviour that overlap without a column of raters.
    """
    head = head_of(path, lines, columns)
    roles = roles_of(head.names) if head else None
    if head is None or roles is None:
        raise LockstepError("no bouts", str(path), "a table of bouts has start_s, stop_s and label")
    if not roles.unit:
        what = f"the unit of {roles.start.name} and {roles.stop.name} is unknown"
        todo = f"name it: --columns start_s={roles.start.name},stop_s={roles.stop.name} is seconds"
        todo += ", start_frame=..., stop_frame=... is frames"
        raise LockstepError(what, head.where(head.line or 1), todo)
    table = Table(head, [*head.rows(lines)])
    rated: dict[tuple[str, str], Rated] = {}
    for row in table.rows:
        event = _event(table, row, roles)
        video = _text(table, row, roles.video) if roles.video else path.stem
        rater = _text(table, row, roles.rater)
        of_rater = rated.setdefault((video, rater), Rated(video, rater))
        _add_group(of_rater, _text(table, row, roles.group), table.where(row))
        of_rater.events.append(event)
    if not rated:
        raise LockstepError("no bouts", str(path), "write a row for each")
    for one in rated.values():
        one.events.sort(key=lambda event: (event.start_s, event.line))
        if not roles.rater:
            _check_overlaps(path, one)
    return roles, [*rated.values()]


def _event(table: Table, row: Row, roles: Roles) -> Event:
    label = _text(table, row, roles.label)
    subject = table.text(row, roles.subject) if roles.subject else ""
    start = _time(table, row, roles.start)
    stop = _time(table, row, roles.stop)
    is_last = roles.unit == FRAMES and {*simple_name(roles.stop.name).split("_")} & {*LAST_FRAME}
    if is_last:
        stop += 1
    if stop < start:
        where = table.where(row, roles.stop.name)
        raise LockstepError(f"{label} stops before it starts", where, "fix the two times")
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


def _time(table: Table, row: Row, column: Column) -> float:
    """Return a time in seconds, or a whole frame. Raises LockstepError."""
    where = table.where(row, column.name)
    text = table.text(row, column.name)
    if column.unit == "s" and ":" in text:
        return seconds_of(text, column.name, where)
    value = table.number(row, column.name)
    if not 0 <= value < MOST:
        raise LockstepError(f"{column.name} is {text}", where, f"give a number from 0 to {MOST:g}")
    if column.unit != FRAMES:
        return value * SECONDS[column.unit]
    if value != int(value):
        todo = "give a whole frame, or name the column of seconds: --columns start_s=...,stop_s=..."
        raise LockstepError(f"{column.name} is {text}", where, todo)
    return value


def _add_group(of_rater: Rated, group: str, where: str) -> None:
    """Keep the group of a video. Raises LockstepError for a second group of the video."""
    if of_rater.events and group != of_rater.group:
        what = f"{of_rater.video} is of group {group!r} here and of {of_rater.group!r} above"
        todo = "a video has one group: the animal, or the cage of several"
        raise LockstepError(what, where, todo)
    of_rater.group = group


def _check_overlaps(path: Path, rated: Rated) -> None:
    for earlier, later in overlaps(rated.events):
        what = f"{later.behaviour} overlaps that of line {earlier.line}"
        todo = "of two raters? --columns rater=COLUMN names them; else make one bout of the two"
        raise LockstepError(what, f"{path}:{later.line}", todo)


def overlaps(events: Sequence[Event]) -> list[tuple[Event, Event]]:
    """Return the pairs of bouts of a subject and a behaviour that overlap, of sorted bouts."""
    found = []
    latest: dict[tuple[str, str], Event] = {}
    for event in events:
        key = (event.subject, event.behaviour)
        before = latest.get(key)
        if before is not None and event.start_s < before.stop_s:
            found.append((before, event))
        if before is None or event.stop_s > before.stop_s:
            latest[key] = event
    return found
