"""Read tables of text: find the encoding, the header, the separator and the units of a file.

A table has a row for each line. Lines above the header, comments, a line `sep=;`, a line of units
below the header and a header of two lines are recognised. `formats/cells.py` judges the cells.
Errors name file, line and column.

    head = find_head(path, lines)            of the first lines of a file of any length
    for line, cells in head.rows(lines): ...
    table = read(path)                       a small table as a whole
    table.number(row, "start_s")
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import itertools
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from engine.contract import LockstepError
from formats.arrays import check_text, encoding_of, text_lines
from formats.cells import (
    DECIMAL_COMMA,
    UNIT_OF,
    are_units,
    is_index_name,
    is_missing,
    is_number,
    number_of,
    simple_name,
    split_unit,
    trim,
)

SEPARATORS = (",", ";", "\t", "|", "")
"""Possible separators; an empty text stands for blanks."""

SEPARATOR_LINE = re.compile(r'"?sep=(.|\\t)"?\s*$', re.I)
"""The first line of tables that a spreadsheet opens at a double click."""

COMMENTS = ("#", "//", "%")
LINES = 1 << 13
"""Lines of text in memory at once."""

HEAD_LINES = 1000
"""Lines of a file in which the header is looked for."""

LAST = 5
"""Last lines of these, which show the form of a row."""

LEVELS = 4
"""Most lines of a header, units included."""

TOO_MANY = (
    "write a decimal point in numbers, quote a text that has the separator, or name the column"
)


# ---- files
# --------------------------------------------------------------------------------------------------


def opened(path: Path, encoding: str = "") -> IO[str]:
    """Open a text file, gzipped or not. The encoding is found if it is not given."""
    encoding = encoding or encoding_of(path)
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding=encoding)
    return open(path, encoding=encoding)


def blocks(path: Path, lines: int = LINES, encoding: str = "") -> Iterator[list[str]]:
    """Yield the lines of a text file, in lists. Raises LockstepError."""
    todo = "fetch it again, or save it as text in UTF-8"
    try:
        with opened(path, encoding) as file:
            while block := list(itertools.islice(file, lines)):
                yield block
    except (UnicodeDecodeError, LookupError):
        todo = "save it as UTF-8, or give its encoding, such as --encoding cp1252"
        raise LockstepError("not a text file", str(path), todo) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise LockstepError(f"no whole .gz file: {error}", str(path), todo) from None
    except OSError as error:
        raise LockstepError(f"cannot read: {error.strerror or error}", str(path), todo) from None


# ---- the head of a table
# --------------------------------------------------------------------------------------------------


@dataclass
class Layout:
    """The form of a table. An empty field is found in the file.

    separator  of the cells; a blank stands for any number of blanks
    columns    names, for a file without a header
    header     line of the header, from 1
    skip       lines to leave out at the top of the file
    comment    first characters of a line that is no row
    encoding   of the text, such as cp1252
    """

    separator: str = ""
    columns: Sequence[str] = ()
    header: int = 0
    skip: int = 0
    comment: str = ""
    encoding: str = ""


class Row(NamedTuple):
    line: int
    cells: list[str]


@dataclass
class Head:
    """What stands above the rows of a table.

    names      of the columns, without empty names at the end; an unnamed column has an empty name
    units      of each column: from a line of units, or from the name; empty if unknown
    line       line of the header, or 0
    first      line of the first row
    separator  of the cells; empty for blanks
    comment    first characters of a line that is no row; empty: each line is a row
    trailing   whether each line ends with a semicolon that ends no cell
    above      the lines above the header
    given      whether `Layout.columns` named the columns
    has_numbers  whether the header has a number above each column of numbers, as a row has
    """

    path: Path
    names: list[str]
    line: int
    first: int
    separator: str
    comment: str = ""
    trailing: bool = False
    units: list[str] = field(default_factory=list)
    above: list[str] = field(default_factory=list)
    given: bool = False
    has_numbers: bool = False

    @property
    def nameless(self) -> bool:
        """Return whether the header is a row of numbers.

        pandas writes 0, 1, ... above columns without names, after an empty cell: such are names.
        """
        counted = ["", *map(str, range(len(self.names) - 1))]
        if self.given or (len(self.names) > 1 and self.names == counted):
            return False
        return self.has_numbers or all(map(is_number, self.names))

    @property
    def rate_hz(self) -> float | None:
        """Return the rate that a line above the header states, such as `Sample rate: 120.0Hz`."""
        return stated_rate(self.above)

    def where(self, line: int, place: int | None = None) -> str:
        """Return the text of a place: file, line and, from 1, column."""
        return f"{self.path}:{line}" + ("" if place is None else f", column {place + 1}")

    def is_row(self, text: str) -> bool:
        """Return whether a line below the header is no comment."""
        return not (self.comment and text.lstrip().lstrip('"').startswith(self.comment))

    def split(self, lines: Sequence[str], first: int) -> list[list[str]]:
        """Return the cells of each line; `first` is the number of the first line.

        Raises LockstepError for a quote that spans lines.
        """
        if self.trailing:
            lines = [line.rstrip().rstrip(";") for line in lines]
        if not self.separator:
            return [_blank_separated(line) for line in lines]
        try:
            found = [*csv.reader(lines, delimiter=self.separator)]
        except csv.Error as error:
            todo = "save it as plain text"
            raise LockstepError(f"no CSV: {error}", self.where(first), todo) from None
        if len(found) != len(lines):
            odd = next(n for n, text in enumerate(lines) if text.count('"') % 2)
            what = "a quote opens that does not end on its line"
            raise LockstepError(what, self.where(first + odd), "close it, or delete it")
        return found

    def check_width(self, row: Row) -> None:
        """Raise LockstepError for a cell beyond the header: the row may be shifted."""
        width = len(self.names)
        extra = any(cell.strip() for cell in row.cells[width:])
        if extra or (row.cells and not self.separator and len(row.cells) != width):
            source = "--columns names" if self.given else "the header names"
            what = f"{len(row.cells)} cells, {source} {width}"
            raise LockstepError(what, self.where(row.line), TOO_MANY)

    def rows(self, lines: Sequence[str]) -> Iterator[Row]:
        """Yield the rows of all lines of the file, without empty lines and comments.

        Raises LockstepError.
        """
        kept = [*enumerate(lines, 1)][self.first - 1 :]
        kept = [(line, text) for line, text in kept if self.is_row(text)]
        cells = self.split([text for _, text in kept], self.first)
        for (line, _), of_line in zip(kept, cells, strict=True):
            if len(of_line) > 1 or "".join(of_line).strip():
                row = Row(line, of_line)
                self.check_width(row)
                yield row


_RATE = re.compile(
    r"(?:(?:sampl\w*|output|measurement|data|frame|acquisition|recording)?[\s_]*"
    r"(?:rate|freq\w*)\b|\bat)[^\d\n]{0,24}?(\d+(?:[.,]\d+)?)\s*(k?hz|samples|/s|$|[\s\"',;\t])",
    re.I,
)
_NO_RATE = re.compile(
    r"(heart|pulse|baud|bit|refresh|respiration|cutoff|filter)[\s_]*(rate|freq)", re.I
)


def stated_rate(lines: Sequence[str]) -> float | None:
    """Return the samples per second that lines above a header state, or None.

    `at 30 Hz` needs the unit; a rate or a frequency does not. Two different rates are none.
    """
    rates = set()
    for line in lines:
        found = _RATE.search(line)
        if not found or _NO_RATE.search(line):
            continue
        has_unit = found[2].lower() in ("hz", "khz")
        if has_unit or not found[0].lower().startswith("at"):
            factor = 1000.0 if found[2].lower() == "khz" else 1.0
            rates.add(float(found[1].replace(",", ".")) * factor)
    rates.discard(0.0)
    return rates.pop() if len(rates) == 1 else None


def find_head(path: Path, lines: Sequence[str], layout: Layout | None = None) -> Head:
    """Return the head of a table from the first lines of its file.

    The header is the line above the first row that has a name for each column. Without such a line,
    the first line of text is the header. Raises LockstepError for a table without rows or without
    a header, for two columns of one name, and for a `layout` that does not fit.
    """
    layout = layout or Layout()
    search = _Search(path, lines[:HEAD_LINES], layout)
    head = search.with_columns() if layout.columns else search.without_columns()
    for place, name in enumerate([] if head.nameless else head.names):
        if name and name in head.names[:place]:
            what = f"the header names {name} twice"
            raise LockstepError(what, head.where(head.line or 1), "name each column once")
    return head


class _Line(NamedTuple):
    number: int
    text: str


def _blank_separated(text: str) -> list[str]:
    """Return the cells of a line with blanks between cells; a quoted cell may have a blank."""
    if '"' not in text:
        return text.split()
    try:
        return next(csv.reader([" ".join(text.split())], delimiter=" "), [])
    except csv.Error:
        return text.split()


def _cells_of(text: str, separator: str) -> list[str]:
    """Return the cells of one line; a stray quote spoils no other line."""
    text = text.strip("\r\n")
    if not separator:
        return _blank_separated(text.rstrip(";"))
    try:
        return next(csv.reader([text], delimiter=separator), [])
    except csv.Error:
        return [text]


def _texts_of(cells: Sequence[str], numeric: Sequence[bool]) -> list[str]:
    """Return the cells in columns of numbers that are not empty."""
    return [cell for cell, n in zip(cells, numeric, strict=False) if n and cell.strip()]


class _Shape:
    """Lines of text, divided by one separator.

    width    cells of a row, from the last lines
    filled   the same without cells at the end that are empty in all of these
    numeric  (width,) whether a column holds numbers
    start    the first line with a row
    header   the lines of the header; none if no line names the columns
    unnamed  whether the header has no name for the first column, as in R's write.table
    """

    def __init__(self, lines: Sequence[_Line], separator: str):
        self.lines, self.separator = lines, separator
        self.cells = [_cells_of(line.text, separator) for line in lines]
        last = self.cells[1:][-LAST:] or self.cells
        self.width = Counter(map(len, last)).most_common(1)[0][0]
        self.typical = [cells for cells in last if len(cells) == self.width]
        self.filled = max(len(trim(cells)) for cells in self.typical)
        self.numeric = [self._is_numeric(place) for place in range(self.width)]
        self.start = self._first_row()
        self.unnamed = False
        self.header = self._header()

    @property
    def rank(self) -> tuple[bool, bool, bool, float, int]:
        """Return a rank among the shapes of one file: numbers, a header, several columns."""
        share = sum(self.numeric) / max(1, self.width)
        return any(self.numeric), bool(self.header), self.width > 1, share, self.width

    def _is_numeric(self, place: int) -> bool:
        column = [cells[place] for cells in self.typical]
        return all(map(is_number, column)) and not all(map(is_missing, column))

    def _is_row(self, cells: list[str]) -> bool:
        """Return whether a line has the width of a row, and numbers in most columns of numbers.

        A single faulty cell is found when the row is read.
        """
        if not self.filled <= len(cells) <= self.width:
            return False
        judged = [is_number(text) for text in _texts_of(cells, self.numeric)]
        return 2 * sum(judged) > len(judged) or not judged

    def is_row_of_numbers(self, n: int) -> bool:
        """Return whether a line has numbers in all columns of numbers, and no known name.

        Numbers that count from 0 or 1 name columns.
        """
        texts = [cell.strip() for cell in _texts_of(self.cells[n], self.numeric)]
        counted = [[str(first + n) for n in range(len(texts))] for first in (0, 1)]
        if len(texts) > 1 and texts in counted:
            return False
        return bool(texts) and all(map(is_number, texts)) and not has_known_name(self.cells[n])

    def _names(self, cells: list[str], numeric: Sequence[bool]) -> bool:
        """Return whether a line may name columns: no cell above a column of numbers is a number."""
        texts = trim(cells)
        least = self.filled - (self.width - len(numeric))
        fits = len(cells) == len(numeric) or least <= len(texts) <= len(numeric)
        return bool(texts) and fits and not any(map(is_number, _texts_of(cells, numeric)))

    def _first_row(self) -> int:
        """Return the first line of the rows. Most lines that follow are rows, too."""
        rows = [self._is_row(cells) for cells in self.cells]
        for n, row in enumerate(rows):
            following = rows[n : n + 20]
            if row and 5 * sum(following) >= 4 * len(following):
                return n
        return 0

    def _header(self) -> list[int]:
        """Return the lines of the header: the lines directly above the first row."""
        if not any(self.numeric):
            return self._header_of_texts()
        lines = self._names_above(self.numeric)
        if not lines and self._counts_rows():
            lines = self._names_above(self.numeric[1:])
            self.unnamed = bool(lines)
        if len(lines) < 2 or self._make_one(lines):
            return lines
        known = [n for n in lines if has_known_name(self.cells[n])]
        return known[:1] or [0 if lines[0] == 0 else lines[-1]]

    def _header_of_texts(self) -> list[int]:
        """Return the first line with a name for each column of a table without numbers."""
        for n, cells in enumerate(self.cells[:-1]):
            if self.width > 1 and self.filled <= len(trim(cells)) <= self.width:
                return [n]
        return []

    def _names_above(self, numeric: Sequence[bool]) -> list[int]:
        lines: list[int] = []
        for n in range(self.start - 1, max(-1, self.start - 1 - LEVELS), -1):
            if not self._names(self.cells[n], numeric):
                break
            lines.insert(0, n)
        return lines

    def _make_one(self, lines: list[int]) -> bool:
        """Return whether several lines make one header: with units, or with repeated names."""
        *upper, last = [self.cells[n] for n in lines]
        top = [cell.strip() for cell in upper[0]]
        repeated = len({*filter(None, top)}) < len(top)
        return repeated or (len(upper) == 1 and are_units(last))

    def _counts_rows(self) -> bool:
        """Return whether the first column has row numbers, and the line above one name too few."""
        if not self.start:
            return False
        names = trim(self.cells[self.start - 1])
        first = [cells[0].strip() for cells in self.typical]
        if len(names) != self.width - 1 or not all(text.isdigit() for text in first):
            return False
        numbers = [int(text) for text in first]
        return len(numbers) > 1 and numbers == [*range(numbers[0], numbers[0] + len(numbers))]


class _Search:
    """The search for the head of one file."""

    def __init__(self, path: Path, lines: Sequence[str], layout: Layout):
        self.path, self.layout = path, layout
        self.separators: Sequence[str] = SEPARATORS
        if layout.separator:
            self.separators = [layout.separator.replace(" ", "")]
        numbered = [_Line(n, text) for n, text in enumerate(lines, 1) if n > layout.skip]
        full = [line for line in numbered if line.text.strip()]
        if full and (stated := SEPARATOR_LINE.match(full[0].text.strip("\r\n"))):
            full = full[1:]
            if not layout.separator:
                self.separators = [stated[1].replace("\\t", "\t")]
        self.comment = layout.comment or _comment_of(full)
        self.comments = [line for line in full if self._is_comment(line)]
        self.full = [line for line in full if not self._is_comment(line)]
        self.skipped = [text for text in lines[: layout.skip] if text.strip()]
        if not self.full:
            todo = "give a file with a row for each sample"
            raise LockstepError("no rows of data", str(path), todo)

    def _is_comment(self, line: _Line) -> bool:
        if not self.comment or line.number == self.layout.header:
            return False
        return line.text.lstrip().lstrip('"').startswith(self.comment)

    def with_columns(self) -> Head:
        """Return the head of a file whose columns `Layout.columns` names."""
        names = [*self.layout.columns]
        last = self.full[-1].text
        usual = separator_of(self.full[0].text)
        fitting = [s for s in self.separators if len(_cells_of(last, s)) == len(names)]
        separator = self.separators[0]
        if len(self.separators) > 1:
            separator = usual if usual in fitting or not fitting else fitting[0]
        first = self._first_row(separator, len(names))
        return self._head(names, 0, first, separator)

    def _first_row(self, separator: str, width: int) -> int:
        """Return the line of the first row: lines of fewer cells above the rows are left out."""
        if self.layout.header:
            return self.layout.header + 1
        widths = [len(_cells_of(line.text, separator)) for line in self.full]
        if self.layout.skip or widths[-1] != width or widths[0] >= width:
            return self.full[0].number
        return self.full[widths.index(width)].number

    def without_columns(self) -> Head:
        """Return the head of a file that names its columns. Raises LockstepError."""
        if self.layout.header:
            return self._in_line(self.layout.header)
        if head := self._of_wristband():
            return head
        shape = self._best_shape(self.full)
        if shape.header:
            return self._of_shape(shape)
        return self._in_comment(shape) or self._in_first_line(shape)

    def _of_wristband(self) -> Head | None:
        """Return the head of a file of an Empatica E4: a line of starts and a line of rates."""
        texts = [[*map(str.strip, line.text.split(","))] for line in self.full[:2]]
        if len(self.full) < 3 or not all(is_number(cell) for cells in texts for cell in cells):
            return None
        starts, rates = [{*map(float, map(_point, cells))} for cells in texts]
        width = len(texts[0])
        if len(starts) > 1 or len(rates) > 1 or len(texts[1]) != width or width not in (1, 3):
            return None
        if not (1e9 < min(starts) < 4e9 and 0 < min(rates) <= 1000):
            return None
        stem = self.path.name.partition(".")[0].lower()
        names = [f"{stem}_{axis}" for axis in "xyz"] if width == 3 else [stem]
        head = self._head(names, 0, self.full[2].number, ",")
        head.above = [f"Sample rate: {min(rates):g} Hz"]
        head.given = True
        return head

    def _best_shape(self, lines: Sequence[_Line]) -> _Shape:
        """Return the shape by the separator of the first line, if this line is a header, or else
        the shape of the highest rank."""
        usual = separator_of(lines[0].text)
        order = sorted(self.separators, key=lambda separator: separator != usual)
        shapes = [_Shape(lines, separator) for separator in order]
        if shapes[0].header[:1] == [0] and shapes[0].width > 1:
            return shapes[0]
        return max(shapes, key=lambda shape: shape.rank)

    def _of_shape(self, shape: _Shape) -> Head:
        """Return the head of a shape: lines of names and, perhaps, a line of units."""
        levels = [shape.cells[n] for n in shape.header]
        units: list[str] = []
        if len(levels) > 1 and are_units(levels[-1]):
            units = [cell.strip().strip("()[]") for cell in levels.pop()]
        names = join_levels(levels)
        if shape.unnamed:
            names = ["", *names]
            units = ["", *units]
        line = shape.lines[shape.header[0]].number
        first = shape.lines[shape.header[-1] + 1].number
        return self._head(names, line, first, shape.separator, units[: len(names)])

    def _in_comment(self, shape: _Shape) -> Head | None:
        """Return the head if the last comment names the columns, as numpy.savetxt writes it."""
        if not self.comments:
            return None
        line = self.comments[-1]
        text = line.text.strip().lstrip('"').removeprefix(self.comment)
        names = trim(_cells_of(text, shape.separator))
        if len(names) != shape.width or any(map(is_number, names)):
            return None
        return self._head(names, line.number, self.full[shape.start].number, shape.separator)

    def _in_first_line(self, shape: _Shape) -> Head:
        """Return the head with the first line as the header.

        Raises LockstepError if the rows begin further down and have more cells.
        """
        names = trim(shape.cells[0])
        line = self.full[0].number
        if shape.start > 1 and len(names) < shape.width:
            row = self.full[shape.start].number
            what = f"rows of {shape.width} cells begin here, and no line above names the columns"
            todo = f"name its {shape.width} columns: --columns a,b,c --skip {row - 1}"
            todo += ", or give the line of the names: --header N"
            raise LockstepError(what, f"{self.path}:{row}", todo)
        head = self._head(names, line, line + 1, shape.separator)
        head.has_numbers = shape.is_row_of_numbers(0)
        return head

    def _in_line(self, number: int) -> Head:
        """Return the head with the header in a given line. Raises LockstepError."""
        below = [line for line in self.full if line.number >= number]
        if len(below) < 2 or below[0].number != number:
            todo = "--header takes the line of the names, counted from 1"
            raise LockstepError(f"no header with rows below in line {number}", str(self.path), todo)
        text = below[0].text
        if self.comment and text.startswith(self.comment):
            text = text.removeprefix(self.comment)
        shape = self._best_shape([_Line(number, text), *below[1:]])
        if shape.header[:1] == [0]:
            return self._of_shape(shape)
        return self._head(trim(shape.cells[0]), number, number + 1, shape.separator)

    def _head(
        self, names: list[str], line: int, first: int, separator: str, units: Sequence[str] = ()
    ) -> Head:
        # Lines of WISDM end with a semicolon.
        trailing = separator != ";" and self.full[-1].text.rstrip().endswith(";")
        begin = line or first
        above = [each.text for each in (*self.comments, *self.full) if each.number < begin]
        head = Head(self.path, names, line, first, separator, self.comment, trailing)
        head.above = [*self.skipped, *above]
        head.given = bool(self.layout.columns)
        head.units = _units(names, units)
        return head


def _point(cell: str) -> str:
    return "nan" if is_missing(cell) else cell.replace(",", ".")


def _units(names: Sequence[str], stated: Sequence[str]) -> list[str]:
    """Return the unit of each column: from the line of units, or from the name."""
    found = []
    for place, name in enumerate(names):
        unit = stated[place] if place < len(stated) else ""
        found.append(UNIT_OF.get(unit.lower(), unit) or split_unit(name).unit)
    return found


def join_levels(levels: Sequence[Sequence[str]]) -> list[str]:
    """Return the names of columns from the lines of a header: acc above x gives acc_x.

    A name of an upper line also holds for the empty cells to the right that have a lower name.
    """
    if len(levels) == 1:
        return trim(levels[0])
    width = max(map(len, levels))
    padded = [[cell.strip() for cell in level] + [""] * (width - len(level)) for level in levels]
    names = [""] * width
    for depth, level in enumerate(padded):
        below = padded[depth + 1 :]
        parents, last = [*names], ""
        for place, cell in enumerate(level):
            text = "" if is_index_name(cell) else cell
            spans = any(each[place] for each in below) and place > 0
            if not text and spans and parents[place] == parents[place - 1]:
                text = last
            last = text
            names[place] = "_".join(filter(None, [names[place], text]))
    return names


KNOWN = {"time", "timestamp", "datetime", "date", "label", "activity", "subject", "x", "y", "z"}


def has_known_name(cells: Sequence[str]) -> bool:
    return any(split_unit(cell).name in KNOWN for cell in cells)


def separator_of(line: str) -> str:
    """Return the separator of a line's cells: comma, semicolon, tab, or "" for blanks."""
    line = line.strip().rstrip(";")
    most = max(",;\t", key=line.count)
    return most if most in line else ""


