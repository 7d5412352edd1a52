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

Several observations may be of one video, such as those of two observers. An observation may show
several videos at once, one in each player; their times have one axis. The events belong to the
video of the chosen player.

Columns are identified by name, in any order. More columns are ignored. The header is the first line
with the required columns.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.contract import LockstepError
from formats.arrays import check_text, text_lines
from formats.cells import without_thousands
from formats.lab.events.event import Event
from formats.times import elapsed_s

LAYOUTS = {
    "aggregated": {"Observation id", "Behavior", "Start (s)", "Stop (s)"},
    "tabular": {"Behavior", "Behavior type", "Time"},
    "before 8": {"Behavior", "Status", "Time"},
    "imported": {"time", "subject", "code", "modifier", "comment"},
}
"""The columns that distinguish the layouts."""

MOST_S = 1e7
"""Longest accepted observation in seconds: 115 days."""

UNKNOWN = {"", "na", "nan", "none", "live", "not found"}
"""What BORIS writes for a value or a video that an observation lacks."""

SEVERAL_VIDEOS = "an observation of several videos"
ONE_VIDEO = "export an observation of each video"

PLAYER = "--player"
"""The option for observations of several players."""

NUMBERS = (
    "Time,time,Start (s),Stop (s),Time offset (s),Media duration (s),Total length,FPS,FPS (frame/s)"
).split(",")
"""The columns whose numbers may have a decimal comma."""

NO_TIMES = (
    "write a table video,start_frame,stop_frame,label: a frame is the Image index less 1, in a "
    "video of the pictures (ffmpeg -framerate 25 -i %04d.png -qp 0 pictures.mp4)"
)
"""The cure for an observation of pictures."""


@dataclass
class Observation:
    """The events of an observation of a video, sorted by start.

    name     BORIS' observation id; empty if the file has none
    media    path of the video in the file
    length_s, fps  0 if the file lacks the values
    note     which of several players counts; empty for one
    """

    video: str
    name: str = ""
    media: str = ""
    events: list[Event] = field(default_factory=list)
    length_s: float = 0.0
    fps: float = 0.0
    note: str = ""


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


def read(path: Path, offset: str = "", player: int = 0) -> list[Observation]:
    """Return the observations of a file in order; an observation is of one video.

    offset  treatment of times that include an offset: `subtract` the offset, or `ignore` the offset
            and keep the times
    player  number of the player whose video counts, where an observation has several; 0: the first
    Raises LockstepError with the line for a START without a STOP, an invalid time, rows of an
    observation that contradict each other, and other errors.
    """
    layout, table = _table(path, player)
    observations = []
    for (name, media), rows in _by_observation(path, table).items():
        events = _events(path, layout, rows, offset)
        length_s = _common(path, rows, "media duration", _length)
        fps = _common(path, rows, "frame rate", _rate)
        video = _last_part(media)
        note = _note_on_players(path, name, rows, player)
        observations.append(Observation(video, name, media, events, length_s, fps, note))
    if not observations:
        raise LockstepError("no events", str(path), "code the video first")
    return observations


Table = list[tuple[int, "_Row"]]


def _table(path: Path, player: int) -> tuple[str, Table]:
    """Return the layout, and (line, row) of each event. Raises LockstepError without a header."""
    rows, has_commas = _rows(path)
    found = _header(rows)
    if not found:
        columns = "; or ".join(", ".join(sorted(columns)) for columns in LAYOUTS.values())
        raise LockstepError("no header of BORIS' events", str(path), f"it needs {columns}")
    layout, at = found
    header = [cell.strip() for cell in rows[at][1]]
    above = _above(path, rows[:at])
    table = []
    for line, cells in rows[at + 1 :]:
        row = _Row(above | dict(zip(header, cells, strict=False)))
        row.player = player or 1
        if has_commas:
            row.write_points()
        table.append((line, row))
    if layout == "imported":
        table = [*_states(table, path.stem)]
    table = [(line, row) for line, row in table if row["Behavior"].strip()]
    for line, row in table:
        row.check(f"{path}:{line}")
    return layout, table


