"""Read events in BORIS' export formats: CSV, TSV or .xlsx (pip install openpyxl).

A file has one or several observations.

    tabular      Observation id, ..., Subject, Behavior, [Modifier #1, ...], Behavior type, Time,
                 Media file name, ... with a row for each POINT, START and STOP
    of before 8  lines of a key and a value, then Time, Media file path, Total length, FPS, Subject,
                 Behavior, ..., Status
    aggregated   Observation id, ..., Subject, Behavior, [Modifier #1, ...], Behavior type, Start
                 (s), Stop (s), ...
    imported     time, subject, code, modifier, comment, of states: the form of a spreadsheet
                 VIDEO.xlsx that BORIS imports

Columns are identified by name, in any order. More columns are ignored. The header is the first line
with the required columns.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.contract import LockstepError
from formats.arrays import check_text, text_lines

LAYOUTS = {
    "aggregated": {"Behavior", "Start (s)", "Stop (s)"},
    "tabular": {"Behavior", "Behavior type", "Time"},
    "before 8": {"Behavior", "Status", "Time"},
    "imported": {"time", "subject", "code", "modifier", "comment"},
}
"""The columns that distinguish the layouts."""

MOST_S = 1e7
"""Longest accepted observation in seconds: 115 days."""


@dataclass(frozen=True)
class Event:
    """A state from start to stop, exclusive, or a point with start equal to stop.

    line  line of the row with the start
    """

    behaviour: str
    start_s: float
    stop_s: float
    subject: str
    line: int

    @property
    def is_point(self) -> bool:
        return self.stop_s == self.start_s


@dataclass
class Observation:
    """The events of a video, sorted by start.

    Length and frame rate are 0 if the file lacks the values.
    """

    video: str
    events: list[Event] = field(default_factory=list)
    length_s: float = 0.0
    fps: float = 0.0


Rows = list[tuple[int, list[str]]]


def layout_of(lines: list[str]) -> str | None:
    """Return the entry of LAYOUTS that fits the text of a file, or None."""
    found = _header([(n, re.split(r"[,;\t]", line)) for n, line in enumerate(lines[:200], 1)])
    return found and found[0]


def _header(rows: Rows) -> tuple[str, int] | None:
    """Return (layout, row number) of the first row with the columns of a layout."""
    for n, (_, cells) in enumerate(rows):
        names = {cell.strip().strip('"') for cell in cells}
        if layout := next((name for name, columns in LAYOUTS.items() if columns <= names), None):
            return layout, n
    return None


def read(path: Path, offset: str = "") -> list[Observation]:
    """Return the observations of a file in order, one for each video.

    offset  treatment of times that include an offset: `subtract` the offset, or `ignore` the offset
            and keep the times
    Raises LockstepError with the line for a START without a STOP, an invalid time, and other
    errors.
    """
    rows = _xlsx(path) if path.suffix.lower() == ".xlsx" else _text(path)
    found = _header(rows)
    if not found:
        columns = "; or ".join(", ".join(sorted(columns)) for columns in LAYOUTS.values())
        raise LockstepError("no header of BORIS' events", str(path), f"it needs {columns}")
    layout, at = found
    header = [cell.strip() for cell in rows[at][1]]
    above = {cells[0].strip(): cells[1].strip() for _, cells in rows[:at] if len(cells) > 1}
    table = [
        (line, _Row(above | dict(zip(header, cells, strict=False))))
        for line, cells in rows[at + 1 :]
    ]
    if layout == "imported":
        table = [*_states(table, path.stem)]
    table = [(line, row) for line, row in table if row["Behavior"]]
    observations: dict[str, Observation] = {}
    parts: dict[str, list[tuple[int, _Row]]] = {}
    for line, row in table:
        where, video = f"{path}:{line}", row.video
        if ";" in row.fps or "|" in row.fps or row.fps.count("player") > 1:
            what, todo = "an observation of several videos", "export an observation of each video"
            raise LockstepError(what, where, todo)
        fps, length = (_number(text.rpartition(":")[2]) for text in (row.fps, row.length))
        if observations.setdefault(video, Observation(video, [], length, fps)).fps != fps:
            raise LockstepError(
                f"{video} has {fps:g} frames/s here", where, "export each video once"
            )
        parts.setdefault(video, []).append((line, row))
    for video, one in observations.items():
        shift = _shift(path, parts[video], offset)
        events = (
            _aggregated(path, parts[video])
            if layout == "aggregated"
            else _paired(path, parts[video])
        )
        for behaviour, start, stop, subject, line in events:
            if start - shift < 0:
                raise LockstepError(
                    f"a time before the offset of {shift:g} s", f"{path}:{line}", "fix the time"
                )
            one.events.append(Event(behaviour, start - shift, stop - shift, subject, line))
        one.events.sort(key=lambda event: (event.start_s, event.line))
    if not observations:
        raise LockstepError("no events", str(path), "code the video first")
    return [*observations.values()]


class _Row(dict[str, str]):
    """The cells of a row by column; a missing column is empty."""

    def __missing__(self, _: str) -> str:
        return ""

    def first(self, *names: str) -> str:
        return next((self[name].strip() for name in names if self[name].strip()), "")

    @property
    def video(self) -> str:
        named = self.first(
            "Media file name", "Media file path", "Player #1", "Source", "Observation id"
        )
        return re.split(r"[\\/]", named.removeprefix("player #1:"))[-1]

    @property
    def fps(self) -> str:
        return self.first("FPS", "FPS (frame/s)")

    @property
    def length(self) -> str:
        return self.first("Media duration (s)", "Total length")

    @property
    def what(self) -> tuple[str, ...]:
        """Return the key within which START and STOP alternate."""
        modifiers = [
            f"{name}={value}" for name, value in self.items() if "odifier" in name and value.strip()
        ]
        return (
            self["Observation id"],
            self["Subject"].strip(),
            self["Behavior"].strip(),
            *modifiers,
        )


def _states(table: list[tuple[int, _Row]], video: str) -> Iterator[tuple[int, _Row]]:
    """Yield the rows of an import spreadsheet with the column names of the other layouts.

    The spreadsheet does not mark starts and stops. The rows of each state alternate, in order.
    """
    on: set[tuple[str, ...]] = set()
    for line, row in table:
        named = {
            "Observation id": video,
            "Subject": row["subject"],
            "Behavior": row["code"],
            "Time": row["time"],
        }
        new = _Row(named | {"Modifier": row["modifier"]})
        on ^= {new.what}
        yield line, _Row(new | {"Behavior type": "START" if new.what in on else "STOP"})


Found = tuple[str, float, float, str, int]  # behaviour, start, stop, subject, line


def _paired(path: Path, table: list[tuple[int, _Row]]) -> Iterator[Found]:
    """Pair the STARTs and STOPs of a video, in any order of time."""
    rows = [(_seconds(row["Time"], "Time", f"{path}:{line}"), line, row) for line, row in table]
    started: dict[tuple[str, ...], tuple[float, int]] = {}
    for at, line, row in sorted(rows, key=lambda each: each[0]):
        where, (_, subject, behaviour, *_) = f"{path}:{line}", row.what
        kind = row.first("Behavior type", "Status").upper()
        if kind == "POINT":
            yield behaviour, at, at, subject, line
        elif kind == "START":
            if row.what in started:
                what = (
                    f"{behaviour} starts at {at:g} s, and that of line {started[row.what][1]} "
                    "has no STOP"
                )
                raise LockstepError(
                    what, where, "add the STOP between them in BORIS, and export again"
                )
            started[row.what] = at, line
        elif kind == "STOP":
            if row.what not in started:
                what = f"{behaviour} stops at {at:g} s and has no START before"
                raise LockstepError(what, where, "add the START in BORIS, and export again")
            start, line = started.pop(row.what)
            if at > start:
                yield behaviour, start, at, subject, line
        else:
            raise LockstepError(f"an event is {kind!r}", where, "POINT, START and STOP are read")
    for (_, _, behaviour, *_), (at, line) in started.items():
        what = f"{behaviour} starts at {at:g} s and has no STOP"
        raise LockstepError(what, f"{path}:{line}", "add the STOP in BORIS, and export again")


def _aggregated(path: Path, table: list[tuple[int, _Row]]) -> Iterator[Found]:
    for line, row in table:
        where, (_, subject, behaviour, *_) = f"{path}:{line}", row.what
        start, stop = (
            _seconds(row[name] or row["Start (s)"], name, where)
            for name in ("Start (s)", "Stop (s)")
        )
        if stop < start:
            raise LockstepError(f"{behaviour} stops before it starts", where, "fix the two times")
        if stop > start or row["Behavior type"].upper() == "POINT":
            yield behaviour, start, stop, subject, line


def _shift(path: Path, table: list[tuple[int, _Row]], offset: str) -> float:
    """Return the offset to subtract from the times of a video."""
    line, row = table[0]
    if not (seconds := _number(row["Time offset (s)"])) or offset == "ignore":
        return 0.0
    if offset != "subtract":
        what = f"an observation with a time offset of {seconds:g} s"
        todo = (
            "--offset subtract if its times include it, --offset ignore if they count from "
            "the video's start"
        )
        raise LockstepError(what, f"{path}:{line}", todo)
    return seconds


def _number(text: str) -> float:
    """Return the number in an optional cell, 0 for an empty cell."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def _seconds(text: str, name: str, where: str) -> float:
    """Convert a time to seconds: 12.5, or 0:00:12.5 -> 12.5"""
    try:
        value = 0.0
        for part in text.strip().split(":"):
            value = 60 * value + float(part)
        if 0 <= value < MOST_S:
            return value
    except ValueError:
        pass
    todo = "give seconds since the start of the video, with a decimal point, or h:mm:ss"
    raise LockstepError(f"{name} is {text.strip()[:40]!r}", where, todo)


