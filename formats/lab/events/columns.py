"""Find the columns of a table of events: start, stop, label, file, subject, rater, group.

Columns have usual names in any letters, with or without a unit: `Start (s)`, onset_ms, start_frame,
`Begin Time - hh:mm:ss.ms`. The caller may name columns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.contract import LockstepError
from formats.cells import SECONDS, is_missing, is_number, simple_name, split_unit
from formats.tables import Head

FRAMES = "frames"
MINUTES, HOURS = "m:ss", "h:mm"
"""Forms of a time with one colon."""

USUAL = {
    "video": "video video_name video_file media media_file media_file_name",
    "file": "file file_name filename",
    "recording": "recording session",
    "label": "label behaviour behavior activity class action annotation event trial_type code",
    "subject": "subject animal individual person participant user",
    "rater": "rater observer annotator coder experimenter",
    "group": "group",
}
"""{role: names of columns}, without units, as `simple_name` returns names."""

STARTS = "start start_time starttime start_timestamp time_start t_start tstart tmin "
STARTS += "begin begin_time begintime time_begin"
ENDS = "stop stop_time stoptime stop_timestamp time_stop t_stop tstop "
ENDS += "end end_time endtime end_timestamp time_end t_end tend tmax"
LENGTHS = "duration dur length len bout_duration bout_length event_duration event_length"
"""The names of columns of the time from start to stop, without units."""

TIMES = {
    STARTS: f"{ENDS} {LENGTHS}",
    "onset": f"offset {ENDS} {LENGTHS}",
    "from": f"to until {ENDS} {LENGTHS}",
}
"""The names of columns of starts, each with the names of stops, without units."""

LAST_FRAME = ("end", "last")
"""Words in the name of a column with the last frame of an event, not the first one after it."""

_FORM = re.compile(r"\s+-\s+(hh:mm:ss\.ms|ss\.msec|msec)$")
_FORMS = {"hh:mm:ss.ms": "", "ss.msec": "s", "msec": "ms"}
"""What ELAN writes behind the names of its columns of times."""

_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z][a-z])")
"""Where a word begins in a name such as startTime."""

_ONE_COLON = {"mm:ss": MINUTES, "m:ss": MINUTES, "min:s": MINUTES, "hh:mm": HOURS, "h:mm": HOURS}


class Column(NamedTuple):
    """A column by its name in the file; `unit` is of SECONDS, FRAMES, MINUTES, HOURS or empty."""

    name: str
    unit: str = ""


@dataclass(frozen=True)
class Columns:
    """The columns of a table of events; an optional column is empty.

    is_duration  whether `stop` holds the time from the start to the stop
    is_last      whether `stop` holds the last frame of an event, not the first one after it
    length       a column of the time from start to stop beside a stop; it is compared
    """

    start: Column
    stop: Column
    label: str
    file: str = ""
    subject: str = ""
    rater: str = ""
    group: str = ""
    is_duration: bool = False
    is_last: bool = False
    length: Column | None = None

    @property
    def unit(self) -> str:
        """Return the unit of both times; empty if the names do not give one unit."""
        return self.start.unit if self.start.unit == self.stop.unit else ""


@dataclass(frozen=True)
class Purpose:
    """The files that a table of events belongs to, and how messages name them.

    files   roles of the column of files, the first one first
    of      the file
    event   a row of the table
    rater   the person whose events these are
    choose  the option that chooses a rater
    rename  the option that names columns
    """

    files: tuple[str, ...]
    of: str
    event: str
    rater: str
    choose: str
    rename: str


VIDEOS = Purpose(("video", "file"), "video", "bout", "observation", "--observation", "--columns")
RECORDINGS = Purpose(
    ("file", "recording", "video"), "recording", "event", "rater", "--rater", "--event-columns"
)


def column_of(name: str) -> tuple[str, Column]:
    """Return the name of a column without its unit, and the column: start_frame gives start."""
    form = _FORM.search(name.strip())
    if form:
        return simple_name(name[: form.start()]), Column(name, _FORMS[form[1]])
    words = simple_name(_CAMEL.sub("_", name)).split("_")
    if {"frame", "frames"} & {*words}:
        rest = [word for word in words if word not in ("frame", "frames")]
        return "_".join(rest), Column(name, FRAMES)
    base, unit = split_unit(_CAMEL.sub("_", name))
    unit = _ONE_COLON.get(unit.lower(), unit)
    return base, Column(name, unit if unit in (*SECONDS, MINUTES, HOURS) else "")


def find_columns(
    names: Sequence[str], named: Mapping[str, str], purpose: Purpose
) -> Columns | None:
    """Return the columns of a table of events; None if start, stop or label is missing.

    names  of the columns in the file
    named  {usual name: name in the file}, as the user has chosen; a unit in the usual name counts
    """
    found = _candidates(names, named)
    times = _times(found)
    label = _name(found, ("label",))
    if not times or not label:
        return None
    start, stop = times
    length = _first(found, LENGTHS.split())
    words = {*simple_name(_name_of(stop, named)).split("_")}
    return Columns(
        start,
        stop,
        label,
        file=_name(found, purpose.files),
        subject=_name(found, ("subject",)),
        rater=_name(found, ("rater",)),
        group=_name(found, ("group",)),
        is_duration=stop == length,
        is_last=stop.unit == FRAMES and bool(words & {*LAST_FRAME}),
        length=None if stop == length else length,
    )


def find_length(names: Sequence[str]) -> str:
    """Return the column of the length of an event; empty without one."""
    column = _first(_candidates(names, {}), LENGTHS.split())
    return column.name if column else ""


def _name(found: Sequence[tuple[str, Column]], roles: Sequence[str]) -> str:
    """Return the name of the first column of the roles, the first role first; empty without one."""
    for role in roles:
        if column := _first(found, USUAL[role].split()):
            return column.name
    return ""


def _candidates(names: Sequence[str], named: Mapping[str, str]) -> list[tuple[str, Column]]:
    """Return the columns with their names without units; columns that the user has named first."""
    chosen = [_named(here, there) for here, there in named.items() if there in names]
    taken = {column.name for _, column in chosen}
    return [*chosen, *(column_of(name) for name in names if name and name not in taken)]


def check_named(head: Head, named: Mapping[str, str]) -> None:
    """Raise LockstepError if the header lacks a column that the user has named."""
    for here, there in named.items():
        if there not in head.names:
            present = ", ".join(filter(None, head.names)) or "nothing"
            what = f"no column {there} for {here}"
            raise LockstepError(what, head.where(max(1, head.line)), f"the header has {present}")


def is_usual(name: str) -> bool:
    """Return whether a column has a usual name of any role."""
    base, _ = column_of(name)
    lists = [*USUAL.values(), *TIMES, *TIMES.values()]
    return any(base in names.split() for names in lists)


def missing_role(head: Head, named: Mapping[str, str], purpose: Purpose) -> LockstepError:
    """Return the error for a table in which `find_columns` finds no columns."""
    found = _candidates(head.names, named)
    where = head.where(max(1, head.line))
    start, stop = (_first(found, names) for names in _names_of_times())
    if times := _times(found):
        start, stop = times
    if bool(start) != bool(stop):
        present, missing = (start, "stop") if start else (stop, "start")
        assert present
        what = f"a column {present.name!r} and no column of the {missing}"
        todo = f"an event needs both: {purpose.rename} {missing}=COLUMN; else rename this column"
        return LockstepError(what, where, todo)
    if any(is_number(name) and not is_missing(name) for name in head.names):
        todo = "write a line of names above it, such as start_s,stop_s,label"
        return LockstepError("the first line has numbers, no names", where, todo)
    role = "label" if start else "start"
    present_names = ", ".join(filter(None, head.names))
    what = f"no column of the {role} among {present_names}"
    return LockstepError(what, where, f"name it: {purpose.rename} {role}=COLUMN")


def has_times(names: Sequence[str], named: Mapping[str, str]) -> bool:
    """Return whether a table has a column of starts or of stops."""
    found = _candidates(names, named)
    return any(_first(found, usual) for usual in _names_of_times())


def _names_of_times() -> tuple[list[str], list[str]]:
    """Return the names of starts, and of stops. A duration alone is no event."""
    starts = [name for names in TIMES for name in names.split()]
    stops = [name for names in TIMES.values() for name in names.split()]
    return starts, [name for name in stops if name not in LENGTHS.split()]


def _named(here: str, there: str) -> tuple[str, Column]:
    """Return a column that the user has named. The unit is of the usual name, or of the file's."""
    base, usual = column_of(here)
    return base, Column(there, usual.unit or column_of(there)[1].unit)


def _name_of(column: Column, named: Mapping[str, str]) -> str:
    """Return the usual name that the user has given a column, or its own."""
    return next((here for here, there in named.items() if there == column.name), column.name)


def _times(found: Sequence[tuple[str, Column]]) -> tuple[Column, Column] | None:
    """Return the columns of start and stop; without a stop, of start and length."""
    for starts, stops in TIMES.items():
        start = _first(found, starts.split())
        stop = _first(found, stops.split())
        if start and stop:
            return start, stop
    return None


def _first(found: Sequence[tuple[str, Column]], usual: Sequence[str]) -> Column | None:
    """Return the column of the first usual name that is there."""
    for wanted in usual:
        for base, column in found:
            if base == wanted:
                return column
    return None
