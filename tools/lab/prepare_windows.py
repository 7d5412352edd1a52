"""Convert recordings of sensors, as tables or as cases of an archive, to one .npz for the har task.

    python tools/prepare_windows.py walks/ walks.npz --rate 50
        a file per recording, named in recordings.csv
    python tools/prepare_windows.py all.csv all.npz --time ms --time-unit ms --subject who
        --label activity
    python tools/prepare_windows.py PAMAP2_Dataset/Protocol pamap2.npz --like pamap2
    python tools/prepare_windows.py Gun_TRAIN.tsv gun.npz             with Gun_TEST.tsv beside it
    python train.py har dataset.root=walks.npz

A table is CSV, or separated by semicolons, tabs or blanks, gzipped or not, or parquet (pip install
pyarrow). A table has a row for each sample. Cases are .tsv of UCR, .arff or .ts of UEA. In a folder
every table is a recording. A table recordings.csv in the folder (file, subject, label) lists the
recordings. Columns are found by common names or by --time, --channels, --label, --subject and
--recording. The command prints the columns in use.

A recording is cut where samples are missing (--max-gap), where time goes back and, unless --mixed,
where the label changes, so that a window has one label. A part that is shorter than a window
(--length) is left out, or padded (--pad). A lower --rate filters first (pip install scipy). Invalid
input is rejected with file, line and column. The file appears only when it is complete.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import re
import shlex
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import LockstepError, amount
from engine.files.atomic import write_atomically
from formats import tables
from formats.arrays import look_alikes, text_lines
from formats.cells import SECONDS, is_missing, is_missing_label, is_number
from formats.counters import Courses
from formats.ids import Ids, find_equal, id_key
from formats.lab import cases, sensor_tables
from formats.lab.events import columns, event_table, raters
from formats.lab.events.alignment import Events, Span
from formats.lab.events.columns import RECORDINGS
from formats.lab.events.event_table import EventTable, Rated
from formats.lab.public_sensors import LIKE
from formats.lab.rates import (
    changed,
    leaves_even_samples,
    nominal_rate,
    rate_of,
    resampled,
    steps_at,
    widest_gap,
)
from formats.lab.sensor_tables import TABLES, Reading, Sheet
from formats.lab.sensors import streams
from formats.lab.windows import LENGTH, VALID
from formats.tables import Layout, csv_rows
from tools.arguments import printed, whole_number
from tools.lab import several_sensors
from tools.names import some_names

TABLE = "recordings.csv"
LOGS = (".log", ".log.gz")
"""Endings of tables that are read if a folder has no others: a log may be of any program."""
ENDING = re.compile(r"\.\w+$")
"""The end of a pattern that names a kind of files."""
SOME = 5  # printed warnings of each kind
ROWS_AT_ONCE = 1 << 14  # of the signal, when it is copied

# ---- what is written
# ------------------------------------------------------------------------------------------------


@dataclass
class Piece:
    """A part of one recording.

    signal  (T, C) float32
    label   class number
    steps   (T,) class numbers, with --mixed
    """

    signal: np.ndarray
    label: int
    subject: str = ""
    test: bool = False
    steps: np.ndarray | None = None


@dataclass
class Output:
    """The collected pieces. The samples are in a temporary file until `save`.

    short  samples that were left out, by file
    """

    spool: Any
    length: int
    pad: bool
    lengths: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    subjects: list[str] = field(default_factory=list)
    test: list[bool] = field(default_factory=list)
    steps: list[np.ndarray] = field(default_factory=list)
    short: Counter[str] = field(default_factory=Counter)

    def add(self, piece: Piece, file: str) -> None:
        """Append a piece. A piece shorter than a window is padded or left out."""
        signal, steps = piece.signal, piece.steps
        if len(signal) < self.length and not self.pad:
            self.short[file] += len(signal)
            return
        if self.pad:
            more = ((0, max(0, self.length - len(signal))), (0, 0))
            valid = np.pad(np.ones((len(signal), 1), np.float32), more)
            signal = np.concatenate([np.pad(signal, more), valid], 1)
            steps = None if steps is None else np.pad(steps, more[0], constant_values=-1)
        self.spool.write(np.ascontiguousarray(signal, np.float32).data)
        self.lengths.append(len(signal))
        self.labels.append(piece.label)
        self.subjects.append(piece.subject)
        self.test.append(piece.test)
        if steps is not None:
            self.steps.append(steps.astype(np.int32))

    def save(self, out: Path, arrays: dict[str, np.ndarray], width: int, kept: list[int]) -> None:
        """Write the .npz, the same bytes each time.

        The signal is copied in blocks from the temporary file, which has `width` channels; the
        channels `kept` are written.
        """

        def fill(file: Any) -> None:
            with zipfile.ZipFile(file, "w") as archive:
                for name in ("signal", *arrays):
                    entry = zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))
                    with archive.open(entry, "w", force_zip64=True) as member:
                        if name == "signal":
                            shape = (sum(self.lengths), len(kept))
                            about = {"descr": "<f4", "fortran_order": False, "shape": shape}
                            np.lib.format.write_array_header_1_0(member, about)
                            self.spool.seek(0)
                            while block := self.spool.read(4 * width * ROWS_AT_ONCE):
                                rows = np.frombuffer(block, np.float32).reshape(-1, width)
                                member.write(rows[:, kept].tobytes())
                        else:
                            np.lib.format.write_array(member, arrays[name], allow_pickle=False)

        write_atomically(out, fill)


# ---- recordings in tables
# -------------------------------------------------------------------------------------------


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


def _joined(options: argparse.Namespace, sources: list[Source]) -> list[Source]:
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
    pairs = [[*map(str.strip, word.split("=", 1))] for word in _words(text)]
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
    raters.check_chosen(names, _words(options.rater), RECORDINGS, table)
    return by_file


def _of_one_rater(
    options: argparse.Namespace, path: Path, rated: list[Rated], events: EventTable
) -> Rated:
    """Return the events of a file by one rater. Raises LockstepError for several."""
    names = [one.observation for one in rated]
    place = raters.choose(names, _words(options.rater))
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


class Labels:
    """The numbers of the labels. An excluded label has number -1."""

    def __init__(self, options: argparse.Namespace):
        self.names: dict[str, int] = {}
        self.keep, self.exclude = _words(options.keep_classes), {*_words(options.exclude_label)}
        self.all_mapped, self.mapping, self.where = False, dict[str, str](), "--label-map"
        self.seen: set[str] = set()
        self.missing: Counter[str] = Counter()  # {text: rows} of texts that stand for no label
        self.ids = Ids("label", options.join_numbers)
        if "=" in options.label_map:
            pairs = [pair.split("=", 1) for pair in _words(options.label_map)]
            if any(len(pair) != 2 for pair in pairs):
                raise LockstepError(
                    f"{options.label_map!r}", self.where, "write old=new,old=new, or FILE:COLUMN"
                )
            self.mapping = {old.strip(): new.strip() for old, new in pairs}
        elif options.label_map:
            self._read_map(options)

    def _read_map(self, options: argparse.Namespace) -> None:
        name, _, column = options.label_map.partition(":")
        path = Path(name)
        if not path.is_file():
            folder = options.data if options.data.is_dir() else options.data.parent
            path = folder / name
        header, rows = csv_rows(path, text_lines(path))
        if column not in header:
            raise LockstepError(
                f"no column {column!r}",
                f"{path}:1",
                f"--label-map {name}:{' or :'.join(header[1:])}",
            )
        for line, cells in rows:
            if len(cells) <= header.index(column):
                raise LockstepError(f"{column} is empty", f"{path}:{line}", "name a class")
            self.mapping[cells[0].strip()] = cells[header.index(column)].strip()
        self.all_mapped, self.where = True, str(path)

    def number(self, text: str, where: str) -> int:
        """Return the number of a class; a new class gets the next number; -1 if excluded.

        Raises LockstepError for a label that is missing in the file of --label-map.
        """
        key = find_equal(text, self.mapping)
        if self.is_missing(text):
            text = ""
        if self.all_mapped and text and key not in self.mapping:
            raise LockstepError(
                f"label {text[:60]!r} is not in {self.where}", where, "add it there"
            )
        name = self.mapping.get(key, text)
        names = {text, name}
        names |= {find_equal(each, [*self.keep, *self.exclude]) for each in names}
        self.seen |= names
        if not name or names & self.exclude or (self.keep and not names & {*self.keep}):
            return -1
        name = self.ids.name(name, where)
        return self.names.setdefault(name, len(self.names))

    def is_missing(self, text: str) -> bool:
        """Return whether a text such as NA stands for no label, because no option names it."""
        named = text in self.keep or find_equal(text, self.mapping) in self.mapping
        return is_missing_label(text) and not named

    def remark(self) -> str:
        """Return a sentence on the samples without a label, or an empty text."""
        if not self.missing:
            return ""
        names = ", ".join(name or "an empty cell" for name in self.missing)
        count = sum(self.missing.values())
        text = f"{count:,} samples have no label ({names}): left out"
        some = next((name for name in self.missing if name), "")
        return f"{text}; --label-map {shlex.quote(some)}=NAME makes a class" if some else text

    def check(self) -> None:
        """Raise LockstepError if a class of --keep-classes is missing, or no sample has a label."""
        if missing := [name for name in self.keep if name not in self.seen]:
            some = ", ".join(sorted(self.seen - {""}, key=cases.natural)[:12])
            raise LockstepError(
                f"no label {missing[0]!r}", "--keep-classes", f"the data have {some}"
            )
        if not self.names:
            raise LockstepError(
                "not one sample has a label", "--label", "name its column, or give --no-label"
            )


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _factors(options: argparse.Namespace, channels: int) -> np.ndarray:
    """Return (C,) or (1,) factors of --scale.

    Raises LockstepError for a wrong number of factors.
    """
    found = np.array([float(one) for one in _words(options.scale)] or [1.0])
    if len(found) not in (1, channels):
        raise LockstepError(
            f"{len(found)} factors for {amount(channels, 'channel')}",
            "--scale",
            "give one, or one for each",
        )
    return found


def _name_inside(folder: Path, path: Path) -> str:
    """Return the name of a file, with the folders between: one name may be in many folders."""
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)


def name_part(pattern: str, flag: str, path: Path, options: argparse.Namespace) -> str:
    """Return the group of a pattern in the name of a file, relative to the given folder.

    Raises LockstepError if the pattern does not match.
    """
    if not pattern:
        return ""
    name = path.name if path == options.data else _name_inside(options.data, path)
    found = re.search(pattern, name)
    if not found or not found[1]:
        raise LockstepError(f"{pattern!r} finds nothing in the name", str(path), f"change {flag}")
    return found[1]


class Recordings:
    """Cuts the rows of sheets into pieces."""

    def __init__(self, options: argparse.Namespace, labels: Labels, warnings: Warnings):
        self.options, self.labels, self.warnings = options, labels, warnings
        self.rate, self.first = options.rate, ""
        self.scale = np.ones(1)
        self.start_s = 0.0  # the first time of a recording in its file
        self.courses: Courses | None = None
        self.rows, self.stretches = 0, 0  # a stretch has one label
        self.people = Ids("person", options.join_numbers)

    def pieces(self, sheet: Sheet, source: Source) -> Iterator[Piece]:
        """Yield the pieces of a file: of each person, and of each recording of a person."""
        self.scale = _factors(self.options, len(sheet.channels))
        self.courses = self.courses or Courses(len(sheet.channels))
        labels = self._labels(sheet, source)
        pattern = self.options.file_subject
        subject = name_part(pattern, "--file-subject", sheet.path, self.options) or source.subject
        codes, names = sheet.texts.get("subject", (np.zeros(len(labels), np.int64), [subject]))
        for rows in sheet.recordings():
            self.rows += len(rows)
            self.stretches += 1 + np.count_nonzero(np.diff(labels[rows]))
            self.courses.add(sheet.values[rows], None if self.options.no_label else labels[rows])
            person = self.people.name(names[codes[rows[0]]], sheet.at(rows[0]))
            for piece in self._cut(sheet, rows, labels[rows]):
                piece.subject = person
                yield piece

    def _labels(self, sheet: Sheet, source: Source) -> np.ndarray:
        """Return (N,) the class of each row, -1 without a class."""
        if self.options.no_label:
            return np.zeros(len(sheet.values), np.int64)
        if source.events:
            return self._labels_of_events(sheet, source.events)
        if "label" in sheet.texts:
            codes, names = sheet.texts["label"]
            found, first = np.unique(codes, return_index=True)
            table = np.full(len(names), -1)
            for code, row in zip(found.tolist(), first.tolist(), strict=True):
                table[code] = self.labels.number(names[code], sheet.at(row))
                if self.labels.is_missing(names[code]):
                    self.labels.missing[names[code]] += int((codes == code).sum())
            return table[codes]
        pattern = self.options.file_label
        text = name_part(pattern, "--file-label", sheet.path, self.options) or source.label
        if not text:
            todo = (
                "name its column in --label, its place in the file's name in --file-label, "
                f"or write {TABLE}"
            )
            raise LockstepError(
                "no label", str(sheet.path), f"{todo}; --no-label is for data to predict"
            )
        return np.full(len(sheet.values), self.labels.number(text, source.where or str(sheet.path)))

    def _labels_of_events(self, sheet: Sheet, events: Events) -> np.ndarray:
        """Return (N,) the class of each row by the events of the file, -1 without an event."""
        time = sheet.time
        if time is None:
            rate_hz = sheet.rate_hz or self.rate
            if not rate_hz:
                todo = "name the column in --time, or give --rate"
                raise LockstepError("events need times", str(sheet.path), todo)
            time = np.arange(len(sheet.lines)) / rate_hz
        numbers = {}
        for event in events.events:
            if event.behaviour not in numbers:
                where = events.where(event)
                numbers[event.behaviour] = self.labels.number(event.behaviour, where)
        found = np.full(len(time), -1)
        for rows, of_rows in _events_of_rows(sheet, events):
            _check_one_recording(sheet, rows, time[rows])
            first = time[rows[0]]
            usual_s = float(np.median(np.abs(np.diff(time[rows])))) if len(rows) > 1 else 0.0
            start_s = sheet.start_s + float(first)
            span = Span(sheet.path.name, start_s, float(np.ptp(time[rows])), usual_s)
            labels = of_rows.label_rows(time[rows] - first, span)
            found[rows] = [numbers.get(label, -1) for label in labels]
        return found

    def _cut(self, sheet: Sheet, rows: np.ndarray, labels: np.ndarray) -> Iterator[Piece]:
        """Yield the pieces of one recording: without a gap, and of one label unless --mixed."""
        values = sheet.values[rows]
        time = self._times(sheet, rows)
        self.start_s = float(time[0])
        breaks = np.zeros(len(rows), dtype=bool)  # True where a piece begins
        back = np.flatnonzero(np.diff(time) < 0) + 1
        if len(back) > 1 + len(rows) / 100:
            first_s = time[back[0]] - self.start_s
            raise LockstepError(
                f"time goes back {len(back)} times, the first to {first_s:.10g} s",
                sheet.at(rows[back[0]]),
                "sort the rows, or name --recording or --subject",
            )
        for row in back.tolist():
            text = f"time goes back by {time[row - 1] - time[row]:.3g} s: cut there"
            self.warnings.add("time goes back", f"{sheet.at(rows[row])}: {text}")
        breaks[back] = True
        # Samples with equal times are averaged: (M,) the first sample of each time.
        firsts = np.flatnonzero(np.append(True, np.diff(time) != 0))
        if len(rows) > 1 and len(firsts) < max(2, len(rows) / 2):
            what = f"{len(rows)} samples have {len(firsts)} different times"
            raise LockstepError(what, str(sheet.path), _cure_of_packets(sheet, time, firsts))
        if len(rows) - len(firsts) > len(rows) / 10:
            text = (
                f"{sheet.path}: {len(rows) - len(firsts)} of {len(rows)} samples have the "
                "time of the one before"
            )
            cure = f"such are averaged; {_even_samples(time, firsts)}"
            self.warnings.add("samples of one time", f"{text}: {cure}")
        values = np.add.reduceat(values, firsts) / np.diff(np.append(firsts, len(rows)))[:, None]
        time, rows, labels, breaks = time[firsts], rows[firsts], labels[firsts], breaks[firsts]
        parts = [
            part for part in np.split(np.arange(len(time)), np.flatnonzero(breaks)) if len(part)
        ]
        steady = max(parts, key=len)
        if len(steady) < 2:
            return
        self._check_rate(time[steady], sheet.path)
        usual = float(np.median(np.diff(time[steady])))
        if other := changed(time[steady]):
            row, interval = steady[other[0]], other[1]
            text = (
                f"a sample every {interval:.3g} s from here on, usually every {usual:.3g} s: "
                "has the rate changed?"
            )
            self.warnings.add("the rate", f"{sheet.at(rows[row])}: {text}")
        gap = self.options.max_gap or widest_gap(usual, self.options.length / self.rate)
        for part in parts:
            yield from self._stretches(
                sheet, rows[part], time[part], values[part], labels[part], gap
            )

    def _times(self, sheet: Sheet, rows: np.ndarray) -> np.ndarray:
        """Return (N,) seconds: from the column of times, the header's rate, or --rate."""
        stated = sheet.rate_hz
        if sheet.time is not None:
            time = sheet.time[rows]
            own = rate_of(time) if len(time) > 1 and (np.diff(time) > 0).all() else stated
            if stated and own and abs(own - stated) > 0.05 * stated:
                text = f"{own:.4g} samples a second by the times, {stated:g} by the lines above the"
                self.warnings.add("the rate", f"{sheet.path}: {text} header: the times are used")
            return time
        if not stated and not self.rate:
            todo = "name it in --time, or give --rate"
            raise LockstepError("no column of times", str(sheet.path), todo)
        if stated:
            text = f"no column of times: {stated:g} samples a second, as stated above the header"
            self.warnings.once("no times", f"{sheet.path}: {text}")
        return np.arange(len(rows)) / (stated or self.rate)

    def _check_rate(self, time: np.ndarray, path: Path) -> None:
        """Compare the rate of (N,) rising times with the rate of the output.

        The first recording sets the rate of the output, unless --rate does. Raises LockstepError
        for a rate that does not fit.
        """
        own = rate_of(time)
        if not self.rate:
            self.first = str(path)
            self.rate = nominal_rate(time)
            if not 0.2 < own < 20000:
                self.warnings.add(
                    "unit",
                    (
                        f"{path}: {own:.3g} samples a second: is the time in another unit "
                        "(--time-unit)?"
                    ),
                )
        if self.first and abs(own - self.rate) > 0.05 * self.rate:
            raise LockstepError(
                f"{own:.4g} samples a second, {self.first} has {self.rate:g}",
                str(path),
                f"--rate {min(own, self.rate):.4g} takes all at one rate",
            )
        if not self.rate / 5.3 < own < 400 * self.rate:
            raise LockstepError(
                f"{own:.4g} samples a second, taken at {self.rate:g}",
                str(path),
                "give another --time-unit or --rate",
            )
        self._note_lines(time, own, path)

    def _note_lines(self, time: np.ndarray, own: float, path: Path) -> None:
        """Add a warning if the output lies on lines between even samples."""
        if not leaves_even_samples(time, self.rate):
            return
        text = (
            f"{own:.6g} samples a second are resampled to {self.rate:g}, along lines between the "
            f"samples, which lowers fast motion: --rate {nominal_rate(time):.6g} keeps its samples"
        )
        self.warnings.once("resampled", f"{path}: {text}")

    def _stretches(
        self,
        sheet: Sheet,
        rows: np.ndarray,
        time: np.ndarray,
        values: np.ndarray,
        labels: np.ndarray,
        gap: float,
    ) -> Iterator[Piece]:
        """Yield the pieces between missing values or samples. `time` is sorted."""
        if self.options.missing == "fill":
            values = _filled(time, values, gap)
        alive = ~np.isnan(values).any(1)
        lost = np.flatnonzero(~alive & np.append(True, alive[:-1]))  # first sample of each hole
        for row in lost[(lost > 0)].tolist():
            self.warnings.add(
                "values are missing", f"{sheet.at(rows[row])}: values are missing: cut there"
            )
        wide = np.flatnonzero(np.diff(time) > 1.001 * gap)
        for row in wide.tolist():
            text = (
                f"no sample for {time[row + 1] - time[row]:.3g} s, {time[row] - self.start_s:.4f} "
                "s after the start of the recording: cut there"
            )
            self.warnings.add("no sample", f"{sheet.at(rows[row + 1])}: {text}")
        begins = np.zeros(len(time), dtype=bool)
        begins[wide + 1] = True
        begins |= alive != np.append(alive[:1], alive[:-1])
        for part in np.split(np.arange(len(time)), np.flatnonzero(begins)):
            if not len(part) or not alive[part[0]] or steps_at(time[part], self.rate) < 2:
                continue
            signal = resampled(time[part], values[part] * self.scale, self.rate)
            even = time[part[0]] + np.arange(len(signal)) / self.rate
            middles = (time[part][1:] + time[part][:-1]) / 2
            steps = labels[part][np.searchsorted(middles, even)]  # label of the nearest sample
            yield from self._by_label(signal, steps)

    def _by_label(self, signal: np.ndarray, steps: np.ndarray) -> Iterator[Piece]:
        """Yield the pieces of equal labels; with --mixed, the complete signal."""
        if self.options.mixed and (steps >= 0).any():
            yield Piece(signal, 0, steps=steps)
        for part in np.split(np.arange(len(steps)), np.flatnonzero(np.diff(steps)) + 1):
            if steps[part[0]] >= 0 and not self.options.mixed:
                yield Piece(signal[part], int(steps[part[0]]))


