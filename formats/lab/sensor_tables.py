"""Read tables of sensor samples, one row per sample.

A table is text with any separator, gzipped or not, or parquet. Blocks of lines are read in turn: a
day of one person at 100 Hz takes seconds and little more memory than its numbers. Errors name file,
line and column.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import itertools
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any

import numpy as np

from engine.contract import LockstepError
from formats.arrays import CONTROL

MISSING = {"", "nan", "na", "n/a", "null", "none", "?", "-"}
MOST = float(np.finfo(np.float32).max)
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
GUESSES = {
    "time": ("time", "time_s", "timestamp", "datetime", "t"),
    "label": ("label", "activity", "class", "annotation"),
    "subject": ("subject", "user", "person", "participant"),
    "recording": ("recording", "session", "trial"),
}
"""Default column names of each role, in upper or lower case."""

LINES = 1 << 13
"""Lines of text in memory at once."""

DECIMAL_COMMA = re.compile(r"\s*[+-]?\d*,\d+([eE][+-]?\d+)?\s*")
EMPTY = "give a file with a row for each sample"
PARQUET = (".parquet", ".pq")


@dataclass
class Reading:
    """Settings of the reader; names of columns as in the header.

    columns   names for files without a header; empty: the first line is the header
    channels  names or patterns with *; empty: all columns of numbers without another role, set by
              the first file
    time      column of the time; "" is guessed, None is none; likewise label, subject and recording
    unit      of the time: one of UNITS, `datetime` (ISO 8601), or a format of strptime
    missing   whether a channel's cell may be empty or NaN
    skip      whether to skip unreadable lines
    tell      callback with the number of lines read
    """

    columns: list[str] = field(default_factory=list)
    channels: list[str] = field(default_factory=list)
    time: str | None = ""
    label: str | None = ""
    subject: str | None = ""
    recording: str | None = ""
    unit: str = "s"
    separator: str = ""
    missing: bool = False
    skip: bool = False
    tell: Callable[[int], Any] = bool


@dataclass
class Sheet:
    """The rows of a file.

    lines   (N,) int64, line of each row in its file, or the row number from 1
    time    (N,) float64 in seconds since the first row, or None
    values  (N, C) float64; NaN is missing
    texts   {label, subject, recording: ((N,) int64 codes, names)}, for the columns of the file
    used    {role: column} of all columns that were read, for messages
    notes   sentences on skipped or changed data
    """

    path: Path
    lines: np.ndarray
    time: np.ndarray | None
    values: np.ndarray
    channels: list[str]
    texts: dict[str, tuple[np.ndarray, list[str]]]
    used: dict[str, str]
    notes: list[str]

    def at(self, row: int) -> str:
        """Return file:line of a row."""
        return f"{self.path}:{self.lines[row]}"


def read(path: Path, how: Reading) -> Sheet:
    """Read a table. Raises LockstepError.

    `how.channels` must equal the channels of an earlier file, if any.
    """
    return _read_parquet(path, how) if path.suffix.lower() in PARQUET else _read_text(path, how)


def opened(path: Path, encoding: str = "utf-8-sig") -> IO[str]:
    """Open a text file, gzipped or not."""
    return (
        gzip.open(path, "rt", encoding=encoding)
        if path.suffix == ".gz"
        else open(path, encoding=encoding)
    )


def blocks(path: Path, lines: int = LINES, encoding: str = "utf-8-sig") -> Iterator[list[str]]:
    """Yield the lines of a text file, in lists. Raises LockstepError."""
    todo = "fetch it again, or save it as text in UTF-8"
    try:
        with opened(path, encoding) as file:
            while block := list(itertools.islice(file, lines)):
                yield block
    except UnicodeDecodeError:
        raise LockstepError("not a text file", str(path), "save it as UTF-8") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise LockstepError(f"no whole .gz file: {error}", str(path), todo) from None
    except OSError as error:
        raise LockstepError(f"cannot read: {error.strerror or error}", str(path), todo) from None


# ---- columns
# --------------------------------------------------------------------------------------------------


def _choose(header: list[str], how: Reading, path: Path, numeric: Sequence[bool]) -> dict[str, Any]:
    """Return {time, label, subject, recording: column index or None, channels: indices}.

    The function stores the names in `how`.
    """
    if twice := [name for c, name in enumerate(header) if name and name in header[:c]]:
        raise LockstepError(
            f"the header names {twice[0]} twice", f"{path}:1", "name each column once"
        )
    places: dict[str, Any] = {}
    for what, names in GUESSES.items():
        asked = getattr(how, what)
        found = [
            name for name in header if name == asked or (asked == "" and name.lower() in names)
        ]
        if asked and not found:
            some = ", ".join(header[:12]) + (", ..." if len(header) > 12 else "")
            raise LockstepError(f"no column {asked!r}", f"{path}:1", f"--{what} may name {some}")
        found.sort(key=lambda name: names.index(name.lower()) if name.lower() in names else 0)
        places[what] = header.index(found[0]) if found else None
    taken = {place for place in places.values() if place is not None}
    free = [c for c, name in enumerate(header) if name and c not in taken]
    chosen: list[int] = []
    for pattern in how.channels or [""]:
        exact = [c for c in free if header[c] == pattern]
        found_at = exact or [
            c for c in free if (fnmatchcase(header[c], pattern) if pattern else numeric[c])
        ]
        if not found_at:
            what = (
                f"no column {pattern!r} for a channel"
                if pattern
                else "no column of numbers for a channel"
            )
            some = ", ".join(header[c] for c in free[:12]) or "other columns"
            raise LockstepError(what, f"{path}:1", f"--channels may name {some}")
        chosen += [c for c in found_at if c not in chosen]
    places["channels"] = chosen
    return places


def _used(header: list[str], places: dict[str, Any]) -> dict[str, str]:
    return {what: header[place] for what, place in places.items() if isinstance(place, int)}


# ---- text
# --------------------------------------------------------------------------------------------------


def _separator(line: str) -> str:
    """Return the separator of a line's cells: comma, semicolon, tab, or "" for blanks."""
    line = line.strip().rstrip(";")
    most = max(",;\t", key=line.count)
    return most if most in line else ""