def _above(path: Path, rows: Rows) -> dict[str, str]:
    """Return the lines of a key and a value above the table.

    Raises LockstepError for a second video of a player, whose times would continue those of the
    first.
    """
    above: dict[str, str] = {}
    for line, cells in rows:
        if len(cells) < 2:
            continue
        key = cells[0].strip()
        if key.startswith("Player #") and key in above:
            raise LockstepError(SEVERAL_VIDEOS, f"{path}:{line}", ONE_VIDEO)
        above[key] = cells[1].strip()
    return above


def _note_on_players(path: Path, name: str, rows: Table, player: int) -> str:
    """Return a line on the player that counts, where the user has not chosen one of several."""
    players = rows[0][1].players
    if player or len(players) < 2:
        return ""
    shown = ", ".join(f"{number} {_last_part(media)}" for number, media in players.items())
    last = max(players)
    return (
        f"{path.name}: {name or 'an observation'} shows videos at once, in the players {shown}: "
        f"the events are those of player 1; {PLAYER} {last} takes {_last_part(players[last])}"
    )


def _by_observation(path: Path, table: Table) -> dict[tuple[str, str], Table]:
    """Return {(observation id, path of the video): rows}.

    Raises LockstepError for an observation of several videos: its times run on from one video to
    the next.
    """
    found: dict[tuple[str, str], Table] = {}
    media: dict[str, str] = {}
    players: dict[str, dict[int, str]] = {}
    for line, row in table:
        name = row["Observation id"].strip()
        if not row.media:
            what = "an event without a video and without an observation id"
            raise LockstepError(what, f"{path}:{line}", "name its video in Media file name")
        elsewhere = name and not row.source and media.setdefault(name, row.media) != row.media
        others = players.setdefault(name, row.players) != row.players
        if row.has_several_videos or elsewhere or (name and others):
            raise LockstepError(SEVERAL_VIDEOS, f"{path}:{line}", ONE_VIDEO)
        found.setdefault((name, row.media), []).append((line, row))
    return found


def _events(path: Path, layout: str, rows: Table, offset: str) -> list[Event]:
    """Return the events of an observation. Raises LockstepError."""
    shift = _shift(path, rows, offset)
    pairs = _aggregated(path, rows) if layout == "aggregated" else _paired(path, rows)
    events = []
    for behaviour, start, stop, subject, line in pairs:
        if start - shift < 0:
            what = f"a time before the offset of {shift:g} s"
            raise LockstepError(what, f"{path}:{line}", "fix the time")
        events.append(Event(behaviour, start - shift, stop - shift, subject, line))
    return sorted(events, key=lambda event: (event.start_s, event.line))


def _common(path: Path, rows: Table, what: str, value_of: Callable[[_Row, str], float]) -> float:
    """Return the value of all rows of an observation; 0 if no row has a value.

    Raises LockstepError if two rows have different values.
    """
    first_line, common = 0, 0.0
    for line, row in rows:
        value = value_of(row, f"{path}:{line}")
        if value and common and value != common:
            text = f"a {what} of {value:g} here and of {common:g} in line {first_line}"
            raise LockstepError(
                text, f"{path}:{line}", "an observation has one: export it from BORIS again"
            )
        if value and not common:
            first_line, common = line, value
    return common