OVERLAP_S = 1.0
"""Seconds that two parts of a file may share: a clock that was set back a little."""


def _check_one_recording(sheet: Sheet, rows: np.ndarray, time: np.ndarray) -> None:
    """Raise LockstepError if the (n,) times of some rows begin again: events fit two recordings."""
    back = np.flatnonzero(np.diff(time) < 0) + 1
    parts = [part for part in np.split(time, back) if len(part)]
    spans = sorted((part.min(), part.max()) for part in parts)
    latest = -np.inf
    for low, high in spans:
        if low < latest - OVERLAP_S:
            what = "time begins again, so the events are of several recordings"
            todo = "name the person of each event in a column subject, or write a file of each one"
            raise LockstepError(what, sheet.at(rows[back[0]]), todo)
        latest = max(latest, high)


def _events_of_rows(sheet: Sheet, events: Events) -> Iterator[tuple[np.ndarray, Events]]:
    """Yield the rows of a file, (n,) numbers, and the events of these rows.

    Events of persons are of the rows of the person. Raises LockstepError for events of several
    persons in a file that names none, and for a person who is not in the file.
    """
    people = events.people
    every = np.arange(len(sheet.lines))
    if people == [""] or ("subject" not in sheet.texts and len(people) == 1):
        yield every, events
        return
    if "subject" not in sheet.texts:
        what = f"events of {amount(len(people), 'person')} in a file that names none: "
        what += ", ".join(people)
        where = events.where(events.events[0])
        raise LockstepError(what, where, "name the column of persons: --subject COLUMN")
    codes, names = sheet.texts["subject"]
    for person in people:
        of_person = [event for event in events.events if event.subject == person]
        known = [code for code, name in enumerate(names) if id_key(name) == id_key(person)]
        if not known:
            what = f"no person {person!r} in {sheet.path.name}"
            todo = f"it has {raters.some_of(names)}"
            raise LockstepError(what, events.where(of_person[0]), todo)
        yield np.flatnonzero(codes == known[0]), replace(events, events=of_person)


