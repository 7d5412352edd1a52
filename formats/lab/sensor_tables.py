"""Read tables of sensor samples, one row per sample.

A table is text with any separator, gzipped or not, or parquet. Blocks of lines are read in turn: a
day of one person at 100 Hz takes seconds and little more memory than its numbers. Errors name file,
line and column.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine.contract import LockstepError
from formats.arrays import CONTROL, encoding_of
from formats.cells import (
    DECIMAL_COMMA,
    SECONDS,
    is_index_name,
    is_missing,
    is_number,
    split_any_unit,
    split_unit,
    unit_key,
    without_thousands,
)
from formats.tables import Layout, Row, blocks, find_head
from formats.times import DATE, TimeUnit, dates, find_unit, over_midnight, unit_of_values

MOST = float(np.finfo(np.float32).max)
TIMES = """time timestamp datetime date_time time_stamp seconds_elapsed elapsed elapsed_time
time_since_start epoch epoc unix_time logging_time loggingtime date t"""
ROLES = ("time", "label", "subject", "recording", "sensor")
NAMES = ROLES[1:]
"""Roles whose columns hold names."""

GUESSES = {
    "time": tuple(TIMES.split()),
    "label": ("label", "activity", "class", "annotation"),
    "subject": (
        *("subject", "user", "person", "participant"),
        *("subject_id", "user_id", "person_id", "participant_id"),
    ),
    "recording": ("recording", "session", "trial"),
    "sensor": (),
}
"""Default names of the columns of each role, without a unit, as `simple_name` returns names."""

EMPTY = "give a file with a row for each sample"
PARQUET = (".parquet", ".pq")
TABLES = (".csv", ".tsv", ".txt", ".dat", *PARQUET)
"""Endings of the names of tables, without `.gz`."""
SAMPLE = 50
"""Rows from which the kind of each column is found."""
FEW_NAMES = 64
"""Most values of a column that may name the sensors of the rows."""


class StatedUnit(NamedTuple):
    """The unit of a channel, or an empty text, and the file:line of the header."""

    unit: str
    where: str


@dataclass
class Reading:
    """Settings of the reader; names of columns as in the header.

    layout    header, separator and comments of a text
    channels  names or patterns with *; empty: all columns of numbers without another role, set by
              the first file
    time      column of the time; "" is guessed, None is none; likewise label, subject and
              recording, which may be several columns, with commas
    sensor    column that names the sensor of a row, or None
    unit      of the time: see formats/times.py; "" is found in the name and the numbers
    units     unit of each channel, and the place that states it; set by the first file
    ignored   {role: reason}: a column of this role is found by its name, and not read
    missing   whether a channel's cell may be empty or NaN
    skip      whether to skip unreadable lines
    progress  callback with the number of lines read
    """

    layout: Layout = field(default_factory=Layout)
    channels: list[str] = field(default_factory=list)
    time: str | None = ""
    label: str | None = ""
    subject: str | None = ""
    recording: str | None = ""
    sensor: str | None = None
    unit: str = ""
    units: dict[str, StatedUnit] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    missing: bool = False
    skip: bool = False
    progress: Callable[[int], Any] = bool


@dataclass
class Sheet:
    """The rows of a file.

    lines   (N,) int64, line of each row in its file, or the row number from 1
    time    (N,) float64 in seconds since the first row, or None
    values  (N, C) float64; NaN is missing
    texts   {label, subject, recording: ((N,) int64 codes, names)}, for the columns of the file
    used    {role: column} of all columns that were read, for messages
    notes   sentences on skipped or changed data
    sensors  the sensor of each channel, after a join of several sensors
    others  {column: (codes, names)} of columns of few values that are not read, as `texts`
    start_s  time of the first row on the clock of the file, in seconds; 0 without times
    rate_hz  rate that the lines above the header state, or None
    """

    path: Path
    lines: np.ndarray
    time: np.ndarray | None
    values: np.ndarray
    channels: list[str]
    texts: dict[str, tuple[np.ndarray, list[str]]]
    used: dict[str, str]
    notes: list[str]
    start_s: float = 0.0
    rate_hz: float | None = None
    others: dict[str, tuple[np.ndarray, list[str]]] = field(default_factory=dict)
    sensors: list[str] = field(default_factory=list)

    def recordings(self) -> list[np.ndarray]:
        """Return the rows of each recording of each person, in the order of the first rows."""
        none = np.zeros(len(self.values), np.int64), [""]
        people, names = self.texts.get("subject", none)
        recordings, _ = self.texts.get("recording", none)
        whole = people + len(names) * recordings
        _, first = np.unique(whole, return_index=True)
        return [np.flatnonzero(whole == whole[row]) for row in np.sort(first)]

    def at(self, row: int) -> str:
        """Return file:line of a row."""
        return f"{self.path}:{self.lines[row]}"


def read(path: Path, how: Reading) -> Sheet:
    """Read a table. Raises LockstepError.

    `how.channels` must equal the channels of an earlier file, if any.
    """
    return _read_parquet(path, how) if path.suffix.lower() in PARQUET else _read_text(path, how)


# ---- columns
# --------------------------------------------------------------------------------------------------


@dataclass
class Places:
    """The columns of each role, as numbers of columns.

    more     further columns that name the recording
    ignored  {column: reason} of columns with a role that are not read
    """

    channels: list[int]
    roles: dict[str, int]
    more: list[int]
    ignored: dict[int, str]

    def used(self, header: Sequence[str]) -> dict[str, str]:
        """Return {role: name of the column}."""
        return {role: header[c] or f"of column {c + 1}" for role, c in self.roles.items()}

    def names_of(self, role: str, columns: Sequence[Sequence[str]]) -> Sequence[str]:
        """Return the texts of a role; several columns of the recording are joined."""
        if role != "recording" or not self.more:
            return columns[self.roles[role]]
        chosen = [columns[c] for c in (self.roles[role], *self.more)]
        return [" ".join(cells) for cells in zip(*chosen, strict=True)]

    def others(self, header: Sequence[str]) -> list[int]:
        """Return the columns without a use, but for row numbers."""
        used = {*self.channels, *self.roles.values(), *self.more, *self.ignored}
        return [c for c, name in enumerate(header) if c not in used and not is_index_name(name)]

    def notes(self, path: Path, header: Sequence[str]) -> list[str]:
        """Return a sentence on each column that is not read."""
        columns = [(header[c], reason) for c, reason in self.ignored.items()]
        return [f"{path}: {name} is left out: {reason}" for name, reason in columns]


def _choose(header: Sequence[str], how: Reading, where: str, numeric: Sequence[bool]) -> Places:
    """Return the columns of a table. The function stores the names of the channels in `how`.

    Raises LockstepError with the place `where` for a column that is missing.
    """
    roles, more = {}, list[int]()
    for role in GUESSES:
        asked = getattr(how, role)
        if role == "recording" and asked and asked not in header:
            asked, *names = [name.strip() for name in asked.split(",")]
            more = [c for name in names if (c := _place(header, role, name, where)) is not None]
        if (place := _place(header, role, asked, where)) is not None:
            roles[role] = place
    ignored = {roles.pop(role): why for role, why in how.ignored.items() if role in roles}
    if how.time is None and (place := _place(header, "time", "", where)) is not None:
        ignored[place] = "--time none"
    numeric = [is_numeric and c not in ignored for c, is_numeric in enumerate(numeric)]
    taken = {*roles.values(), *more}
    free = [c for c, name in enumerate(header) if name and c not in taken]
    chosen: list[int] = []
    for pattern in how.channels or [""]:
        found = _matching(header, free, pattern, numeric)
        if not found:
            _refuse_other_unit(header, pattern, how, where)
            what = f"no column {pattern!r} for a channel"
            if not pattern:
                what = "no column of numbers for a channel"
            some = ", ".join(header[c] for c in free[:12]) or "other columns"
            raise LockstepError(what, where, f"--channels may name {some}")
        chosen += [c for c in found if c not in chosen]
    ignored = {c: why for c, why in ignored.items() if c not in chosen}
    return Places(chosen, roles, more, ignored)


def _place(header: Sequence[str], role: str, asked: str | None, where: str) -> int | None:
    """Return the column of a role, or None. Raises LockstepError if the asked column is missing."""
    if asked is None:
        return None
    if asked:
        if asked in header:
            return header.index(asked)
        some = ", ".join(header[:12])
        if len(header) > 12:
            some += ", ..."
        raise LockstepError(f"no column {asked!r}", where, f"--{role} may name {some}")
    simple = [split_unit(name).name if name else "" for name in header]
    for name in GUESSES[role]:
        if name in simple:
            return simple.index(name)
    stamps = [c for c, name in enumerate(simple) if "timestamp" in name]
    return stamps[0] if role == "time" and stamps else None


def _matching(
    header: Sequence[str], free: Sequence[int], pattern: str, numeric: Sequence[bool]
) -> list[int]:
    """Return the free columns that a pattern names; an empty pattern names columns of numbers.

    pandas gives row numbers the name `Unnamed: 0`.
    """
    if not pattern:
        return [c for c in free if numeric[c] and not header[c].startswith("Unnamed: ")]
    exact = [c for c in free if header[c] == pattern]
    return exact or [c for c in free if fnmatchcase(header[c], pattern)]


# ---- units
# --------------------------------------------------------------------------------------------------

ONE_UNIT = "convert one of the files, or take the files of one unit: --files"


def _check_units(how: Reading, path: Path, units: Sequence[str], where: str) -> list[str]:
    """Compare the units of the channels with those of the first file; return sentences.

    units  of `how.channels`; empty if unknown
    Raises LockstepError for two units of one channel. A channel with a unit in one file only is
    named in a sentence.
    """
    notes = []
    for name, unit in zip(how.channels, units, strict=True):
        first = how.units.setdefault(name, StatedUnit(unit, where))
        if unit and first.unit and unit_key(unit) != unit_key(first.unit):
            _refuse_units(name, StatedUnit(unit, where), first)
        if bool(unit) != bool(first.unit):
            here, there = unit or "no unit", first.unit or "none"
            notes.append(f"{path}: {name} has {here}, and {there} in {first.where}: one unit?")
    return notes[:1]


def _refuse_units(name: str, unit: StatedUnit, first: StatedUnit) -> None:
    what = f"{name} is in {unit.unit}, and in {first.unit} in {first.where}"
    file = Path(first.where.rpartition(":")[0]).name
    raise LockstepError(what, unit.where, f"{ONE_UNIT} {shlex.quote(file)}")


def _refuse_other_unit(header: Sequence[str], asked: str, how: Reading, where: str) -> None:
    """Raise LockstepError if a column differs from a channel of an earlier file in its unit."""
    if asked not in how.units:
        return
    wanted = split_any_unit(asked)
    for column in header:
        found = split_any_unit(column)
        if found.unit and wanted.unit and found.name == wanted.name:
            first = StatedUnit(wanted.unit, how.units[asked].where)
            _refuse_units(found.name, StatedUnit(found.unit, where), first)


# ---- text
# --------------------------------------------------------------------------------------------------


def _read_text(path: Path, how: Reading) -> Sheet:
    parser, first = None, 1
    for block in blocks(path):
        if parser is None:
            parser = _Parser(path, block, how)
        parser.add(block, first)
        first += len(block)
        how.progress(len(block))
    if parser is None or not parser.lines:
        raise LockstepError("no rows of data", str(path), EMPTY)
    return parser.sheet()


class _Parser:
    """Collects the selected columns from blocks of lines."""

    def __init__(self, path: Path, block: list[str], how: Reading):
        self.path, self.how = path, how
        self.head = find_head(path, block, how.layout)
        self.header = self.head.names
        if self.head.nameless:
            where = self.head.where(self.head.line)
            todo = _cure_of_columns(self._sample(block[self.head.line - 1 :], 1))
            raise LockstepError("the first line has numbers, no names", where, todo)
        columns = self._sample(block)
        numeric = [*map(_is_numeric, columns)]
        where = self.head.where(max(1, self.head.line))
        self.places = _choose(self.header, how, where, numeric)
        self._choose_clock(columns, numeric)
        self.channels = [self.header[c] for c in self.places.channels]
        others = [c for c in self.places.others(self.header) if c != self.date]
        self.texts = "" if how.channels else ", ".join(self.header[c] for c in others)
        how.channels = self.channels
        units = [
            self.head.units[c] or split_any_unit(self.header[c]).unit for c in self.places.channels
        ]
        self.unit_notes = _check_units(how, path, units, where)
        self.lines: list[np.ndarray] = []
        self.time: list[np.ndarray] = []
        self.values: list[np.ndarray] = []
        self.names = {role: _Names() for role in NAMES if role in self.places.roles}
        self.others = {c: _Names() for c in others}
        self.bad: list[str] = []
        self.comma, self.point = "", ""  # the first number of each form

    def _sample(self, block: list[str], first: int = 0) -> list[list[str]]:
        """Return the first cells of each column. Raises LockstepError for a table without rows.

        first  the line of the first row; 0 for the line below the header
        """
        begin = (first or self.head.first) - 1
        below = [text for text in block[begin:] if self.head.is_row(text)]
        rows = self.head.split(below[:SAMPLE], self.head.first)
        if not any(map(any, rows)):
            raise LockstepError("no rows of data", str(self.path), EMPTY)
        return [[row[c] for row in rows if len(row) > c] for c in range(len(self.header))]

    def _choose_clock(self, columns: list[list[str]], numeric: Sequence[bool]) -> None:
        """Choose the column of the time if none has a name, a column of dates, and the unit.

        An index of pandas without a name may be the clock.
        """
        roles, self.date = self.places.roles, None
        guessed = self.how.time == "" and "time" not in roles
        if guessed and self.header[:1] == [""] and _is_clock(columns[0], numeric[0]):
            roles["time"] = 0
        self.unit = TimeUnit(self.how.unit or "s")
        if "time" not in roles:
            return
        simple = [split_unit(name).name for name in self.header]
        place = roles["time"] if self.how.time else self._readable(roles["time"], simple, columns)
        roles["time"] = place
        cells = columns[place]
        self.unit = TimeUnit(self.how.unit)
        if not self.how.unit:
            self.unit = find_unit(self.head.units[place], cells)
        if self.unit.unit == "clock" and "date" in simple:
            self.date = simple.index("date")
            cells = [" ".join(pair) for pair in zip(columns[self.date], cells, strict=False)]
            self.unit = find_unit("", cells)
        if self.unit.cure:
            what = f"{self.places.used(self.header)['time']} is {cells[0].strip()[:40]!r}"
            where = self.head.where(self.head.first, place)
            raise LockstepError(what, where, self.unit.cure)

    def _readable(self, place: int, simple: list[str], columns: list[list[str]]) -> int:
        """Return the first column with the name of a time whose texts are times."""
        others = [simple.index(name) for name in GUESSES["time"] if name in simple]
        for c in [place, *others]:
            texts = [cell for cell in columns[c] if not is_number(cell)]
            if len(texts) < len(columns[c]) / 2 or find_unit("", texts).unit != "s":
                return c
        return place

    def add(self, block: list[str], first: int) -> None:
        head = self.head
        numbers = range(max(first, head.first), first + len(block))
        kept = [line for line in numbers if head.is_row(block[line - first])]
        rows = head.split([block[line - first] for line in kept], first)
        lines = np.array(kept, dtype=np.int64)
        bad: dict[int, str] = {}  # {line: error}
        if {*map(len, rows)} != {len(self.header)}:
            rows, lines = self._fit(rows, lines, bad)
        columns = [*zip(*rows, strict=True)] if rows else [()] * len(self.header)
        time = self._time(columns, lines, bad)
        channels = self.places.channels
        values = np.stack([self._numbers(columns[c], c, lines, bad) for c in channels], 1)
        for row, n in [] if self.how.missing else np.argwhere(np.isnan(values)).tolist():
            todo = "--missing fill draws a line over it, --missing cut cuts the recording there"
            cell = columns[channels[n]][row]
            bad.setdefault(lines[row], self._cell_error(cell, channels[n], lines[row], todo))
        if bad and not self.how.skip:
            raise LockstepError(f"{bad[min(bad)]}, or --bad-lines skip leaves out such lines")
        self.bad += [bad[line] for line in sorted(bad)]
        kept_rows = ~np.isin(lines, [*bad])
        self.lines.append(lines[kept_rows])
        self.values.append(values[kept_rows])
        if time is not None:
            self.time.append(time[kept_rows])
        for role, names in self.names.items():
            names.add(self.places.names_of(role, columns), kept_rows)
        for c in [*self.others]:
            self.others[c].add(columns[c], kept_rows)
            if len(self.others[c].known) > FEW_NAMES:
                del self.others[c]

    def _fit(
        self, rows: list[list[str]], lines: np.ndarray, bad: dict[int, str]
    ) -> tuple[list[list[str]], np.ndarray]:
        """Return the rows that are not blank and have a cell for each column.

        Rows with too many cells go to `bad`.
        """
        count, full = len(self.header), []
        for n, row in enumerate(rows):
            try:
                self.head.check_width(Row(int(lines[n]), row))
            except LockstepError as error:
                bad[lines[n]] = str(error)
                continue
            if any(cell.strip() for cell in row):
                rows[n] = [*row[:count], *[""] * (count - len(row))]
                full.append(n)
        return [rows[n] for n in full], lines[full]

    def _cell_error(self, cell: str, place: int, line: int, todo: str) -> str:
        name, cell = self.header[place], cell.strip()
        what = f"{name} is {cell[:40]!r}" if cell else f"{name} is empty"
        return str(LockstepError(what, f"{self.path}:{line}, column {place + 1}", todo))

    def _numbers(
        self, cells: Sequence[str], place: int, lines: np.ndarray, bad: dict[int, str]
    ) -> np.ndarray:
        """Return (N,) float64, NaN for a missing cell; invalid numbers go to `bad`."""
        try:
            values = np.fromiter(map(float, cells), np.float64, len(cells))
            if self.head.separator != "," and not self.point:
                self.point = next((cell for cell in cells if "." in cell), "")
        except ValueError:
            values = np.array([self._number(cell) for cell in cells])
        for row in np.flatnonzero(np.abs(values) > MOST).tolist():
            todo = "write a number that float32 has" if is_number(cells[row]) else "write a number"
            bad.setdefault(lines[row], self._cell_error(cells[row], place, lines[row], todo))
        return values

    def _number(self, cell: str) -> float:
        """Return a cell's number, NaN for a missing cell, infinity for an invalid number."""
        cell = without_thousands(cell.strip())
        if self.head.separator != "," and DECIMAL_COMMA.fullmatch(cell):
            self.comma, cell = self.comma or cell.strip(), cell.replace(",", ".")
        elif "." in cell:
            self.point = self.point or cell.strip()
        try:
            return float(cell)
        except ValueError:
            return float("nan" if is_missing(cell) else "inf")

    def _time(
        self, columns: Sequence[Sequence[str]], lines: np.ndarray, bad: dict[int, str]
    ) -> np.ndarray | None:
        """Return (N,) float64 in the table's unit; invalid times go to `bad`."""
        if "time" not in self.places.roles:
            return None
        place = self.places.roles["time"]
        cells, unit = columns[place], self.unit.unit
        todo = "write a number"
        clock = "it looks like a date: --time-unit datetime, or a format such as %d.%m.%Y"
        if unit in SECONDS:
            values = self._numbers(cells, place, lines, bad)
        else:
            if self.date is not None:
                cells = [" ".join(pair) for pair in zip(columns[self.date], cells, strict=True)]
            values = dates(cells, unit)
            todo = "write it as 2026-11-23 07:09:38.25, or give its form, as for strptime"
            clock = f"{todo}, to --time-unit"
        for row in np.flatnonzero(~np.isfinite(values)).tolist():
            cure = clock if DATE.search(cells[row]) else todo
            bad[lines[row]] = self._cell_error(cells[row], place, lines[row], cure)
        return values

    def sheet(self) -> Sheet:
        lines, values = np.concatenate(self.lines), np.concatenate(self.values)
        time, start_s = None, 0.0
        if self.time:
            time, start_s = _since_first(np.concatenate(self.time), self.unit.unit)
        texts = {role: names.stripped(self.path) for role, names in self.names.items()}
        others = {self.header[c]: names.collected() for c, names in self.others.items()}
        used, notes = self.places.used(self.header), self._notes()
        rate_hz = self.head.rate_hz
        return Sheet(
            *(self.path, lines, time, values, self.channels, texts, used, notes, start_s, rate_hz),
            others,
        )

    def _notes(self) -> list[str]:
        """Return sentences on what was left out or changed.

        Raises LockstepError for decimal commas beside decimal points: 1,234 may be a thousand.
        """
        notes = self.places.notes(self.path, self.header) + self.unit_notes
        if self.texts:
            todo = "--channels names the channels, --label, --subject and --recording the others"
            notes.append(f"{self.path}: {self.texts} left out, no numbers: {todo}")
        if self.bad:
            count = len(self.bad)
            notes.append(f"{self.path}: {count} lines are left out, the first: {self.bad[0]}")
        if self.comma and self.point:
            what = f"numbers with a comma and with a point: {self.comma} and {self.point}"
            raise LockstepError(
                what, str(self.path), "write a decimal point in all, and no thousands"
            )
        if self.comma:
            notes.append(f"{self.path}: commas in numbers are read as decimal points")
        if self.unit.note:
            notes.append(f"{self.path}: {self.unit.note}")
        encoding = self.how.layout.encoding or encoding_of(self.path)
        if encoding == "cp1252":
            notes.append(f"{self.path}: read as cp1252, because the text is no UTF-8")
        return notes