class _Row(dict[str, str]):
    """The cells of a row by column; a missing column is empty.

    player  number of the player whose video counts, where several show a video
    """

    player = 1

    def __missing__(self, _: str) -> str:
        return ""

    def first(self, *names: str) -> str:
        return next((self[name].strip() for name in names if self[name].strip()), "")

    @property
    def source(self) -> str:
        """Return the videos of all players; empty if unknown."""
        return _known(self["Source"])

    @property
    def players(self) -> dict[int, str]:
        """Return {number: videos} of the players of an observation with several; else {}.

        Videos of one player, one after the other, have a semicolon in between.
        """
        found = _by_player(self.source)
        if not found:
            numbers = [name for name in self if re.fullmatch(r"Player #\d+", name)]
            found = {int(name.partition("#")[2]): self[name] for name in numbers}
        known = {number: media for number, media in found.items() if _known(media)}
        return known if len(known) > 1 else {}

    @property
    def media(self) -> str:
        """Return the path of the video; without a video, the observation id."""
        if players := self.players:
            return players.get(self.player, "")
        for name in ("Media file name", "Media file path", "Media file", "Player #1"):
            if text := _known(self[name]):
                return text.removeprefix("player #1:").strip()
        source = self.source.removeprefix("player #1:").strip()
        return source or self["Observation id"].strip()

    @property
    def has_several_videos(self) -> bool:
        """Return whether the player shows several videos, one after the other."""
        lengths = self.of_player("Media duration (s)")
        each = self.of_player("FPS", "FPS (frame/s)") + lengths
        listed = self.source.startswith("player #") and ";" in self.source
        if self.players:
            listed = ";" in self.media
        return listed or ";" in each or "|" in each

    def of_player(self, *names: str) -> str:
        """Return the part of the first known cell that is of the player: 25.000|30.000 -> 30.000"""
        text = self.first(*names)
        if not self.players:
            return text
        by_name = _by_player(text)
        parts = dict(zip(self.players, text.split("|"), strict=False))
        return (by_name or parts).get(self.player, "").strip()

    def write_points(self) -> None:
        """Replace decimal commas in the columns of numbers: 12,5 -> 12.5"""
        for name in NUMBERS:
            if name in self:
                self[name] = re.sub(r"(?<=\d),(?=\d)", ".", without_thousands(self[name].strip()))

    def check(self, where: str) -> None:
        """Raise LockstepError for an absent player, and for an event of pictures without times."""
        players = self.players
        if players and self.player not in players:
            there = ", ".join(map(str, players))
            what = f"no player {self.player}"
            raise LockstepError(what, where, f"{PLAYER} takes one of {there}")
        has_time = _known(self.first("Time", "Start (s)"))
        if not has_time and _known(self.first("Image index", "Image index start")):
            raise LockstepError("an event of pictures, without a time", where, NO_TIMES)

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


def _states(table: Table, video: str) -> Iterator[tuple[int, _Row]]:
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


def _by_player(text: str) -> dict[int, str]:
    """Return {number: text} of a text such as player #1:a.mp4|player #2:b.mp4"""
    found = {}
    for part in re.finditer(r"player #(\d+):(.*?)(?=[|; ]*player #\d+:|$)", text):
        found[int(part[1])] = part[2].strip(" |;")
    return found


Found = tuple[str, float, float, str, int]  # behaviour, start, stop, subject, line


def _paired(path: Path, table: Table) -> Iterator[Found]:
    """Pair the STARTs and STOPs of a video, in any order of time."""
    rows = [(seconds_of(row["Time"], "Time", f"{path}:{line}"), line, row) for line, row in table]
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


def _aggregated(path: Path, table: Table) -> Iterator[Found]:
    for line, row in table:
        where, (_, subject, behaviour, *_) = f"{path}:{line}", row.what
        start, stop = (
            seconds_of(row[name] or row["Start (s)"], name, where)
            for name in ("Start (s)", "Stop (s)")
        )
        if stop < start:
            raise LockstepError(f"{behaviour} stops before it starts", where, "fix the two times")
        if stop > start or row["Behavior type"].upper() == "POINT":
            yield behaviour, start, stop, subject, line


def _shift(path: Path, rows: Table, offset: str) -> float:
    """Return the offset to subtract from the times of an observation.

    Raises LockstepError without a treatment of an offset, and for two offsets to subtract.
    """
    shifts = [(_offset(row, f"{path}:{line}"), line) for line, row in rows]
    first, first_line = next((each for each in shifts if each[0]), shifts[0])
    if not first or offset == "ignore":
        return 0.0
    if offset != "subtract":
        what = f"an observation with a time offset of {first:g} s"
        todo = (
            "--offset subtract if its times include it, --offset ignore if they count from "
            "the video's start"
        )
        raise LockstepError(what, f"{path}:{first_line}", todo)
    for shift, line in shifts:
        if shift != first:
            what = f"a time offset of {shift:g} s here and of {first:g} s in line {first_line}"
            todo = "an observation has one: export it from BORIS again"
            raise LockstepError(what, f"{path}:{line}", todo)
    return first