def _comment_of(lines: Sequence[_Line]) -> str:
    """Return the first characters of comments, if the first line is one."""
    text = lines[0].text.lstrip().lstrip('"') if lines else ""
    return next((prefix for prefix in COMMENTS if text.startswith(prefix)), "")


# ---- small tables
# --------------------------------------------------------------------------------------------------


@dataclass
class Table:
    """A table as a whole: recordings, trials, or events."""

    head: Head
    rows: list[Row]

    @property
    def names(self) -> list[str]:
        return self.head.names

    def find(self, *names: str) -> str:
        """Return the first column with one of these names, or an empty text.

        An exact name has priority over a name in other letters or with a unit: `Start (s)` is
        start.
        """
        for name in names:
            if name in self.names:
                return name
        for name in names:
            for column in self.names:
                if simple_name(name) in (simple_name(column), split_unit(column).name):
                    return column
        return ""

    def text(self, row: Row, column: str) -> str:
        """Return the text of a cell; a missing cell is empty."""
        place = self.names.index(column)
        return row.cells[place].strip() if place < len(row.cells) else ""

    def number(self, row: Row, column: str) -> float:
        """Return the number of a cell, with a decimal point or comma. Raises LockstepError."""
        cell = self.text(row, column)
        if self.head.separator != "," and DECIMAL_COMMA.fullmatch(cell):
            cell = cell.replace(",", ".")
        try:
            return float(cell)
        except ValueError:
            state = repr(cell[:40]) if cell else "empty"
            what, where = f"{column} is {state}", self.where(row, column)
            raise LockstepError(what, where, "write a number") from None

    def where(self, row: Row, column: str = "") -> str:
        """Return file:line of a row, and the number of a column."""
        return self.head.where(row.line, self.names.index(column) if column else None)