def _cure_of_columns(columns: Sequence[Sequence[str]]) -> str:
    """Return the option that names the columns of a file without a header.

    Dates, or else the first numbers that rise by one step, are the times. Which text is a person
    and which is a label the user decides.
    """
    numeric = [*map(_is_numeric, columns)]
    dated = [c for c, n in enumerate(numeric) if not n and _is_clock(columns[c], False)]
    rising = [c for c, n in enumerate(numeric) if n and _rises_evenly(columns[c])]
    clock = [*dated, *rising][:1]
    measured = [c for c, n in enumerate(numeric) if n and c not in clock]
    axes = [f"c{n}" for n in range(1, len(measured) + 1)]
    if len(measured) <= 3:
        axes = ["x", "y", "z"][: len(measured)]
    names = dict(zip(measured, axes, strict=True)) | dict.fromkeys(clock, "time")
    texts = [c for c in range(len(columns)) if c not in names]
    names |= {c: f"text{n}" for n, c in enumerate(texts, 1)}
    cure = f"--columns {','.join(names[c] for c in range(len(columns)))} names them"
    if texts:
        cure += "; write label or subject in place of text1 where a text is a label or a person"
    return cure


def _rises_evenly(cells: Sequence[str]) -> bool:
    """Return whether the numbers of a column rise by nearly equal steps."""
    values = np.array([float(cell.replace(",", ".")) for cell in cells if not is_missing(cell)])
    steps = np.diff(values)
    return len(steps) > 1 and bool((steps > 0).all() and np.ptp(steps) < 0.1 * np.median(steps))