def _offset(row: _Row, where: str) -> float:
    text = _known(row["Time offset (s)"])
    size = seconds_of(text.lstrip("+-") or "0", "Time offset (s)", where)
    return -size if text.startswith("-") else size


def _length(row: _Row, where: str) -> float:
    text = _known(row.of_player("Media duration (s)", "Total length"))
    return seconds_of(text or "0", "the media duration", where)


def _rate(row: _Row, where: str) -> float:
    """Return frames per second: 25, or player #1:25 -> 25; 0 if unknown."""
    text = _known(row.of_player("FPS", "FPS (frame/s)").rpartition(":")[2])
    try:
        value = float(text or 0)
        if 0 <= value < math.inf:
            return value
    except ValueError:
        pass
    todo = "give frames per second with a decimal point, or leave the cell empty"
    raise LockstepError(f"FPS is {text[:40]!r}", where, todo)


def _known(text: str) -> str:
    """Return the text of a cell; empty where BORIS writes that the value is unknown."""
    text = text.strip()
    if text.lower() in UNKNOWN:
        return ""
    return text


def _last_part(path: str) -> str:
    return re.split(r"[\\/]", path)[-1]


def seconds_of(text: str, name: str, where: str) -> float:
    """Convert the time in a column `name` to seconds: 12.5, or 0:00:12.5 -> 12.5

    Raises LockstepError.
    """
    try:
        value = elapsed_s(text) if ":" in text else float(text)
        if 0 <= value < MOST_S:
            return value
    except ValueError:
        pass
    todo = "give seconds since the start of the video, with a decimal point, or h:mm:ss"
    raise LockstepError(f"{name} is {text.strip()[:40]!r}", where, todo)


def _rows(path: Path) -> tuple[Rows, bool]:
    """Return the rows, and whether a comma in a number must be a decimal comma."""
    if path.suffix.lower() == ".xlsx":
        return _xlsx(path), True
    lines = text_lines(path)
    named = max(lines[:200], key=lambda line: "Behavior" in line, default="")
    delimiter = max(",;\t", key=named.count)
    return _text(path, lines, delimiter), delimiter != ","


def _text(path: Path, lines: list[str], delimiter: str) -> Rows:
    """Return the rows of a text with the first line of each.

    A quoted description may have several lines.
    """
    reader = csv.reader(io.StringIO("\n".join(lines)), delimiter=delimiter)
    rows = []
    line = 1
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
    """Return the rows of the first sheet as text.

    Raises LockstepError for events on another sheet.
    """
    try:
        import openpyxl
    except ImportError as error:
        what = f"openpyxl is needed to read a spreadsheet: {error}"
        raise LockstepError(what, str(path), "pip install openpyxl, or export as CSV") from None
    try:
        book = openpyxl.load_workbook(path, read_only=True, data_only=True)
        sheets = [_sheet(sheet) for sheet in book.worksheets]
        book.close()
    except Exception as error:  # openpyxl raises many types for damaged bytes
        why = str(error).splitlines()[0][:120] if str(error).strip() else type(error).__name__
        raise LockstepError(
            f"no spreadsheet: {why}", str(path), "export it from BORIS again"
        ) from None
    rows, *others = sheets
    if any(map(_header, others)):
        what = "events on another sheet than the first one"
        raise LockstepError(what, str(path), "save the sheet of each observation as a file")
    for line, cells in rows:
        check_text(" ".join(cells).replace("\n", " "), path.with_name(f"{path.name}:{line}"))
    return rows


def _sheet(sheet: Any) -> Rows:
    rows = enumerate(sheet.iter_rows(values_only=True), 1)
    return [(n, [_cell(value) for value in cells]) for n, cells in rows]


def _cell(value: Any) -> str:
    return "" if value is None else str(value)