def csv_rows(path: Path, lines: Sequence[str]) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """Return the names of the columns, and an iterator over the rows of a text.

    A text without a line has no columns. Raises LockstepError as `find_head` and `Head.rows`.
    """
    if not any(map(str.strip, lines)):
        return [], iter(())
    head = find_head(path, lines)
    return head.names, head.rows(lines)


def read(path: Path, layout: Layout | None = None, lines: Sequence[str] | None = None) -> Table:
    """Read a small table as a whole; `lines` are its text, if known. Raises LockstepError."""
    layout = layout or Layout()
    if lines is None:
        text = "".join(itertools.chain.from_iterable(blocks(path, encoding=layout.encoding)))
        lines = check_text(text, path).splitlines()
    head = find_head(path, lines, layout)
    return Table(head, [*head.rows(lines)])


# ---- numbers without a header
# --------------------------------------------------------------------------------------------------


class NumberLines(NamedTuple):
    """Numbers as (N, columns) float32, and the line of each row."""

    values: np.ndarray
    lines: list[int]


def read_numbers(path: Path) -> NumberLines:
    """Read lines of finite numbers without a header.

    Raises LockstepError with line and column for a text, an empty cell, NaN or infinity, and with
    the line for a line of another width.
    """
    texts = text_lines(path)
    lines = [line for line, text in enumerate(texts, 1) if text.strip()]
    if not lines:
        raise LockstepError("the file is empty", str(path), "fetch it again")
    # NumPy reads plain numbers between blanks many times faster.
    with contextlib.suppress(ValueError):
        values = np.loadtxt(texts, dtype=np.float32, ndmin=2, comments=None)
        if np.isfinite(values).all():
            return NumberLines(values, lines)
    separator = _separator_of_numbers(texts[lines[0] - 1])
    rows = [Row(line, trim(_cells_of(texts[line - 1], separator))) for line in lines]
    return NumberLines(np.array([_numbers_of(path, row, rows[0]) for row in rows]), lines)


def _separator_of_numbers(text: str) -> str:
    """Return the separator of a line of numbers. `1,5 2,5` are two numbers."""
    for separator in ("", ";", "\t", "|"):
        if all(map(is_number, _cells_of(text, separator))):
            return separator
    return separator_of(text)


def _numbers_of(path: Path, row: Row, first: Row) -> np.ndarray:
    """Return the numbers of a row as (columns,) float32. Raises LockstepError."""
    if len(row.cells) != len(first.cells):
        what = f"{len(row.cells)} numbers, the first line has {len(first.cells)}"
        raise LockstepError(what, f"{path}:{row.line}", "give each line as many")
    values = np.zeros(len(row.cells), np.float32)
    for place, cell in enumerate(row.cells):
        where = f"{path}:{row.line}, column {place + 1}"
        try:
            with np.errstate(over="ignore"):
                values[place] = number_of(cell)
        except ValueError:
            what = f"not a number: {cell[:40]!r}"
            raise LockstepError(what, where, "write numbers only") from None
        if not np.isfinite(values[place]):
            todo = "fill in missing values first, or leave that part out"
            raise LockstepError("a value is NaN or infinite", where, todo)
    return values