def _even_samples(time: np.ndarray, firsts: np.ndarray) -> str:
    """Return the options that take packets of samples as even, in a sentence.

    time    (N,) seconds
    firsts  (M,) the first sample of each packet, whose samples have one time
    The first and the last packet may be incomplete.
    """
    rate = "HZ"
    if len(firsts) > 2 and time[firsts[-1]] > time[firsts[1]]:
        rate_hz = (firsts[-1] - firsts[1]) / (time[firsts[-1]] - time[firsts[1]])
        rate = f"{rate_hz:.4g}"
    return f"--time none --rate {rate} takes all samples as even"


def _cure_of_packets(sheet: Sheet, time: np.ndarray, firsts: np.ndarray) -> str:
    cure = _even_samples(time, firsts)
    unnamed = [f"--{role}" for role in ("subject", "recording") if role not in sheet.used]
    if unnamed:
        cure += f"; if several share the times, name {' or '.join(unnamed)}"
    return cure


def _filled(time: np.ndarray, values: np.ndarray, gap: float) -> np.ndarray:
    """Return the values with short holes of each channel filled by a line.

    A hole is short if the samples beside the hole are at most `gap` seconds apart.
    """
    values = values.copy()
    for column in values.T:
        known = np.flatnonzero(~np.isnan(column))
        holes = np.flatnonzero(np.isnan(column))
        if not len(known) or not len(holes):
            continue
        after = np.searchsorted(known, holes)
        inside = (after > 0) & (after < len(known))
        holes, after = holes[inside], after[inside]
        narrow = time[known[after]] - time[known[after - 1]] <= 1.001 * gap
        column[holes[narrow]] = np.interp(time[holes[narrow]], time[known], column[known])
    return values