def is_missing(cell: str) -> bool:
    return cell.strip().lower() in MISSING


def is_number(cell: str) -> bool:
    cell = cell.strip()
    try:
        float(cell.replace(",", ".") if DECIMAL_COMMA.fullmatch(cell) else cell)
    except ValueError:
        return is_missing(cell)
    return True


def _read_text(path: Path, how: Reading) -> Sheet:
    parser, first = None, 1
    for block in blocks(path):
        if parser is None:
            parser = _Parser(path, block, how)
        parser.add(block, first)
        first += len(block)
        how.tell(len(block))
    if parser is None or not parser.lines:
        raise LockstepError("no rows of data", str(path), EMPTY)
    return parser.sheet()


class _Parser:
    """Collects the selected columns from blocks of lines."""

    def __init__(self, path: Path, block: list[str], how: Reading):
        self.path, self.how = path, how
        full = [line for line in block if line.strip()]
        if not full:
            raise LockstepError("no rows of data", str(path), EMPTY)
        self.separator = how.separator or _separator(full[0])
        if self.separator == " ":
            self.separator = ""
        # Lines of WISDM end with a semicolon.
        self.trailing = self.separator != ";" and full[-1].rstrip().endswith(";")
        top = [name.strip() for name in self.split(full[:1], 1)[0]]
        while top and not top[-1]:  # empty columns of a spreadsheet
            top.pop()
        self.header, self.skip_lines = (
            (how.columns, 0) if how.columns else (top, block.index(full[0]) + 1)
        )
        if not how.columns and all(is_number(cell) for cell in top):
            todo = f"name its {len(top)} columns: --columns a,b,c"
            raise LockstepError("the first line has numbers, no names", f"{path}:1", todo)
        rows = self.split(block[self.skip_lines :][:50], self.skip_lines + 1)
        if not any(map(any, rows)):
            raise LockstepError("no rows of data", str(path), EMPTY)
        cells = [[row[c] for row in rows if len(row) > c] for c in range(len(self.header))]
        numeric = [
            2 * sum(map(is_number, each)) > len(each) > sum(map(is_missing, each)) for each in cells
        ]
        self.places = _choose(self.header, how, path, numeric)
        self.channels = [self.header[c] for c in self.places["channels"]]
        how.channels = self.channels
        self.lines: list[np.ndarray] = []
        self.time: list[np.ndarray] = []
        self.values: list[np.ndarray] = []
        self.names: dict[str, dict[str, int]] = {
            what: {} for what in ("label", "subject", "recording")
        }
        self.codes: dict[str, list[np.ndarray]] = {what: [] for what in self.names}
        self.bad: list[str] = []
        self.commas = False

    def split(self, lines: list[str], first: int) -> list[list[str]]:
        """Return the cells of each line."""
        if self.trailing:
            lines = [line.rstrip().rstrip(";") for line in lines]
        if not self.separator:
            return [line.split() for line in lines]
        try:
            rows = list(csv.reader(lines, delimiter=self.separator))
        except csv.Error as error:
            raise LockstepError(
                f"no CSV: {error}", f"{self.path}:{first}", "save it as plain text"
            ) from None
        if len(rows) != len(lines):
            line = first + next(n for n, text in enumerate(lines) if text.count('"') % 2)
            raise LockstepError(
                "a quote opens that does not end on its line", f"{self.path}:{line}", "close it"
            )
        return rows

    def add(self, block: list[str], first: int) -> None:
        rows, lines = self.split(block, first), np.arange(first, first + len(block))
        if first == 1 and self.skip_lines:
            rows, lines = rows[self.skip_lines :], lines[self.skip_lines :]
        bad: dict[int, str] = {}  # {line: error}
        if {*map(len, rows)} != {len(self.header)}:
            rows, lines = self._fit(rows, lines, bad)
        columns = [*zip(*rows, strict=True)] if rows else [()] * len(self.header)
        time = self._time(columns, lines, bad)
        values = np.stack(
            [self._numbers(columns[c], c, lines, bad) for c in self.places["channels"]], 1
        )
        for row, n in [] if self.how.missing else np.argwhere(np.isnan(values)).tolist():
            place = self.places["channels"][n]
            todo = "--missing fill draws a line over it, --missing cut cuts the recording there"
            bad.setdefault(lines[row], self._say(columns[place][row], place, lines[row], todo))
        if bad and not self.how.skip:
            raise LockstepError(f"{bad[min(bad)]}, or --bad-lines skip leaves out such lines")
        self.bad += [bad[line] for line in sorted(bad)]
        kept = ~np.isin(lines, [*bad])
        self.lines.append(lines[kept])
        self.values.append(values[kept])
        if time is not None:
            self.time.append(time[kept])
        for what, known in self.names.items():
            if (place := self.places[what]) is not None:
                codes = [known.setdefault(cell, len(known)) for cell in columns[place]]
                self.codes[what].append(np.array(codes, dtype=np.int64)[kept])

    def _fit(
        self, rows: list[list[str]], lines: np.ndarray, bad: dict[int, str]
    ) -> tuple[list[list[str]], np.ndarray]:
        """Return the rows that are not blank and have a cell for each column.

        Rows with too many cells go to `bad`.
        """
        count, full = len(self.header), []
        for n, row in enumerate(rows):
            if any(cell.strip() for cell in row[count:]) or (
                row and not self.separator and len(row) != count
            ):
                what = (
                    f"{len(row)} cells, "
                    f"{'--columns names' if self.how.columns else 'the header names'} {count}"
                )
                todo = (
                    "write a decimal point in numbers, quote a text that has the separator, "
                    "or name the column"
                )
                bad[lines[n]] = str(LockstepError(what, f"{self.path}:{lines[n]}", todo))
            elif any(cell.strip() for cell in row):
                rows[n] = [*row[:count], *[""] * (count - len(row))]
                full.append(n)
        return [rows[n] for n in full], lines[full]

    def _say(self, cell: str, place: int, line: int, todo: str) -> str:
        name, cell = self.header[place], cell.strip()
        what = f"{name} is {cell[:40]!r}" if cell else f"{name} is empty"
        return str(LockstepError(what, f"{self.path}:{line}, column {place + 1}", todo))

    def _numbers(
        self, cells: Sequence[str], place: int, lines: np.ndarray, bad: dict[int, str]
    ) -> np.ndarray:
        """Return (N,) float64, NaN for a missing cell; invalid numbers go to `bad`."""
        try:
            values = np.fromiter(map(float, cells), np.float64, len(cells))
        except ValueError:
            values = np.array([self._number(cell) for cell in cells])
        for row in np.flatnonzero(np.abs(values) > MOST).tolist():
            todo = "write a number that float32 has" if is_number(cells[row]) else "write a number"
            bad.setdefault(lines[row], self._say(cells[row], place, lines[row], todo))
        return values

    def _number(self, cell: str) -> float:
        """Return a cell's number, NaN for a missing cell, infinity for an invalid number."""
        if self.separator != "," and DECIMAL_COMMA.fullmatch(cell):
            self.commas, cell = True, cell.replace(",", ".")
        try:
            return float(cell)
        except ValueError:
            return float("nan" if is_missing(cell) else "inf")

    def _time(
        self, columns: Sequence[Sequence[str]], lines: np.ndarray, bad: dict[int, str]
    ) -> np.ndarray | None:
        """Return (N,) float64 in the table's unit; invalid times go to `bad`."""
        if (place := self.places["time"]) is None:
            return None
        cells, unit = columns[place], self.how.unit
        if unit in UNITS:
            values = self._numbers(cells, place, lines, bad)
            todo, clock = (
                "write a number",
                "it looks like a date: --time-unit datetime, or a format such as %d.%m.%Y",
            )
        else:
            values, todo = (
                _dates(cells, unit),
                "write it as 2026-11-23 07:09:38.25, or give its form, as for strptime",
            )
            clock = f"{todo}, to --time-unit"
        for row in np.flatnonzero(~np.isfinite(values)).tolist():
            is_clock = re.search(r"\d[-/.:]\d+[-/.:]", cells[row])
            bad[lines[row]] = self._say(cells[row], place, lines[row], clock if is_clock else todo)
        return values

    def sheet(self) -> Sheet:
        notes = []
        if self.bad:
            notes.append(
                f"{self.path}: {len(self.bad)} lines are left out, the first: {self.bad[0]}"
            )
        if self.commas:
            notes.append(f"{self.path}: commas in numbers are read as decimal points")
        texts = {
            what: _stripped(np.concatenate(self.codes[what]), [*known], self.path)
            for what, known in self.names.items()
            if self.codes[what]
        }
        time = _since_first(np.concatenate(self.time), self.how.unit) if self.time else None
        lines, values = np.concatenate(self.lines), np.concatenate(self.values)
        return Sheet(
            self.path,
            lines,
            time,
            values,
            self.channels,
            texts,
            _used(self.header, self.places),
            notes,
        )


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