def _text(path: Path) -> Rows:
    """Return the rows of a text file with the first line of each.

    A quoted description may have several lines.
    """
    lines = text_lines(path)
    named = max(lines[:200], key=lambda line: "Behavior" in line, default="")
    reader, rows, line = (
        csv.reader(io.StringIO("\n".join(lines)), delimiter=max(",;\t", key=named.count)),
        [],
        1,
    )
    try:
        for cells in reader:
            rows.append((line, cells))
            line = reader.line_num + 1
    except csv.Error as error:
        raise LockstepError(
            f"no CSV: {error}", f"{path}:{line}", "export it from BORIS again"
        ) from None
    return rows


def _xlsx(path: Path) -> Rows:
    """Return the rows of the first sheet as text."""
    try:
        import openpyxl
    except ImportError as error:
        what = f"openpyxl is needed to read a spreadsheet: {error}"
        raise LockstepError(what, str(path), "pip install openpyxl, or export as CSV") from None
    try:
        book = openpyxl.load_workbook(path, read_only=True, data_only=True)
        sheet: Any = book.worksheets[0]
        rows = [
            (n, [_cell(value) for value in cells])
            for n, cells in enumerate(sheet.iter_rows(values_only=True), 1)
        ]
        book.close()
    except Exception as error:  # openpyxl raises many types for damaged bytes
        why = str(error).splitlines()[0][:120] if str(error).strip() else type(error).__name__
        raise LockstepError(
            f"no spreadsheet: {why}", str(path), "export it from BORIS again"
        ) from None
    for line, cells in rows:
        check_text(" ".join(cells).replace("\n", " "), path.with_name(f"{path.name}:{line}"))
    return rows


def _cell(value: Any) -> str:
    return "" if value is None else str(value)
