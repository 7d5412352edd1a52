"""Judge the times of a table: the unit of numbers, dates, and times of the day.

A unit is a key of `formats.cells.SECONDS`, `datetime` (ISO 8601), `clock` (h:mm:ss since midnight),
`duration` (`0 days 00:00:01.5`, `1.5 sec`), or a format of strptime.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import NamedTuple

import numpy as np

from formats.cells import DECIMAL_COMMA, SECONDS, UNIT_OF, is_missing

EPOCHS = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
"""Factors of numbers that count from 1970."""

EARLIEST, LATEST = 3e8, 4e9
"""Seconds since 1970 of the dates that a number may be: 1979 to 2096."""

SERIAL_DAYS = ((2e4, 8e4), (7.228e5, 7.656e5), (2.4438e6, 2.4867e6))
"""Days of the dates that a number may be: since 1900 in a spreadsheet (1954 to 2119), since the
year 0 in MATLAB, and of the Julian calendar (both 1979 to 2096)."""

SLOW_HZ = 1.0
"""Rate below which numbers without a unit may be in a smaller unit than seconds."""

SENSOR_HZ = (5, 2000)
"""Rates of sensors, which decide that unit."""

MINUTE_S = 60
"""Steps of whole minutes, as of activity counts, are left in seconds."""

LEAST_HZ, MOST_HZ = 0.2, 20000
"""Rates of samples that are no sign of another unit."""

CLOCK = re.compile(r"\s*\d{1,2}:\d{2}(:\d{2}([.,:]\d+)?)?\s*([AaPp][Mm])?\s*")
DATE = re.compile(r"\d+[-/.]\d+[-/.]\d+|\d:\d+")
ISO = re.compile(r"\s*\d{4}-\d\d-\d\d([T ]\d\d(:\d\d(:\d\d([.]\d+)?)?)?)?Z?\s*$")
"""ISO 8601 without a time zone, which NumPy parses."""


class TimeUnit(NamedTuple):
    """The unit of a column, a note where name and numbers differ, or a cure where none is sure."""

    unit: str
    note: str = ""
    cure: str = ""


def find_unit(stated: str, cells: Sequence[str]) -> TimeUnit:
    """Return the unit of a column of times.

    stated  unit in the name of the column, or an empty text
    cells   the first cells of the column
    """
    texts = [cell.strip() for cell in cells if not is_missing(cell)]
    numbers = [_number(text) for text in texts]
    wrong = [text for text, number in zip(texts, numbers, strict=True) if number is None]
    if 2 * len(wrong) > len(texts):
        if not all(map(CLOCK.fullmatch, wrong)) and np.isfinite([*map(_duration, wrong)]).all():
            return TimeUnit("duration")
        return _unit_of_dates(wrong)
    values = np.array([number for number in numbers if number is not None])
    if not len(values):
        return TimeUnit(stated if stated in SECONDS else "s")
    return _unit_of_numbers(stated, values)


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ".") if DECIMAL_COMMA.fullmatch(text) else text)
    except ValueError:
        return None


def find_unit_of_events(stated: str, cells: Sequence[str]) -> TimeUnit:
    """Return the unit of a column of starts or stops, which follow no rate, as `find_unit` does."""
    texts = [cell.strip() for cell in cells if not is_missing(cell)]
    wrong = [text for text in texts if _number(text) is None]
    if 2 * len(wrong) > len(texts):
        is_clock = np.isfinite([elapsed_s(text) for text in wrong]).all()
        return TimeUnit("clock") if is_clock else _unit_of_dates(wrong)
    known = [number for text in texts if (number := _number(text)) is not None]
    unit = stated if stated in SECONDS else "s"
    if not known or known[0] * SECONDS[unit] < LATEST:
        return TimeUnit(unit)
    by_size = _unit_by_size(known[0], lambda _: True)
    if by_size in ("", unit):
        return TimeUnit(unit)
    if stated in SECONDS:
        note = f"its numbers are {by_size}, not the {stated} of its name: {by_size} is used"
        return TimeUnit(by_size, note)
    return TimeUnit(by_size)


def unit_of_values(stated: str, values: np.ndarray) -> TimeUnit:
    """Return the unit of (N,) numbers, as `find_unit` does for texts."""
    known = values[np.isfinite(values)]
    if not len(known):
        return TimeUnit(stated if stated in SECONDS else "s")
    return _unit_of_numbers(stated, known)


def _unit_of_numbers(stated: str, values: np.ndarray) -> TimeUnit:
    steps = np.diff(values)
    steps = steps[steps > 0]
    step = float(np.median(steps)) if len(steps) else 0.0

    def fits(unit: str) -> bool:
        return step == 0 or LEAST_HZ <= 1 / (step * SECONDS[unit]) <= MOST_HZ

    by_size = _unit_by_size(float(values[0]), fits)
    if stated not in SECONDS:
        return TimeUnit(by_size) if by_size else _unit_by_rate(step)
    by_rate = by_size or (step and _unit_by_rate(step).unit)
    if by_rate and by_rate != stated and not fits(stated):
        note = f"its numbers are {by_rate}, not the {stated} of its name: {by_rate} is used"
        return TimeUnit(by_rate, note)
    return TimeUnit(stated)


def _unit_by_rate(step: float) -> TimeUnit:
    """Return the unit of times with this usual step, whose name has no unit."""
    if step == 0 or step % MINUTE_S == 0 or 1 / step >= SLOW_HZ:
        return TimeUnit("s")
    least, most = SENSOR_HZ
    for unit in ("ms", "us", "ns"):
        rate_hz = 1 / (step * SECONDS[unit])
        if least <= rate_hz <= most:
            note = (
                f"times with steps of {step:g} are read as {unit}, {rate_hz:.4g} samples a second"
            )
            return TimeUnit(unit, f"{note}: --time-unit s reads them as seconds")
    return TimeUnit("s")


def _unit_by_size(first: float, fits) -> str:  # type: ignore[no-untyped-def]
    """Return the unit of a number that is a date, or an empty text."""
    for unit, factor in EPOCHS.items():
        if EARLIEST * factor < first < LATEST * factor and fits(unit):
            return unit
    dated = any(low < first < high for low, high in SERIAL_DAYS)
    return "d" if dated and fits("d") else ""


# ---- dates
# --------------------------------------------------------------------------------------------------


def _unit_of_dates(cells: Sequence[str]) -> TimeUnit:
    """Return the unit of texts: ISO 8601, a time of the day, or a form of day, month and year."""
    if all(CLOCK.fullmatch(cell) for cell in cells):
        return TimeUnit("clock")
    if np.isfinite(dates(cells[:2], "datetime")).all():
        return TimeUnit("datetime")
    forms = [form for form in date_forms(cells[0]) if np.isfinite(dates(cells, form)).all()]
    if len(forms) == 1 or (forms and "." in forms[0][:6]):
        return TimeUnit(forms[0])  # points stand between day and month, in this order
    if forms:
        quoted = " or ".join(f"'{form}'" for form in forms)
        return TimeUnit("", cure=f"day or month first? --time-unit {quoted}")
    return TimeUnit("s")


_DATE = re.compile(r"(\d{1,4})([-/. ])(\d{1,2}|[A-Za-z]{3,9})\2(\d{1,4})")
_DAY_TIME = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2})(?:([.,:])(\d{1,6}))?)?(\s*[AaPp][Mm])?")


def date_forms(cell: str) -> list[str]:
    """Return the formats of strptime that may fit a date, the day before the month first."""
    day = _DATE.search(cell)
    if not day:
        return []
    mark = day[2]
    month = "%m" if day[3].isdigit() else ("%b" if len(day[3]) == 3 else "%B")
    year = "%Y" if len(day[4]) == 4 else "%y"
    orders = (
        [["%d", month, year], [month, "%d", year]] if day[3].isdigit() else [["%d", month, year]]
    )
    if len(day[1]) == 4:
        orders = [["%Y", month, "%d"]]
    time = _DAY_TIME.search(cell, day.end())
    clock = _clock_form(time) if time else ""
    between = cell[day.end() : time.start()] if time else ""
    before, after = cell[: day.start()], cell[time.end() if time else day.end() :]
    rest = [text.replace("%", "%%") for text in (before, between, after)]
    return [f"{rest[0]}{mark.join(order)}{rest[1]}{clock}{rest[2]}" for order in orders]


def _clock_form(time: re.Match[str]) -> str:
    form = ("%I" if time[6] else "%H") + ":%M"
    if time[3]:
        form += ":%S"
    if time[5]:
        form += f"{time[4]}%f"
    if time[6]:
        form += time[6][: -len(time[6].lstrip())] + "%p"
    return form


def dates(cells: Sequence[str], unit: str) -> np.ndarray:
    """Return (N,) float64, the microseconds since 1970, or since midnight for `clock`.

    NaN marks an invalid date. A time without a time zone counts as UTC.
    """
    if unit == "clock":
        return np.array([_clock(cell) for cell in cells])
    if unit == "duration":
        return np.array([_duration(cell) for cell in cells])
    # NumPy does not parse time zones.
    if unit == "datetime" and len(cells) and ISO.match(cells[0]):
        with contextlib.suppress(ValueError):
            found = np.array([cell.strip().rstrip("Z") for cell in cells], "datetime64[us]")
            return np.where(np.isnat(found), np.nan, found.astype(np.int64))
    return np.array([_date(cell.strip(), unit) for cell in cells])


def _date(cell: str, unit: str) -> float:
    try:
        if unit == "datetime":
            found = datetime.fromisoformat(cell.replace(",", "."))
        else:
            found = datetime.strptime(cell, unit)
    except ValueError:
        return float("nan")
    return round((found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp() * 1e6)


def _clock(cell: str) -> float:
    """Convert h:mm:ss.f, h:mm:ss:f (digits of a second) or h:mm AM to microseconds."""
    found = _DAY_TIME.fullmatch(cell.strip())
    if not found:
        return float("nan")
    hours = int(found[1])
    if found[6]:
        hours = hours % 12 + (12 if found[6].strip().lower() == "pm" else 0)
    seconds = 3600 * hours + 60 * int(found[2]) + int(found[3] or 0)
    return seconds * 1e6 + round(float(f"0.{found[5] or 0}") * 1e6)


_ELAPSED = re.compile(r"(?:(\d+):)?(\d+):(\d+(?:[.,]\d*)?)(?::(\d{3,6}))?")
_HALF_OF_DAY = re.compile(r".*[AaPp][Mm]")


def elapsed_s(text: str, in_hours: bool = False) -> float:
    """Return the seconds of h:mm:ss.f or m:ss.f; NaN for another text.

    in_hours  read a text with one colon as h:mm
    Digits after a third colon are digits of a second. Two such digits may be frames: NaN.
    """
    text = text.strip()
    if _HALF_OF_DAY.fullmatch(text):
        return _clock(text) * 1e-6
    found = _ELAPSED.fullmatch(text)
    if not found:
        return float("nan")
    hours, minutes = int(found[1] or 0), int(found[2])
    seconds = float(found[3].replace(",", ".")) + float(f"0.{found[4] or 0}")
    if in_hours and found[1] is None:
        return 3600 * minutes + 60 * seconds
    return 3600 * hours + 60 * minutes + seconds


def has_one_colon(text: str) -> bool:
    """Return whether a time may be h:mm or m:ss: 1:30, but not 1:30.5 or 1:30 PM."""
    return re.fullmatch(r"\s*\d+:\d+\s*", text) is not None


_DECIMAL = r"\d*[.,]?\d+"
_WITH_UNIT = re.compile(rf"([+-]?{_DECIMAL}(?:[eE][+-]?\d+)?)\s*([a-zµμ]+)", re.I)
_DAYS_AND_TIME = re.compile(
    r"(?:(?P<days>-?\d+) days?,?\s*)?"
    rf"(?:(?P<sign>[+-]?)(?P<hours>\d+):(?P<minutes>\d\d):(?P<seconds>{_DECIMAL}))?"
)
_ISO_DURATION = re.compile(
    r"(?P<sign>-?)P(?:(?P<days>\d+)D)?"
    rf"(?:T(?:(?P<hours>\d+)H)?(?:(?P<minutes>\d+)M)?(?:(?P<seconds>{_DECIMAL})S)?)?"
)


def _duration(cell: str) -> float:
    """Convert a duration to microseconds; NaN if the text is none.

    Forms: pandas and Python (`1 day, 0:00:01.5`), MATLAB and R (`1.5 sec`), ISO 8601 (`PT1.5S`).
    """
    cell = cell.strip()
    if found := _WITH_UNIT.fullmatch(cell):
        unit = UNIT_OF.get(found[2].lower())
        return _point_number(found[1]) * SECONDS[unit] * 1e6 if unit else float("nan")
    found = _DAYS_AND_TIME.fullmatch(cell) or _ISO_DURATION.fullmatch(cell)
    if not found or not any(found[name] for name in ("days", "hours", "minutes", "seconds")):
        return float("nan")
    days, hours, minutes, seconds = (
        _point_number(found[name] or "0") for name in ("days", "hours", "minutes", "seconds")
    )
    time_s = 3600 * hours + 60 * minutes + seconds
    if found["sign"] == "-":
        time_s = -time_s
    return (DAY_S * days + time_s) * 1e6


def _point_number(text: str) -> float:
    return float(text.replace(",", "."))


DAY_S = 86400.0


def over_midnight(seconds: np.ndarray) -> np.ndarray:
    """Return (N,) times of the day that go on where midnight passes."""
    falls = np.diff(seconds, prepend=seconds[:1]) < -DAY_S / 2
    return seconds + DAY_S * np.cumsum(falls)