def _since_first(time: np.ndarray, unit: str) -> np.ndarray:
    """Convert (N,) float64 in `unit` to seconds since the first time.

    A float64 of seconds since 1970 has seven digits after the decimal point.
    """
    return (time - time[:1]) * UNITS.get(unit, 1e-6)


def _dates(cells: Sequence[str], unit: str) -> np.ndarray:
    """Return (N,) float64, the microseconds since 1970; NaN for an invalid date.

    A time without a time zone counts as UTC.
    """
    # NumPy does not parse time zones.
    if unit == "datetime" and not re.search(r"[+-]\d\d:?\d\d\s*$", cells[0]):
        with contextlib.suppress(ValueError):
            found = np.array([cell.strip().rstrip("Z") for cell in cells], "datetime64[us]")
            return np.where(np.isnat(found), np.nan, found.astype(np.int64))
    return np.array([_date(cell.strip(), unit) for cell in cells])


def _date(cell: str, unit: str) -> float:
    try:
        found = (
            datetime.fromisoformat(cell) if unit == "datetime" else datetime.strptime(cell, unit)
        )
    except ValueError:
        return float("nan")
    return round((found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp() * 1e6)


# ---- parquet
# --------------------------------------------------------------------------------------------------


def _read_parquet(path: Path, how: Reading) -> Sheet:
    try:
        import pyarrow as pa
        import pyarrow.compute as pc
        import pyarrow.parquet as pq
    except ImportError:
        raise LockstepError("pyarrow is not installed", str(path), "pip install pyarrow") from None
    try:
        file = pq.ParquetFile(path)
        kinds = {field.name: field.type for field in file.schema_arrow}
        header = [*kinds]
        numeric = [
            pa.types.is_integer(t) or pa.types.is_floating(t) or pa.types.is_decimal(t)
            for t in kinds.values()
        ]
        places = _choose(header, how, path, numeric)
        channels = [header[c] for c in places["channels"]]
        used = _used(header, places)
        table = file.read(columns=[*dict.fromkeys([*channels, *used.values()])])
    except (OSError, pa.ArrowException) as error:
        what = f"no whole parquet file: {str(error).splitlines()[0][:120]}"
        raise LockstepError(what, str(path), "write it again") from None
    how.channels = channels

    def numbers(name: str) -> np.ndarray:
        if not numeric[header.index(name)]:
            todo = "give columns of numbers, or --time-unit datetime for a time"
            raise LockstepError(f"column {name} is {kinds[name]}", str(path), todo)
        return np.asarray(table[name].cast(pa.float64()).to_numpy(), np.float64)

    values = np.stack([numbers(name) for name in channels], 1)
    time = None
    if name := used.get("time"):
        if pa.types.is_timestamp(kinds[name]):
            how = replace(how, unit="datetime")
            time = np.asarray(
                table[name].cast(pa.timestamp("us"), safe=False).cast(pa.int64()).to_numpy(),
                np.float64,
            )
        elif how.unit in UNITS:
            time = numbers(name)
        else:
            time = _dates(pc.fill_null(table[name].cast(pa.string()), "").to_pylist(), how.unit)
    texts = {}
    for what in ("label", "subject", "recording"):
        if name := used.get(what):
            known: dict[str, int] = {}
            cells = pc.fill_null(table[name].cast(pa.string()), "").to_pylist()
            codes = np.array([known.setdefault(cell, len(known)) for cell in cells], dtype=np.int64)
            texts[what] = _stripped(codes, [*known], path)
    for name, column in [
        *zip(channels, values.T, strict=True),
        *([(used["time"], time)] if time is not None else []),
    ]:
        of_time = column is time
        wrong = np.flatnonzero(
            ~np.isfinite(column) if of_time or not how.missing else np.isinf(column)
        )
        if len(wrong):
            todo = (
                "fill it in"
                if of_time
                else "--missing fill draws a line over it, --missing cut cuts there"
            )
            raise LockstepError(
                f"{name} is empty or no number", f"{path}, row {wrong[0] + 1}, column {name}", todo
            )
    if not len(values):
        raise LockstepError("no rows of data", str(path), EMPTY)
    time = None if time is None else _since_first(time, how.unit)
    how.tell(len(values))
    return Sheet(path, np.arange(1, len(values) + 1), time, values, channels, texts, used, [])
