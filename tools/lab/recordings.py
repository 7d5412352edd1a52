"""Recordings of tables: their pieces without a gap, their labels, and the arrays of the .npz."""

from __future__ import annotations

import argparse
import shlex
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import LockstepError, amount
from engine.files.atomic import write_atomically
from formats.arrays import text_lines
from formats.cells import is_missing_label
from formats.counters import Courses
from formats.ids import Ids, find_equal, id_key
from formats.lab import cases
from formats.lab.events import raters
from formats.lab.events.alignment import Events, Span
from formats.lab.rates import (
    changed,
    leaves_even_samples,
    nominal_rate,
    rate_of,
    resampled,
    steps_at,
    widest_gap,
)
from formats.lab.sensor_tables import Sheet
from formats.tables import csv_rows
from tools.lab.sources import TABLE, Source, Warnings, name_part, split_commas

ROWS_AT_ONCE = 1 << 14  # of the signal, when it is copied


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


class Labels:
    """The numbers of the labels. An excluded label has number -1."""

    def __init__(self, options: argparse.Namespace):
        self.names: dict[str, int] = {}
        self.keep = split_commas(options.keep_classes)
        self.exclude = {*split_commas(options.exclude_label)}
        self.all_mapped, self.mapping, self.where = False, dict[str, str](), "--label-map"
        self.seen: set[str] = set()
        self.missing: Counter[str] = Counter()  # {text: rows} of texts that stand for no label
        self.ids = Ids("label", options.join_numbers)
        if "=" in options.label_map:
            pairs = [pair.split("=", 1) for pair in split_commas(options.label_map)]
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


def factors_of(options: argparse.Namespace, channels: int) -> np.ndarray:
    """Return (C,) or (1,) factors of --scale.

    Raises LockstepError for a wrong number of factors.
    """
    found = np.array([float(one) for one in split_commas(options.scale)] or [1.0])
    if len(found) not in (1, channels):
        raise LockstepError(
            f"{len(found)} factors for {amount(channels, 'channel')}",
            "--scale",
            "give one, or one for each",
        )
    return found


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
        self.scale = factors_of(self.options, len(sheet.channels))
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
