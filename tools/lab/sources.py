"""The sources of recordings: files of a folder, of recordings.csv, or of a table of events."""

from __future__ import annotations

import argparse
import os
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine.errors import LockstepError
from formats import tables
from formats.arrays import text_lines
from formats.lab.events import columns, event_table, raters
from formats.lab.events.alignment import Events
from formats.lab.events.columns import RECORDINGS
from formats.lab.events.event_table import EventTable, Rated
from formats.lab.sensor_tables import TABLES
from formats.lab.sensors import streams
from formats.tables import csv_rows
from tools.names import some_names

SOME = 5  # printed warnings of each kind

TABLE = "recordings.csv"
LOGS = (".log", ".log.gz")
"""Endings of tables that are read if a folder has no others: a log may be of any program."""
ENDING = re.compile(r"\.\w+$")
"""The end of a pattern that names a kind of files."""


@dataclass
class Source:
    """A file, with the person and the label from a table of files.

    where   the line in the table of files
    events  the labels of parts of the file, if a table has starts and stops
    sensors  the files of the recording by sensor, with --join files
    """

    path: Path
    subject: str = ""
    label: str = ""
    where: str = ""
    events: Events | None = None
    sensors: dict[str, Path] = field(default_factory=dict)


class Warnings(list[str]):
    """Warnings, limited to SOME sentences of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: Counter[str] = Counter()

    def add(self, kind: str, text: str) -> None:
        """Add a warning."""
        self.kinds[kind] += 1
        if self.kinds[kind] <= SOME:
            self.append(text)

    def once(self, kind: str, text: str) -> None:
        """Add a warning, unless the kind has a warning already."""
        if not self.kinds[kind]:
            self.add(kind, text)

    def closed(self) -> list[str]:
        """Return the warnings, with the number of dropped warnings of each kind."""
        more = [
            f"{count - SOME} more places: {kind}"
            for kind, count in self.kinds.items()
            if count > SOME
        ]
        return [*self, *more]


def sources_of(options: argparse.Namespace, warnings: Warnings) -> list[Source]:
    """Return the files to read, from the table of files or the pattern. Raises LockstepError."""
    data: Path = options.data
    if data.is_file():
        if not options.table:
            return [Source(data)]
        return _with_events(options, tables.read(options.table), warnings)
    table = options.table or (data / TABLE if (data / TABLE).is_file() else None)
    if table:
        rows = tables.read(table)
        if columns.has_times(rows.names, _pairs(options.event_columns)):
            return _with_events(options, rows, warnings)
        return _listed(options, table, warnings)
    endings = tuple(f"{kind}{gz}" for kind in TABLES for gz in ("", ".gz"))
    found = sorted(
        path
        for path in data.rglob(options.files or "*")
        if path.is_file() and not path.name.startswith(".")
    )
    names_ending = ENDING.search(options.files)  # the user chooses the kind of the files
    if not names_ending:
        tables_only = [path for path in found if path.name.lower().endswith(endings)]
        logs = [path for path in found if path.name.lower().endswith(LOGS)]
        found = tables_only or logs
    mapped = options.label_map.partition(":")[0]
    found = [
        path
        for path in found
        if path != data / mapped and path.resolve() != options.output.resolve()
    ]
    if not found:
        raise LockstepError(
            " ".join(["no tables", *filter(None, [options.files])]),
            str(data),
            f"give a folder with {', '.join(TABLES)}, or name one in --files",
        )
    return [Source(path) for path in found]


def join_sources(options: argparse.Namespace, sources: list[Source]) -> list[Source]:
    """Return a source for each recording, with the files of its sensors. Raises LockstepError."""
    if options.data.is_file():
        todo = "give the folder, or name the column of the sensor in --join"
        raise LockstepError("one file has nothing to join", str(options.data), todo)
    by_path = {source.path: source for source in sources}
    found = []
    for of_one in streams.group_files([*by_path], options.data):
        source = by_path[next(iter(of_one.values()))]
        source.sensors = of_one
        found.append(source)
    return found


def _pairs(text: str) -> dict[str, str]:
    """Convert `start=Onset,stop=Offset` to a dict. Raises LockstepError."""
    pairs = [[*map(str.strip, word.split("=", 1))] for word in split_commas(text)]
    if any(len(pair) != 2 for pair in pairs):
        todo = "write start=COLUMN,stop=COLUMN,label=COLUMN"
        raise LockstepError(f"{text!r}", "--event-columns", todo)
    for role, _ in pairs:
        if not columns.is_usual(role):
            todo = "give start, stop, duration, label, file, subject or rater, with a unit: start_s"
            raise LockstepError(f"no role {role!r}", "--event-columns", todo)
    return dict(pairs)


def _with_events(
    options: argparse.Namespace, table: tables.Table, warnings: Warnings
) -> list[Source]:
    """Return the files of a table of events, each with its events. Raises LockstepError.

    The table of a single file needs no column of files.
    """
    named = _pairs(options.event_columns)
    columns.check_named(table.head, named)
    found = columns.find_columns(table.names, named, RECORDINGS)
    if found is None:
        raise columns.missing_role(table.head, named, RECORDINGS)
    events = event_table.read(table, found, RECORDINGS)
    remark = f"{table.head.path}: events {events}"
    for note in events.notes:
        warnings.add("units of events", note)
    sources = []
    for path, rated in _rated_by_file(options, events).items():
        one = _of_one_rater(options, path, rated, events)
        about = Events(str(table.head.path), one.events, events.unit, options.event_clock, remark)
        sources.append(Source(path, where=events.where(one.events[0]), events=about))
    if not sources:
        todo = f"the column file may name {options.data.name}"
        raise LockstepError(f"no event of {options.data.name}", str(table.head.path), todo)
    return sources


def _rated_by_file(options: argparse.Namespace, events: EventTable) -> dict[Path, list[Rated]]:
    """Return the events of each file by rater. Raises LockstepError for a rater without events."""
    found: dict[tuple[Path, str], Rated] = {}
    for one in events.rated:
        if path := _file_of(one, events, options.data):
            of_file = found.setdefault((path, one.observation), replace(one, events=[]))
            of_file.events += one.events
    by_file: dict[Path, list[Rated]] = {}
    for (path, _), one in found.items():
        by_file.setdefault(path, []).append(one)
    table = str(events.table.head.path)
    if options.rater and not events.columns.rater:
        what = f"no column of raters among {', '.join(events.table.names)}"
        raise LockstepError(what, "--rater", "leave it out, or --event-columns rater=COLUMN")
    names = [*dict.fromkeys(one.observation for of in by_file.values() for one in of)]
    raters.check_chosen(names, split_commas(options.rater), RECORDINGS, table)
    return by_file


def _of_one_rater(
    options: argparse.Namespace, path: Path, rated: list[Rated], events: EventTable
) -> Rated:
    """Return the events of a file by one rater. Raises LockstepError for several."""
    names = [one.observation for one in rated]
    place = raters.choose(names, split_commas(options.rater))
    if place is None:
        where = events.where(rated[1].events[0])
        raise raters.several_raters(path.name, names, names[:1], RECORDINGS, where)
    return rated[place]


def _file_of(rated: Rated, events: EventTable, data: Path) -> Path | None:
    """Return the file of events, named with or without its ending; None for another file.

    Raises LockstepError if the folder has no such file, or several.
    """
    is_named = bool(events.columns.file)
    if data.is_file():
        own = (data.name, data.stem, data.name.partition(".")[0])
        return data if not is_named or rated.video in own else None
    where = events.where(rated.events[0])
    if not is_named:
        raise LockstepError("no file", where, "name the file of the event in a column file")
    if (data / rated.video).is_file():
        return data / rated.video
    table = events.table.head.path.resolve()
    found = [*data.rglob(rated.video), *data.rglob(f"{rated.video}.*")]
    found = sorted(path for path in found if path.is_file() and path.resolve() != table)
    if not found:
        raise LockstepError(f"no file {rated.video}", where, f"put it into {data}, or fix the name")
    if len(found) > 1:
        names = some_names([str(path.relative_to(data)) for path in found], SOME)
        todo = f"write the path in the folder, with the ending: {found[0].relative_to(data)}"
        raise LockstepError(f"{rated.video} may be {names}", where, todo)
    return found[0]


def _listed(options: argparse.Namespace, table: Path, warnings: Warnings) -> list[Source]:
    """Return the files of a table of files. Raises LockstepError with the line."""
    folder: Path = options.data
    needed = {"subject"} if options.no_label else {"subject", "label"}
    lines = text_lines(table)
    header, rows = csv_rows(table, lines)
    if "file" not in header:
        raise LockstepError(
            f"the header has {', '.join(header)}",
            f"{table}:1",
            "it needs file, and label and subject",
        )
    found: list[Source] = []
    for line, cells in rows:
        row = dict(zip(header, [cell.strip() for cell in cells], strict=False))
        where, path = f"{table}:{line}", folder / row.get("file", "")
        for name in ("file", *sorted(needed & {*header})):
            if not row.get(name):
                raise LockstepError(
                    f"{name} is empty", where, "give each recording a file, a person and a label"
                )
        if not path.is_file():
            raise LockstepError(
                f"no file {row['file']}", where, f"put it into {folder}, or fix the name"
            )
        if twin := [other.where for other in found if os.path.samefile(other.path, path)]:
            raise LockstepError(f"{row['file']} stands twice, also in {twin[0]}", where, "keep one")
        found.append(Source(path, row.get("subject", ""), row.get("label", ""), where))
    if not found:
        raise LockstepError("no recordings", str(table), "write a row for each")
    known = {source.path.resolve() for source in found} | {table.resolve()}
    left = sorted(
        path.name
        for path in folder.glob("*")
        if path.suffix in TABLES and path.resolve() not in known
    )
    if left:
        warnings.add(
            "files",
            f"{table}: it names no {some_names(left, SOME)}",
        )
    return found


def split_commas(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def name_inside(folder: Path, path: Path) -> str:
    """Return the name of a file, with the folders between: one name may be in many folders."""
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)


def name_part(pattern: str, flag: str, path: Path, options: argparse.Namespace) -> str:
    """Return the group of a pattern in the name of a file, relative to the given folder.

    Raises LockstepError if the pattern does not match.
    """
    if not pattern:
        return ""
    name = path.name if path == options.data else name_inside(options.data, path)
    found = re.search(pattern, name)
    if not found or not found[1]:
        raise LockstepError(f"{pattern!r} finds nothing in the name", str(path), f"change {flag}")
    return found[1]
