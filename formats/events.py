"""Read events of recordings from a table: a row for each event, with a start and a stop.

    file,start_s,stop_s,label,rater
    a.csv,12.5,17.0,walk,ann

Columns are found by common names, in any letters and with a unit: `Start (s)`, `onset_ms`. A time
is a number, a date or a time of the day.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.contract import LockstepError
from formats.cells import SECONDS, split_unit
from formats.tables import Row, Table
from formats.times import dates, find_unit

COLUMNS = {
    "file": ("file", "filename", "file_name", "recording", "session"),
    "start": ("start", "start_time", "begin", "begin_time", "onset", "from", "t_start"),
    "stop": ("stop", "stop_time", "end", "end_time", "offset", "to", "t_stop", "t_end"),
    "label": ("label", "activity", "class", "behaviour", "behavior", "annotation", "event", "code"),
    "rater": ("rater", "observer", "annotator", "coder"),
}
"""Names of the columns, without a unit."""


class Event(NamedTuple):
    """A label from start to stop, exclusive, in seconds; `is_date`: on the clock of the file."""

    file: str
    start_s: float
    stop_s: float
    label: str
    where: str
    is_date: bool


def find_columns(table: Table, named: Mapping[str, str]) -> dict[str, str]:
    """Return {role: column} of the roles of COLUMNS that the table has.

    named  {role: column}, as the user has chosen
    Raises LockstepError for a start without a stop, and the other way round.
    """
    header = table.head.where(max(1, table.head.line))
    for role, name in named.items():
        if role not in COLUMNS or name not in table.names:
            what = f"no column {name!r} for {role}"
            todo = f"--event-columns takes {'=…,'.join(COLUMNS)}=… and {', '.join(table.names)}"
            raise LockstepError(what, header, todo)
    found = {role: table.find(*names) for role, names in COLUMNS.items()} | dict(named)
    columns = {role: name for role, name in found.items() if name}
    if ("start" in columns) != ("stop" in columns):
        present, missing = ("start", "stop") if "start" in columns else ("stop", "start")
        what = f"a column {columns[present]!r} and no column of the {missing}"
        todo = f"an event needs both: --event-columns {missing}=COLUMN; else rename this column"
        raise LockstepError(what, header, todo)
    return columns


def read_events(table: Table, columns: Mapping[str, str], rater: str = "") -> list[Event]:
    """Return the events of a table. Raises LockstepError.

    columns  {role: column}, from `find_columns`
    rater    the rater whose events are read; a table of several raters needs one
    """
    missing = [role for role in ("start", "stop", "label") if role not in columns]
    if missing:
        what = f"no column of the {missing[0]} among {', '.join(table.names)}"
        todo = f"name it: --event-columns {missing[0]}=COLUMN"
        raise LockstepError(what, table.head.where(max(1, table.head.line)), todo)
    rows = _of_rater(table, columns.get("rater", ""), rater)
    starts, is_date = _times(table, rows, columns["start"])
    stops, _ = _times(table, rows, columns["stop"])
    events = []
    for row, start_s, stop_s in zip(rows, starts.tolist(), stops.tolist(), strict=True):
        where, label = table.where(row), table.text(row, columns["label"])
        if not label:
            todo = "name what was seen, or delete the row"
            raise LockstepError("an event without a label", where, todo)
        if not start_s < stop_s:
            what = f"{label} stops at {stop_s:g} s and starts at {start_s:g} s"
            raise LockstepError(what, where, "fix the two times")
        file = table.text(row, columns["file"]) if "file" in columns else ""
        events.append(Event(file, start_s, stop_s, label, where, is_date))
    return events


def _of_rater(table: Table, column: str, rater: str) -> list[Row]:
    """Return the rows of one rater. Raises LockstepError if several are there, or not this one."""
    if not column:
        if rater:
            what = f"no column of raters among {', '.join(table.names)}"
            raise LockstepError(what, "--rater", "leave it out, or name the column rater")
        return table.rows
    raters = sorted({table.text(row, column) for row in table.rows})
    chosen = rater or (raters[0] if len(raters) == 1 else "")
    if chosen not in raters or (len(raters) > 1 and not rater):
        what = f"events of {len(raters)} raters: {', '.join(raters)}"
        raise LockstepError(what, str(table.head.path), f"choose one: --rater {raters[0]}")
    return [row for row in table.rows if table.text(row, column) == chosen]


def _times(table: Table, rows: Sequence[Row], column: str) -> tuple[np.ndarray, bool]:
    """Return (N,) seconds of a column, and whether they are dates. Raises LockstepError."""
    cells = [table.text(row, column) for row in rows]
    unit = find_unit(split_unit(column).unit, cells)
    if unit.cure:
        todo = "write dates as 2026-11-23 07:09:38.25"
        raise LockstepError(f"{column} is {cells[0]!r}", table.where(rows[0], column), todo)
    if unit.unit in SECONDS:
        seconds = np.array([table.number(row, column) for row in rows]) * SECONDS[unit.unit]
    else:
        seconds = dates(cells, unit.unit) * 1e-6
    for row in np.flatnonzero(~np.isfinite(seconds)).tolist():
        what = f"{column} is {cells[row][:40]!r}"
        todo = "write seconds with a decimal point, or h:mm:ss"
        raise LockstepError(what, table.where(rows[row], column), todo)
    return seconds, unit.unit not in (*SECONDS, "clock")


@dataclass
class Span:
    """The time of a recording.

    start_s   of the first sample, on the clock of the file
    length_s  from the first sample to the last
    usual_s   usual time between samples
    """

    start_s: float
    length_s: float
    usual_s: float


def shift_of(events: Sequence[Event], span: Span, clock: str, where: str) -> float:
    """Return the seconds to subtract from the times of events: they count from the first sample.

    clock  `file` or `start`, if the user has chosen; empty: what fits
    Raises LockstepError if the events lie outside the recording, or both clocks fit.
    """
    low, high = min(e.start_s for e in events), max(e.stop_s for e in events)
    fits = {}
    for name, shift in (("file", span.start_s), ("start", 0.0)):
        inside = low - shift >= -span.usual_s and high - shift <= span.length_s + 2 * span.usual_s
        fits[name] = inside and not (name == "start" and events[0].is_date)
    chosen = [name for name in ("file", "start") if fits[name] and clock in ("", name)]
    if not chosen:
        first = next(e for e in events if e.start_s == low or e.stop_s == high)
        what = f"events of {low:.10g} to {high:.10g} s, {where} has {span.length_s:.10g} s"
        what += f" from {span.start_s:.10g} s"
        todo = "give the events of that very recording, in its time"
        raise LockstepError(what, first.where, todo)
    if len(chosen) == 2 and abs(span.start_s) > span.usual_s:
        what = f"events may count from the clock of {where}, which begins at {span.start_s:g} s, "
        what += "or from its first sample"
        todo = "--event-clock file, or --event-clock start"
        raise LockstepError(what, events[0].where, todo)
    return span.start_s if chosen[0] == "file" else 0.0


def label_rows(time: np.ndarray, events: Sequence[Event], shift_s: float) -> list[str]:
    """Return the label of each of (N,) times in seconds, empty where no event is.

    Raises LockstepError for two labels at once.
    """
    owner = np.full(len(time), -1)
    for number, event in enumerate(events):
        begin, end = event.start_s - shift_s, event.stop_s - shift_s
        inside = (time >= begin - 1e-9) & (time < end - 1e-9)
        taken = owner[inside]
        for other in np.unique(taken[taken >= 0]).tolist():
            if events[other].label != event.label:
                what = f"{event.label} and {events[other].label} at once ({events[other].where})"
                raise LockstepError(what, event.where, "a step has one label: fix the times")
        owner[inside] = number
    labels = [event.label for event in events]
    return [labels[n] if n >= 0 else "" for n in owner.tolist()]
