"""Judge the texts of a table: numbers, missing values, names of columns, and units."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

MISSING = {"", "nan", "na", "n/a", "n.a.", "#n/a", "null", "none", "nil", "?", "-", "--"}
MISSING |= {"-nan", "nan(ind)", "-nan(ind)", "1.#qnan", "-1.#ind"}
MISSING_LABELS = MISSING | {"<na>", "<null>", "<none>", "<undefined>", "undefined", "nat", "(null)"}
"""Texts of programs for a label that is missing: pandas, R, ELAN and spreadsheets."""

DECIMAL_COMMA = re.compile(r"\s*[+-]?\d*,\d+([eE][+-]?\d+)?\s*")

INDEX_NAME = re.compile(r"unnamed: \d+(_level_\d+)?|index|level_\d+|__index_level_\d+__|rownames")
"""The names, in lower case, that pandas, R and pyarrow give row numbers."""

SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0, "d": 86400.0}
"""The seconds of each unit of a time."""

_SPELLINGS = {
    "s": "s sec secs second seconds",
    "ms": "ms msec msecs millis millisecond milliseconds",
    "us": "us µs μs usec usecs micros microsecond microseconds",
    "ns": "ns nsec nsecs nanos nanosecond nanoseconds",
    "min": "min mins minute minutes",
    "h": "h hr hrs hour hours",
    "d": "d day days",
}
UNIT_OF = {word: unit for unit, words in _SPELLINGS.items() for word in words.split()}
"""{spelling: a unit of SECONDS}."""

_IN_BRACKETS = re.compile(r"^(.*?)[\s_.]*[(\[{<]\s*([^)\]}>]*?)\s*[)\]}>]\s*$")
_AFTER_IN = re.compile(r"^(.*?)[\s_]+in[\s_]+(\w+)$", re.I)
_LAST_WORD = re.compile(r"^(.*?)[\s_.\-]+(\w+)$")

_UNITS = """date datetime iso8601 txt n raw cal uncal g mg m/s² m/s2 °/s dps rad deg degrees t mt
µt μt ut nt tesla gauss v mv µv μv uv volt volts ohm kohm kohms µs μs hz khz bpm % °c °f c f celsius
pa hpa kpa m cm mm km lux count counts unitless none - w mw db dbm local"""
_UNIT_WORDS = {*_UNITS.split(), *UNIT_OF, "no units", "iso 8601"}
_UNIT_FORM = re.compile(r"\S{1,8}[/^*]\S{1,8}|[yhdms]+[/:.\-].*", re.I)
"""A ratio or a power such as m/(s^2), and the form of a date such as yyyy/mm/dd."""


def is_missing(cell: str) -> bool:
    return cell.strip().lower() in MISSING


def is_missing_label(text: str) -> bool:
    """Return whether a text stands for a missing label."""
    return text.strip().lower() in MISSING_LABELS


def is_number(cell: str) -> bool:
    """Return whether a cell is a number, with a decimal point or comma, or a missing value."""
    cell = without_thousands(cell.strip())
    try:
        float(cell.replace(",", ".") if DECIMAL_COMMA.fullmatch(cell) else cell)
    except ValueError:
        return is_missing(cell)
    return True


_COMMA_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+\.\d*")
_POINT_THOUSANDS = re.compile(r"[+-]?\d{1,3}(\.\d{3})+,\d*")


def without_thousands(cell: str) -> str:
    """Return 1234.5 for 1,234.5 and for 1.234,5; without both signs the cell is unchanged."""
    if _COMMA_THOUSANDS.fullmatch(cell):
        return cell.replace(",", "")
    if _POINT_THOUSANDS.fullmatch(cell):
        return cell.replace(".", "").replace(",", ".")
    return cell


def number_of(cell: str) -> float:
    """Return the number of a cell, with a decimal point or comma; NaN for an empty cell.

    Only for cells of which the separator is known: 1,5 may be two cells. Raises ValueError.
    """
    cell = without_thousands(cell.strip())
    if not cell:
        return float("nan")
    return float(cell.replace(",", ".") if DECIMAL_COMMA.fullmatch(cell) else cell)


def is_index_name(name: str) -> bool:
    """Return whether a column of this name holds row numbers; an unnamed column does."""
    return not name.strip() or INDEX_NAME.fullmatch(name.strip().lower()) is not None


def trim(cells: Sequence[str]) -> list[str]:
    """Return the cells without blanks around the texts, and without empty cells at the end."""
    texts = [cell.strip() for cell in cells]
    while texts and not texts[-1]:  # empty columns of a spreadsheet
        texts.pop()
    return texts


class Quantity(NamedTuple):
    """A column's name without the unit, as `simple_name` returns it, and the unit or ""."""

    name: str
    unit: str


def split_unit(name: str) -> Quantity:
    """Divide the name of a column: `Time (s)` and `time_s` give time and s.

    A unit in brackets may be any text. A last word must be a unit of time.
    """
    for pattern in (_IN_BRACKETS, _AFTER_IN, _LAST_WORD):
        found = pattern.match(name.strip())
        if found and (pattern is _IN_BRACKETS or found[2].lower() in UNIT_OF):
            unit = found[2].strip()
            return Quantity(simple_name(found[1]), UNIT_OF.get(unit.lower(), unit))
    return Quantity(simple_name(name), "")


_UNIT_AT_END = re.compile(
    r"^(.*?)[\s_.]+(g|mg|m[\s_/]?s_?\^?2|mps2|m/s²|rad|rad[\s_/]s|deg|deg[\s_/]s|dps|ut)$"
)


def split_any_unit(name: str) -> Quantity:
    """Divide the name of a column also where a unit of motion ends the name, as in `acc_x_g`."""
    found = _UNIT_AT_END.match(name.strip().lower())
    if found:
        return Quantity(simple_name(found[1]), found[2])
    return split_unit(name)


def unit_key(unit: str) -> str:
    """Return a text that is equal for two spellings of a unit, such as m/s², m/(s^2) and ms2."""
    text = unit.lower().replace("²", "2").replace("µ", "u").replace("μ", "u")
    text = re.sub(r"deg(rees?)?|°", "deg", text).replace("dps", "degs")
    text = text.replace("mps", "ms")
    return re.sub(r"[^a-z0-9%]", "", text)


def simple_name(name: str) -> str:
    """Return a name in lower case, with one _ for blanks and punctuation."""
    return re.sub(r"[\W_]+", "_", name.strip().lower()).strip("_")


def are_units(cells: Sequence[str]) -> bool:
    """Return whether each text of a line is a unit. Empty cells are permitted."""
    texts = [cell.strip().strip("()[]").lower() for cell in cells if cell.strip()]
    known = [text in _UNIT_WORDS or _UNIT_FORM.fullmatch(text) is not None for text in texts]
    return bool(texts) and all(known)