def _is_numeric(cells: Sequence[str]) -> bool:
    """Return whether most cells that are not missing are numbers."""
    known = [cell for cell in cells if not is_missing(cell)]
    return 2 * sum(map(is_number, known)) > len(known)


def _is_clock(cells: Sequence[str], numeric: bool) -> bool:
    """Return whether an unnamed column has times: dates, or numbers that rise by fractions."""
    if not numeric:
        return find_unit("", cells).unit != "s"
    values = np.array([float(cell.replace(",", ".")) for cell in cells if not is_missing(cell)])
    fractions = (values != np.round(values)).any()
    return bool(fractions and len(values) > 2 and (np.diff(values) > 0).all())


class _Names:
    """The texts of a column as numbers; `known` is {text: number}."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}
        self.codes: list[np.ndarray] = []

    def add(self, cells: Sequence[str], kept: np.ndarray) -> None:
        """Add the cells of some rows; `kept`, (N,) bool, selects the rows."""
        known = self.known
        codes = [known.setdefault(cell, len(known)) for cell in cells]
        self.codes.append(np.array(codes, dtype=np.int64)[kept])

    def collected(self) -> tuple[np.ndarray, list[str]]:
        """Return the (N,) codes, and the texts by code."""
        return np.concatenate(self.codes), [text.strip() for text in self.known]

    def stripped(self, path: Path) -> tuple[np.ndarray, list[str]]:
        """Return the codes and the names, as `_stripped`."""
        return _stripped(np.concatenate(self.codes), [*self.known], path)


def _stripped(codes: np.ndarray, names: list[str], path: Path) -> tuple[np.ndarray, list[str]]:
    """Merge names that differ only in blanks; return codes and names.

    Raises LockstepError for control characters.
    """
    unique: dict[str, int] = {}
    table = np.array(
        [unique.setdefault(name.strip(), len(unique)) for name in names], dtype=np.int64
    )
    if strange := [name for name in unique if CONTROL.search(name) or len(name.splitlines()) > 1]:
        raise LockstepError(
            f"control characters in {strange[0][:40]!r}",
            str(path),
            "save it as plain text in UTF-8",
        )
    return table[codes], [*unique]


def _since_first(time: np.ndarray, unit: str) -> tuple[np.ndarray, float]:
    """Convert (N,) float64 in `unit` to seconds since the first time. Return also the first time.

    A float64 of seconds since 1970 has seven digits after the decimal point.
    """
    factor = SECONDS.get(unit, 1e-6)
    since = (time - time[:1]) * factor
    if unit == "clock":
        since = over_midnight(since)
    return since, float(time[0] * factor) if len(time) else 0.0


# ---- parquet
# --------------------------------------------------------------------------------------------------


def _read_parquet(path: Path, how: Reading) -> Sheet:
    try:
        import pyarrow as pa
    except ImportError:
        raise LockstepError("pyarrow is not installed", str(path), "pip install pyarrow") from None
    try:
        parquet = _ParquetReader(path, how)
    except (OSError, pa.ArrowException) as error:
        what = f"no whole parquet file: {str(error).splitlines()[0][:120]}"
        raise LockstepError(what, str(path), "write it again") from None
    return parquet.sheet()


class _ParquetReader:
    """Reads the chosen columns of a parquet file.

    kinds     type of each column, by name
    numeric   whether the column holds numbers, for each column
    header    names of the columns
    places    columns by role
    channels  names of the channels
    used      {role: name} of the columns with a role
    coded     names of the columns without a use that may name the sensors of the rows
    table     the columns that are read
    """

    def __init__(self, path: Path, how: Reading):
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path, self.how = path, how
        file = pq.ParquetFile(path)
        self.kinds = {field.name: field.type for field in file.schema_arrow}
        self.numeric = [
            pa.types.is_integer(t) or pa.types.is_floating(t) or pa.types.is_decimal(t)
            for t in self.kinds.values()
        ]
        self.header = [*self.kinds]
        self.places = self._places()
        self.channels = [self.header[c] for c in self.places.channels]
        self.used = self.places.used(self.header)
        others = [self.header[c] for c in self.places.others(self.header)]
        self.coded = [name for name in others if _may_be_codes(self.kinds[name])]
        self.more = [self.header[c] for c in self.places.more]
        names = dict.fromkeys([*self.channels, *self.used.values(), *self.more, *self.coded])
        self.table = file.read(columns=[*names])

    def _places(self) -> Places:
        """Choose the columns. An index of times without a name is the time."""
        import pyarrow as pa

        header = ["" if name.startswith("__index_level_") else name for name in self.kinds]
        places = _choose(header, self.how, str(self.path), self.numeric)
        if self.how.time == "" and "time" not in places.roles and "" in header:
            index = header.index("")
            kind = self.kinds[self.header[index]]
            if pa.types.is_timestamp(kind) or pa.types.is_duration(kind):
                places.roles["time"] = index
        return places

    def sheet(self) -> Sheet:
        """Return the rows. Raises LockstepError for a cell that is empty or no number."""
        self.how.channels = self.channels
        units = [split_any_unit(name).unit for name in self.channels]
        unit_notes = _check_units(self.how, self.path, units, str(self.path))
        values = np.stack([self._numbers(name) for name in self.channels], 1)
        time, clock = self._time()
        texts, others = self._names()
        self._check_channels(values)
        if time is not None:
            self._check(self.used["time"], ~np.isfinite(time), "fill it in")
        if not len(values):
            raise LockstepError("no rows of data", str(self.path), EMPTY)
        start_s = 0.0
        if time is not None:
            time, start_s = _since_first(time, clock.unit)
        self.how.progress(len(values))
        notes = self.places.notes(self.path, self.header) + unit_notes
        if clock.note:
            notes.append(f"{self.path}: {clock.note}")
        lines = np.arange(1, len(values) + 1)
        sheet = Sheet(
            self.path, lines, time, values, self.channels, texts, self.used, notes, start_s
        )
        sheet.others = others
        return sheet

    def _numbers(self, name: str) -> np.ndarray:
        """Return the numbers of a column, (N,) float64."""
        import pyarrow as pa

        if not self.numeric[self.header.index(name)]:
            todo = "give columns of numbers, or --time-unit datetime for a time"
            raise LockstepError(f"column {name} is {self.kinds[name]}", str(self.path), todo)
        return np.asarray(self.table[name].cast(pa.float64()).to_numpy(), np.float64)

    def _texts(self, name: str) -> list[str]:
        """Return the cells of a column as texts; an empty cell is an empty text."""
        import pyarrow as pa
        import pyarrow.compute as pc

        cells: list[str] = pc.fill_null(self.table[name].cast(pa.string()), "").to_pylist()
        return cells

    def _time(self) -> tuple[np.ndarray | None, TimeUnit]:
        """Return the times, (N,) float64 in the unit or in microseconds, and the unit; None without
        a column of times."""
        import pyarrow as pa

        unit = self.how.unit
        name = self.used.get("time")
        if not name:
            return None, TimeUnit(unit)
        kind = self.kinds[name]
        if pa.types.is_timestamp(kind):
            return self._microseconds(name, pa.timestamp("us")), TimeUnit("datetime")
        if pa.types.is_duration(kind):
            return self._microseconds(name, pa.duration("us")), TimeUnit("duration")
        if self.numeric[self.header.index(name)] and unit in ("", *SECONDS):
            time = self._numbers(name)
            if unit:
                return time, TimeUnit(unit)
            return time, unit_of_values(split_unit(name).unit, time[:SAMPLE])
        cells = self._texts(name)
        clock = TimeUnit(unit)
        if not unit:
            clock = find_unit("", cells[:SAMPLE])
        if clock.cure or clock.unit in SECONDS:
            cure = clock.cure or "give columns of numbers, or --time-unit datetime for a time"
            raise LockstepError(f"column {name} is {kind}", str(self.path), cure)
        return dates(cells, clock.unit), clock

    def _microseconds(self, name: str, kind: Any) -> np.ndarray:
        """Return a column of times or durations as microseconds, (N,) float64."""
        import pyarrow as pa

        whole = self.table[name].cast(kind, safe=False).cast(pa.int64())
        return np.asarray(whole.to_numpy(), np.float64)

    def _names(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return `Sheet.texts` and `Sheet.others`."""
        roles = [role for role in NAMES if role in self.used]
        named = [*self.coded, *(self.used[role] for role in roles), *self.more]
        columns = {name: self._texts(name) for name in dict.fromkeys(named)}
        by_place = [columns.get(name, []) for name in self.header]
        texts = {}
        for role in roles:
            cells = self.places.names_of(role, by_place)
            texts[role] = _names_in(cells).stripped(self.path)
        others = {}
        for name in self.coded:
            found = _names_in(columns[name]).collected()
            if len(found[1]) <= FEW_NAMES:
                others[name] = found
        return texts, others

    def _check_channels(self, values: np.ndarray) -> None:
        """Raise LockstepError for a cell that is empty or no number, unless cells may be missing;
        for an infinite number in any case."""
        todo = "--missing fill draws a line over it, --missing cut cuts there"
        for name, column in zip(self.channels, values.T, strict=True):
            wrong = np.isinf(column) if self.how.missing else ~np.isfinite(column)
            self._check(name, wrong, todo)

    def _check(self, name: str, wrong: np.ndarray, todo: str) -> None:
        rows = np.flatnonzero(wrong)
        if len(rows):
            where = f"{self.path}, row {rows[0] + 1}, column {name}"
            raise LockstepError(f"{name} is empty or no number", where, todo)


def _may_be_codes(kind: Any) -> bool:
    """Return whether a column of parquet may name the sensors of the rows, by its type."""
    import pyarrow as pa

    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return text or pa.types.is_dictionary(kind) or pa.types.is_integer(kind)


def _names_in(cells: Sequence[str]) -> _Names:
    names = _Names()
    names.add(cells, np.ones(len(cells), bool))
    return names