# ---- the command line
# -----------------------------------------------------------------------------------------------

TEXTS = {
    "--files": ("PATTERN", "the files of the folder to read, such as *.csv"),
    "--columns": ("A,B,…", "names of the columns, for files without a header"),
    "--time": ("COLUMN", "default: time, timestamp, …; none: the samples are even, at --rate"),
    "--time-unit": (
        "UNIT",
        "s, ms, us, ns, min, h, d, datetime, clock (h:mm:ss), duration, or a form such as "
        "%%d.%%m.%%Y %%H:%%M:%%S (default: found in the name and the values)",
    ),
    "--channels": ("A,B,…", "columns to learn from, * for any text; default: all other numbers"),
    "--label": ("COLUMN", "default: label, activity, …"),
    "--subject": ("COLUMN", "the person; default: subject, user, …"),
    "--recording": ("COLUMN,…", "the recording of a row; default: recording, session, …"),
    "--join": (
        "files|COLUMN",
        "join the sensors of a recording: its files, or the rows that a column names",
    ),
    "--file-label": ("REGEX", "one group, which matches the label in a file's name"),
    "--file-subject": ("REGEX", "one group: the person in a file's name, 'subject(\\d+)'"),
    "--label-map": ("MAP", "old=new,old=new, or FILE.csv:COLUMN with old in the first column"),
    "--keep-classes": ("A,B,…", "keep only these classes"),
    "--exclude-label": ("A,B,…", "leave out samples with these labels, such as 0"),
    "--separator": ("CHAR", "of the cells (default: found in the file)"),
    "--event-columns": (
        "ROLE=COLUMN,…",
        "of a table of events: start=Onset,stop=Offset,label=Code",
    ),
    "--rater": ("NAME", "whose events to read, of a table of events by several raters"),
    "--comment": ("CHARS", "first characters of lines that are no rows (default: #, // or %%)"),
    "--encoding": ("NAME", "of the text, such as cp1252 (default: found in the file)"),
    "--scale": ("F,…", "multiply all channels, or each, such as 9.81 for g to m/s2"),
}
"""Options with a text value, empty by default: form and help."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="prepare_windows.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "data",
        type=Path,
        metavar="TABLE|FOLDER",
        help="a table, a folder of them, or cases of an archive",
    )
    add("output", type=Path, metavar="OUT.npz", help="the file to write; must not exist")
    add(
        "--like",
        choices=sorted(LIKE),
        help="a public data set in the published form: the columns, labels and people are known",
    )
    help_text = (
        f"table of file, subject and label, or of events: file, start_s, stop_s, label (default: "
        f"FOLDER/{TABLE} if present)"
    )
    add("--table", type=Path, metavar="CSV", help=help_text)
    for flag, (form, help_text) in TEXTS.items():
        add(flag, default="", metavar=form, help=help_text)
    help_text = (
        "times of events: of the file's clock, or from its first sample (default: what fits)"
    )
    add("--event-clock", choices=("file", "start"), default="", help=help_text)
    help_text = "persons or labels that are equal as numbers, such as 1, 01 and 1.0, are one"
    add("--join-numbers", action="store_true", help=help_text)
    help_text = "line of the header, from 1 (default: found above the rows)"
    add("--header", type=whole_number(1), default=0, metavar="LINE", help=help_text)
    help_text = "lines to leave out at the top of each table"
    add("--skip", type=whole_number(0), default=0, metavar="LINES", help=help_text)
    add("--no-label", action="store_true", help="the data have no labels: data to predict")
    add(
        "--mixed",
        action="store_true",
        help="do not cut where the label changes: a window has the label of the middle",
    )
    add(
        "--rate",
        type=float,
        default=0.0,
        metavar="HZ",
        help="steps per second of the output (default: the rate of the recordings)",
    )
    help_text = "length of a window (default: 128; cases: the length of a case)"
    add("--length", type=whole_number(2), default=0, metavar="STEPS", help=help_text)
    add(
        "--pad",
        action="store_true",
        help="pad shorter pieces, and add a channel `valid`; cases are padded to the longest case",
    )
    help_text = (
        "cut at a longer time without samples (default: 20 usual intervals, or a quarter of a "
        "window if the quarter is shorter, but at least 3 intervals)"
    )
    add("--max-gap", type=float, default=0.0, metavar="S", help=help_text)
    help_text = (
        "empty cells and NaN: an error (the default), a line through the neighbours up to "
        "--max-gap, or a cut"
    )
    add("--missing", choices=("refuse", "fill", "cut"), default="refuse", help=help_text)
    add(
        "--bad-lines",
        choices=("refuse", "skip"),
        default="refuse",
        help="handling of unreadable lines",
    )
    first, _ = parser.parse_known_args(argv)
    parser.set_defaults(**LIKE.get(first.like or "", {}))
    options = parser.parse_args(argv)
    for flag, text in (
        ("--file-label", options.file_label),
        ("--file-subject", options.file_subject),
    ):
        with contextlib.suppress(re.error):
            if not text or re.compile(text).groups == 1:
                continue
        parser.error(f"argument {flag}: {text!r} is no pattern with one group in brackets")
    try:
        _ = [float(one) for one in _words(options.scale)]
    except ValueError:
        parser.error(f"argument --scale: {options.scale!r} is no number")
    if options.output.suffix != ".npz":
        parser.error(f"argument OUT.npz: {options.output} does not end in .npz")
    if not (0 <= options.rate < 1e9 and 0 <= options.max_gap < 1e9):
        parser.error("argument --rate, --max-gap: give a number above 0")
    options.mixed &= not options.no_label  # without labels no recording is cut at a label
    return options


def prepare(options: argparse.Namespace) -> str:
    """Write the .npz. Return the text to print. Raises LockstepError."""
    data: Path = options.data
    if options.output.exists():
        raise LockstepError("it exists", str(options.output), "remove it, or give another name")
    if not data.exists():
        raise LockstepError(
            "no such file or folder", str(data), "give a table, or a folder of tables"
        )
    for folder in (data, data / "UCI HAR Dataset"):
        if (folder / "train" / "Inertial Signals").is_dir() or data.suffix == ".npz":
            raise LockstepError(
                "har reads it as it is", str(folder), f"python train.py har dataset.root={data}"
            )
    archive = None
    if data.is_dir():
        archive = cases.find(data)
    elif _is_cases(options):
        archive = data
    options.output.parent.mkdir(parents=True, exist_ok=True)
    warnings = Warnings()
    with tempfile.TemporaryFile(dir=options.output.parent) as spool:
        out = Output(spool, options.length, options.pad)
        about = _of_cases(options, archive, out) if archive else _of_tables(options, out, warnings)
        return _write(options, out, warnings, about)


def _is_cases(options: argparse.Namespace) -> bool:
    """Return whether a file has cases: by the ending; of a .tsv by a number in the first cell."""
    path: Path = options.data
    if path.suffix != ".tsv" or options.columns:
        return path.suffix in cases.KINDS
    cell = next(tables.blocks(path, 1), [""])[0].split("\t")[0]
    return is_number(cell) and not is_missing(cell)


@dataclass
class About:
    """The input: a line to print, the channels, and further arrays of the .npz.

    unit  step of a recording, or case
    kept  the channels that are written, by number; empty: all
    hint  why all pieces may be short
    """

    classes: list[str]
    line: str
    channels: list[str]
    more: dict[str, np.ndarray]
    unit: str
    kept: list[int] = field(default_factory=list)
    hint: str = ""

    @property
    def written(self) -> list[int]:
        return self.kept or [*range(len(self.channels))]


def _of_cases(options: argparse.Namespace, path: Path, out: Output) -> About:
    """Add the cases of an archive to the output. Raises LockstepError for missing values."""
    found, labels = cases.read(path), Labels(options)
    chosen = []
    for series, label, where in zip(found.series, found.labels.tolist(), found.where, strict=True):
        holes = np.argwhere(np.isnan(series))
        if len(holes) and options.missing != "fill":
            raise LockstepError(
                (
                    f"{len(holes)} values are missing, the first in channel {holes[0, 1] + 1}, "
                    f"step {holes[0, 0] + 1}"
                ),
                where,
                "--missing fill draws a line over them",
            )
        for channel in series.T if len(holes) else ():
            known = ~np.isnan(channel)
            if not known.any():
                raise LockstepError("a channel without a value", where, "delete the line")
            channel[~known] = np.interp(
                np.flatnonzero(~known), np.flatnonzero(known), channel[known]
            )
        chosen.append(labels.number(found.classes[label], where))
    labels.check()
    sizes = [len(series) for series in found.series]
    low, high = min(sizes), max(sizes)
    if low < high and not options.pad and not options.length:
        raise LockstepError(
            f"cases of {low} to {high} steps",
            str(path),
            f"--pad pads them to {high} with a mask, --length {low} cuts each into windows",
        )
    out.length, options.mixed = options.length or high, False
    options.length = out.length
    factor = _factors(options, count := found.series[0].shape[1])
    for n, (series, number) in enumerate(zip(found.series, chosen, strict=True)):
        if number >= 0:
            test = bool(found.test is not None and found.test[n])
            out.add(Piece((series * factor).astype(np.float32), number, test=test), str(path))
    span = f"{low} to {high}" if high > low else str(low)
    line = f"{amount(len(sizes), 'case')} of {span} steps x {amount(count, 'channel')}"
    more = {"rate_hz": np.array(options.rate)} if options.rate else {}
    names = [f"channel_{n + 1}" for n in range(count)]
    return About(
        [*labels.names], line, names, more, "case" if low == high or options.pad else "step"
    )


def _of_tables(options: argparse.Namespace, out: Output, warnings: Warnings) -> About:
    """Add the recordings of tables to the output. Raises LockstepError."""
    from tqdm import tqdm

    out.length = options.length = options.length or LENGTH
    sources, labels, how = sources_of(options, warnings), Labels(options), _reading(options)
    how.ignored = _ignored(options, sources[0])
    if options.join == several_sensors.FILES:
        sources = _joined(options, sources)
    else:
        listed = options.table or options.data / TABLE if sources[0].where else None
        several_sensors.check_names([each.path for each in sources], options.data, listed)
    reader = _Reader(options, how, warnings, bool(sources[0].where))
    recordings = Recordings(options, labels, warnings)
    rows, used = 0, dict[str, str]()
    with _uncollected(), tqdm(unit=" lines", unit_scale=True, disable=None) as bar:
        how.tell = bar.update
        for number, source in enumerate(sources, 1):
            bar.set_description(f"{source.path.name}, {number} of {len(sources)}")
            sheet = reader.read(source)
            for note in sheet.notes:
                warnings.add("lines and commas", note)
            if "subject" not in sheet.texts and source.events and len(source.events.people) == 1:
                source.subject = source.events.people[0]
            if "subject" not in sheet.texts and not source.subject and not options.file_subject:
                todo = "training will split by piece"
                if len(sources) > 1:
                    source.subject = _name_inside(options.data, source.path)
                    todo = "each file counts as a person of its own"
                text = f"nothing says who was recorded: {todo} (--subject, --file-subject)"
                if not options.no_label:
                    warnings.once("person", text)
            rows, used = rows + len(sheet.lines), used | sheet.used
            for piece in recordings.pieces(sheet, source):
                out.add(piece, str(source.path))
    if not options.no_label:
        labels.check()
    if remark := labels.remark():
        warnings.add("no label", remark)
    if VALID in reader.channels:
        raise LockstepError(
            f"a channel of the name {VALID!r}", str(sources[0].path), "rename it: it means padding"
        )
    kept = _measuring(options, reader.channels, recordings.courses, warnings)
    taken = "".join(f"{what} {name}, " for what, name in used.items())
    names = ", ".join(reader.channels[c] for c in kept)
    line = f"{amount(rows, 'sample')} in {amount(len(sources), 'file')}: {taken}channels {names}"
    remarks = [source.events.remark for source in sources[:1] if source.events]
    line = "\n".join([*remarks, line])
    rate_hz = np.array(float(recordings.rate))
    hint = ""
    usual = recordings.rows / max(1, recordings.stretches)
    if "label" in used and usual < out.length / 4:
        hint = f", and the label {used['label']} changes every {usual:.3g} samples"
    return About([*labels.names], line, reader.channels, {"rate_hz": rate_hz}, "step", kept, hint)


class _Reader:
    """Reads the recordings of a folder, and joins the sensors of each with --join.

    listed  whether a table lists the files
    """

    def __init__(self, options: argparse.Namespace, how: Reading, warnings: Warnings, listed: bool):
        self.options, self.how, self.warnings = options, how, warnings
        self.readings: dict[str, Reading] = {}
        self.selected: list[str] = []
        if options.join:
            self.selected, how.channels = how.channels, []
        self.clocks = several_sensors.Clocks(options.data, listed)

    def read(self, source: Source) -> Sheet:
        """Read a recording. Raises LockstepError for several sensors that are not joined."""
        if source.sensors:
            sheet = several_sensors.read_joined(source.sensors, self.how, self.readings)
        else:
            sheet = sensor_tables.read(source.path, self.how)
        several_sensors.check_rows(sheet)
        if self.how.sensor:
            sheet = streams.join_rows(sheet)
        if self.selected:
            sheet = streams.select(sheet, self.selected)
        self.channels = sheet.channels
        person = self._name("subject", self.options.file_subject, sheet, source.subject)
        label = self._name("label", self.options.file_label, sheet, source.label)
        if warning := self.clocks.check(sheet, person, label):
            self.warnings.once("two files of the same times", warning)
        return sheet

    def _name(self, role: str, pattern: str, sheet: Sheet, listed: str) -> str:
        """Return the person or the label of a file, or those of its rows; empty if unknown."""
        if role in sheet.texts:
            return " ".join(sorted(sheet.texts[role][1]))
        return name_part(pattern, f"--file-{role}", sheet.path, self.options) or listed


def _ignored(options: argparse.Namespace, source: Source) -> dict[str, str]:
    """Return {role: reason} of the columns that are not read, because the role is known."""
    found = {}
    if options.no_label:
        found["label"] = "--no-label"
    elif source.events:
        found["label"] = "the table of events has the labels"
    elif not options.label and (source.label or options.file_label):
        named = options.table or TABLE if source.label else "--file-label"
        found["label"] = f"{named} has the labels"
    if not options.subject and (source.subject or options.file_subject):
        named = options.table or TABLE if source.subject else "--file-subject"
        found["subject"] = f"{named} names the person"
    return found


def _measuring(
    options: argparse.Namespace, channels: list[str], courses: Courses | None, warnings: Warnings
) -> list[int]:
    """Return the channels to write, by number: --channels, or all that measure something.

    If none measures anything, all are written, with a warning.
    """
    if options.channels or courses is None:
        return [*range(len(channels))]
    findings = courses.findings(channels)
    left_out = [each for each in findings if each.sure]
    gone = {each.name for each in left_out}
    kept = [c for c, name in enumerate(channels) if name not in gone]
    if not kept:
        for each in left_out:
            text = f"{each.name} {each.reason}: it is kept, because no other channel is there"
            warnings.add("channels like counters", text)
        return [*range(len(channels))]
    with_all = ",".join(channels)
    for each in left_out:
        text = f"{each.name} {each.reason}: it is left out; --channels {with_all} takes all"
        warnings.add("channels that are left out", text)
    for each in findings:
        if not each.sure:
            others = ",".join(channels[c] for c in kept if channels[c] != each.name)
            text = f"{each.name} {each.reason}: a counter? --channels {others} leaves it out"
            warnings.add("channels like counters", text)
    return kept


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Switch the garbage collector off.

    The lists of cells have no cycles. A search for cycles takes as long as reading the cells.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _reading(options: argparse.Namespace) -> Reading:
    """Return the options for reading a table. Raises LockstepError for an unknown unit of time."""
    if (
        options.time_unit not in ("", *SECONDS, "datetime", "clock", "duration")
        and "%" not in options.time_unit
    ):
        raise LockstepError(
            f"unit {options.time_unit!r}",
            "--time-unit",
            "give s, ms, us, ns, min, h, d, datetime, clock, duration, or a form with %",
        )
    how = Reading(_layout(options), _words(options.channels), unit=options.time_unit)
    for what in sensor_tables.GUESSES:
        name = getattr(options, what, "")
        setattr(how, what, None if name == "none" else name)
    how.sensor = None
    if options.join != several_sensors.FILES:
        how.sensor = options.join or None
    how.missing = options.missing != "refuse"
    how.skip = options.bad_lines == "skip"
    return how


def _layout(options: argparse.Namespace) -> Layout:
    return Layout(
        separator=options.separator.replace("\\t", "\t"),
        columns=_words(options.columns),
        header=options.header,
        skip=options.skip,
        comment=options.comment,
        encoding=options.encoding,
    )


def _write(options: argparse.Namespace, out: Output, warnings: Warnings, about: About) -> str:
    """Write the .npz. Return the text to print."""
    left = sum(out.short.values())
    if not out.lengths:
        what = f"all {left} steps are in pieces shorter than the {out.length} of a window"
        todo = "give a smaller --length, a longer --max-gap, --mixed, --pad or another --label"
        if options.no_label:
            todo = "give a smaller --length, a longer --max-gap, or --pad"
        raise LockstepError(what + about.hint, str(options.data), todo)
    arrays = {"lengths": np.array(out.lengths)} | about.more
    order = sorted(range(len(about.classes)), key=lambda n: cases.natural(about.classes[n]))
    # `place` maps the old number of a class to the new number.
    classes, place = [about.classes[n] for n in order], np.append(np.argsort(order), -1)
    labels = place[out.labels]
    if options.mixed:
        steps = place[np.concatenate(out.steps)].astype(np.int32)
        arrays |= {"step_label": steps, "classes": np.array(classes)}
    elif not options.no_label:
        arrays |= {"label": labels, "classes": np.array(classes)}
    if any(out.subjects):
        arrays["subject"] = np.array(out.subjects)
    if any(out.test):
        arrays["val"] = np.array(out.test)
    channels = [about.channels[c] for c in about.written]
    width, kept = len(about.channels), about.written
    if options.pad:
        channels = [*channels, VALID]
        kept = [*kept, width]
        width += 1
    out.save(options.output, arrays | {"channels": np.array(channels)}, width, kept)
    people = {*out.subjects} - {""}
    whom = f" of {amount(len(people), 'person').replace('persons', 'people')}" if people else ""
    rate = f" at {about.more['rate_hz']:g} Hz" if about.more else ""
    size = f"{sum(out.lengths)} steps x {amount(len(channels), 'channel')}"
    lines = [
        about.line,
        f"Wrote {amount(len(out.lengths), 'recording')}{whom}, {size}{rate}, to {options.output}",
    ]
    doubts = warnings.closed()
    if left:
        text = (
            f"{left} of {left + sum(out.lengths)} steps are left out, in pieces shorter than "
            f"{out.length}"
        )
        cures = "--length, --pad" if options.no_label else "--length, --mixed, --pad"
        doubts.append(f"{text} ({cures})")
    if not options.no_label:
        seen = []  # (class, person) of each recording, or of each label of a recording
        for piece, who in enumerate(out.subjects):
            numbers = {labels[piece]}
            if options.mixed:
                numbers = {*place[np.unique(out.steps[piece])].tolist()} - {-1}
            seen += [(classes[n], who) for n in numbers]
        counts = Counter(name for name, _ in seen)
        lines[-1] += f" ({', '.join(f'{name} {counts[name]}' for name in classes)})"
        # Numbers are left out: -1 is no typo of 1.
        words = {name: count for name, count in counts.items() if cases.natural(name)[0]}
        doubts += look_alikes(words) + look_alikes(Counter(out.subjects), typos=False)
        for name, count in counts.items():
            of = {who for other, who in seen if other == name}
            if count == 1:
                doubts.append(f"{name!r} occurs once: trained on or validated, never both")
            elif len(people) > 1 and len(of) == 1:
                doubts.append(
                    f"all of {name!r} is of {of.pop()}: trained on or validated, never both"
                )
        if len(counts) < 2:
            doubts.append("all is of one class; there is nothing to tell apart")
        if len(people) == 1:
            doubts.append("all is of one person; training divides people, so it needs two or more")
    lines += [f"warning: {doubt}" for doubt in doubts]
    stride = options.length
    if about.unit == "step":
        stride = max(1, options.length // 2)
    command = (
        f"train.py har dataset.root={options.output} dataset.length={options.length} "
        f"dataset.stride={stride}"
    )
    if options.no_label:
        command = f"tools/predict.py RUN {options.output}"
    return "\n".join([*lines, f"python {command}"])


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    return printed(lambda: prepare(options), options.output)
