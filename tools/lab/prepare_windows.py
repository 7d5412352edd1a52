"""Turn recordings of sensors, as tables or as cases of an archive, into one .npz that the har task
trains on.

    python tools/prepare_windows.py walks/ walks.npz --rate 50
        a file per recording, recordings.csv names them
    python tools/prepare_windows.py all.csv all.npz --time ms --time-unit ms --subject who --label
        activity
    python tools/prepare_windows.py PAMAP2_Dataset/Protocol pamap2.npz --like pamap2
    python tools/prepare_windows.py Gun_TRAIN.tsv gun.npz             with Gun_TEST.tsv beside it
    python train.py har dataset.root=walks.npz

A table is CSV, or separated by semicolons, tabs or blanks, gzipped or not, or parquet (pip install
pyarrow): a row for each sample. Cases are .tsv of UCR, .arff or .ts of UEA. In a folder every table
is a recording; a table recordings.csv there (file, subject, label) names them and what they are.
Columns are known by their names or by --time, --channels, --label, --subject and --recording; what
was taken is printed.

A recording is cut where samples are missing (--max-gap), where time goes back and, unless --mixed,
where the label changes, so that a window has one label; what is shorter than a window (--length) is
left out, or padded (--pad). A lower --rate filters first (pip install scipy). What is wrong is
refused with file, line and column; the file appears only when it is complete.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import re
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import LockstepError, amount
from engine.files.atomic import write_atomically
from formats.arrays import csv_rows, look_alikes, text_lines
from formats.lab import cases, sensor_tables
from formats.lab.public_sensors import LIKE
from formats.lab.rates import changed, rate_of, resampled, steps_at, widest_gap
from formats.lab.sensor_tables import Reading, Sheet
from formats.lab.windows import VALID
from tools.arguments import printed, whole_number

TABLES = (".csv", ".tsv", ".txt", ".dat", ".parquet", ".pq")
TABLE = "recordings.csv"
SOME = 5  # sentences of a kind that are printed

# ---- what is written
# ------------------------------------------------------------------------------------------------


@dataclass
class Piece:
    """(T, C) float32 of one recording, and its label or, with `--mixed`, (T,) labels; both index
    the classes."""

    signal: np.ndarray
    label: int
    subject: str = ""
    test: bool = False
    steps: np.ndarray | None = None


@dataclass
class Output:
    """Collects the pieces; their samples wait in a temporary file."""

    spool: Any
    length: int
    pad: bool
    lengths: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    subjects: list[str] = field(default_factory=list)
    test: list[bool] = field(default_factory=list)
    steps: list[np.ndarray] = field(default_factory=list)
    short: Counter[str] = field(default_factory=Counter)  # samples left out, by file

    def add(self, piece: Piece, file: str) -> None:
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

    def save(self, out: Path, arrays: dict[str, np.ndarray], channels: int) -> None:
        """Write the .npz, the same bytes each time; the signal is copied from the temporary file in
        blocks."""

        def fill(file: Any) -> None:
            with zipfile.ZipFile(file, "w") as archive:
                for name in ("signal", *arrays):
                    entry = zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))
                    with archive.open(entry, "w", force_zip64=True) as member:
                        if name == "signal":
                            shape = (sum(self.lengths), channels)
                            about = {"descr": "<f4", "fortran_order": False, "shape": shape}
                            np.lib.format.write_array_header_1_0(member, about)
                            self.spool.seek(0)
                            while block := self.spool.read(1 << 20):
                                member.write(block)
                        else:
                            np.lib.format.write_array(member, arrays[name], allow_pickle=False)

        write_atomically(out, fill)


# ---- recordings in tables
# -------------------------------------------------------------------------------------------


@dataclass
class Source:
    """A file, and what a table of the files says of it; `where` is its line there."""

    path: Path
    subject: str = ""
    label: str = ""
    where: str = ""


class Said(list[str]):
    """Warnings, of which a few of each kind are printed."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: Counter[str] = Counter()

    def add(self, kind: str, text: str) -> None:
        self.kinds[kind] += 1
        if self.kinds[kind] <= SOME:
            self.append(text)

    def once(self, kind: str, text: str) -> None:
        if not self.kinds[kind]:
            self.add(kind, text)

    def closed(self) -> list[str]:
        more = [
            f"{count - SOME} more places: {kind}"
            for kind, count in self.kinds.items()
            if count > SOME
        ]
        return [*self, *more]


def sources_of(asked: argparse.Namespace, said: Said) -> list[Source]:
    """Return the files to read, as the table, or the command line's pattern, names them. Raises
    LockstepError."""
    data: Path = asked.data
    if data.is_file():
        return [Source(data)]
    table = asked.table or (data / TABLE if (data / TABLE).is_file() else None)
    if table:
        return _listed(data, table, said)
    endings = tuple(f"{kind}{gz}" for kind in TABLES for gz in ("", ".gz"))
    found = sorted(
        path
        for path in data.rglob(asked.files or "*")
        if path.is_file() and not path.name.startswith(".")
    )
    found = [path for path in found if path.name.lower().endswith(endings)]
    mapped = asked.label_map.partition(":")[0]
    found = [
        path for path in found if path != data / mapped and path.resolve() != asked.output.resolve()
    ]
    if not found:
        what = f"no tables{f' {asked.files}' if asked.files else ''}"
        raise LockstepError(
            what, str(data), f"give a folder with {', '.join(TABLES)}, or name one in --files"
        )
    return [Source(path) for path in found]


def _listed(folder: Path, table: Path, said: Said) -> list[Source]:
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
        for name in ("file", *sorted({"subject", "label"} & {*header})):
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
        said.add(
            "files",
            f"{table}: it names no {', '.join(left[:SOME])}{', ...' if left[SOME:] else ''}",
        )
    return found


class Labels:
    """What labels are called, and which are left out: -1."""

    def __init__(self, asked: argparse.Namespace):
        self.names: dict[str, int] = {}
        self.keep, self.exclude = _words(asked.keep_classes), {*_words(asked.exclude_label)}
        self.all_mapped, self.mapping, self.where = False, dict[str, str](), "--label-map"
        self.seen: set[str] = set()
        if "=" in asked.label_map:
            pairs = [pair.split("=", 1) for pair in _words(asked.label_map)]
            if any(len(pair) != 2 for pair in pairs):
                raise LockstepError(
                    f"{asked.label_map!r}", self.where, "write old=new,old=new, or FILE:COLUMN"
                )
            self.mapping = {old.strip(): new.strip() for old, new in pairs}
        elif asked.label_map:
            self._read_map(asked)

    def _read_map(self, asked: argparse.Namespace) -> None:
        name, _, column = asked.label_map.partition(":")
        path = (
            Path(name)
            if Path(name).is_file()
            else (asked.data if asked.data.is_dir() else asked.data.parent) / name
        )
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
        """Return a class's number, new ones counting on, or -1. Raises LockstepError for one that a
        file lacks."""
        text = "" if text.lower() == "nan" else text
        if self.all_mapped and text and text not in self.mapping:
            raise LockstepError(
                f"label {text[:60]!r} is not in {self.where}", where, "add it there"
            )
        name = self.mapping.get(text, text)
        self.seen |= {text, name}
        if (
            not name
            or {text, name} & self.exclude
            or (self.keep and not {text, name} & {*self.keep})
        ):
            return -1
        return self.names.setdefault(name, len(self.names))

    def check(self) -> None:
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


def _factors(asked: argparse.Namespace, channels: int) -> np.ndarray:
    """Return (C,) or (1,) of --scale."""
    found = np.array([float(one) for one in _words(asked.scale)] or [1.0])
    if len(found) not in (1, channels):
        what = f"{len(found)} factors for {amount(channels, 'channel')}"
        raise LockstepError(what, "--scale", "give one, or one for each")
    return found


class Recordings:
    """Cuts the rows of sheets into pieces."""

    def __init__(self, asked: argparse.Namespace, labels: Labels, said: Said):
        self.asked, self.labels, self.said = asked, labels, said
        self.rate, self.first = asked.rate, ""
        self.scale = np.ones(1)

    def pieces(self, sheet: Sheet, source: Source) -> Iterator[Piece]:
        """Yield the pieces of a file: of each person in it, and of each recording of theirs."""
        self.scale = _factors(self.asked, len(sheet.channels))
        labels = self._labels(sheet, source)
        subject = (
            self._pattern(self.asked.file_subject, "--file-subject", sheet.path) or source.subject
        )
        codes, names = sheet.texts.get("subject", (np.zeros(len(labels), np.int64), [subject]))
        others, _ = sheet.texts.get("recording", (np.zeros(len(labels), np.int64), [""]))
        whole = codes + len(names) * others
        _, first = np.unique(whole, return_index=True)
        for row in np.sort(first).tolist():
            rows = np.flatnonzero(whole == whole[row])
            for piece in self._cut(sheet, rows, labels[rows]):
                piece.subject = names[codes[row]]
                yield piece

    def _pattern(self, pattern: str, flag: str, path: Path) -> str:
        """Return what a pattern's group finds in the name of a file, below the folder that was
        given."""
        if not pattern:
            return ""
        found = re.search(
            pattern,
            path.relative_to(self.asked.data).as_posix() if path != self.asked.data else path.name,
        )
        if not found or not found[1]:
            raise LockstepError(
                f"{pattern!r} finds nothing in the name", str(path), f"change {flag}"
            )
        return found[1]

    def _labels(self, sheet: Sheet, source: Source) -> np.ndarray:
        """Return (N,) the class of each row, -1 where there is none."""
        if self.asked.no_label:
            return np.zeros(len(sheet.values), np.int64)
        if "label" in sheet.texts:
            codes, names = sheet.texts["label"]
            found, first = np.unique(codes, return_index=True)
            table = np.full(len(names), -1)
            for code, row in zip(found.tolist(), first.tolist(), strict=True):
                table[code] = self.labels.number(names[code], sheet.at(row))
            return table[codes]
        text = self._pattern(self.asked.file_label, "--file-label", sheet.path) or source.label
        if not text:
            todo = (
                "name its column in --label, its place in the file's name in --file-label, "
                f"or write {TABLE}"
            )
            raise LockstepError(
                "no label", str(sheet.path), f"{todo}; --no-label is for data to predict"
            )
        return np.full(len(sheet.values), self.labels.number(text, source.where or str(sheet.path)))

    def _cut(self, sheet: Sheet, rows: np.ndarray, labels: np.ndarray) -> Iterator[Piece]:
        """Yield the pieces of one recording, without a gap and, unless --mixed, of one label
        each."""
        if sheet.time is None and not self.rate:
            raise LockstepError(
                "no column of times", str(sheet.path), "name it in --time, or give --rate"
            )
        values, time = (
            sheet.values[rows],
            np.arange(len(rows)) / self.rate if sheet.time is None else sheet.time[rows],
        )
        breaks = np.zeros(len(rows), dtype=bool)  # whether a piece begins here
        back = np.flatnonzero(np.diff(time) < 0) + 1
        if len(back) > 1 + len(rows) / 100:
            what = f"time goes back {len(back)} times, the first to {time[back[0]]:.10g} s"
            raise LockstepError(
                what, sheet.at(rows[back[0]]), "sort the rows, or name --recording or --subject"
            )
        for row in back.tolist():
            text = f"time goes back by {time[row - 1] - time[row]:.3g} s: cut there"
            self.said.add("time goes back", f"{sheet.at(rows[row])}: {text}")
        breaks[back] = True
        # of samples of one time, which are averaged
        firsts = np.flatnonzero(np.append(True, np.diff(time) != 0))
        if len(rows) > 1 and len(firsts) < max(2, len(rows) / 2):
            what = f"{len(rows)} samples have {len(firsts)} different times"
            raise LockstepError(
                what, str(sheet.path), "give each sample a time of its own, or name --subject"
            )
        if len(rows) - len(firsts) > len(rows) / 10:
            text = (
                f"{sheet.path}: {len(rows) - len(firsts)} of {len(rows)} samples have the "
                "time of the one before"
            )
            self.said.add("samples of one time", f"{text}: such are averaged")
        values = np.add.reduceat(values, firsts) / np.diff(np.append(firsts, len(rows)))[:, None]
        time, rows, labels, breaks = time[firsts], rows[firsts], labels[firsts], breaks[firsts]
        parts = [
            part for part in np.split(np.arange(len(time)), np.flatnonzero(breaks)) if len(part)
        ]
        steady = max(parts, key=len)
        if len(steady) < 2:
            return
        self._check_rate(rate_of(time[steady]), sheet.path)
        usual = float(np.median(np.diff(time[steady])))
        if other := changed(time[steady]):
            row, interval = steady[other[0]], other[1]
            text = (
                f"a sample every {interval:.3g} s from here on, usually every {usual:.3g} s: "
                "has the rate changed?"
            )
            self.said.add("the rate", f"{sheet.at(rows[row])}: {text}")
        gap = self.asked.max_gap or widest_gap(usual, self.asked.length / self.rate)
        for part in parts:
            yield from self._stretches(
                sheet, rows[part], time[part], values[part], labels[part], gap
            )

    def _check_rate(self, own: float, path: Path) -> None:
        if not self.rate:
            near = round(own)
            self.rate, self.first = (
                near if near and abs(own - near) < 0.01 * own else float(f"{own:.4g}"),
                str(path),
            )
            if not 0.2 < own < 20000:
                self.said.add(
                    "unit",
                    (
                        f"{path}: {own:.3g} samples a second: is the time in another unit "
                        "(--time-unit)?"
                    ),
                )
        if self.first and abs(own - self.rate) > 0.05 * self.rate:
            what = f"{own:.4g} samples a second, {self.first} has {self.rate:g}"
            raise LockstepError(what, str(path), "--rate takes all at one rate")
        if not self.rate / 5.3 < own < 400 * self.rate:
            what = f"{own:.4g} samples a second, taken at {self.rate:g}"
            raise LockstepError(what, str(path), "give another --time-unit or --rate")

    def _stretches(
        self,
        sheet: Sheet,
        rows: np.ndarray,
        time: np.ndarray,
        values: np.ndarray,
        labels: np.ndarray,
        gap: float,
    ) -> Iterator[Piece]:
        """Cut where values or samples are missing; `time` rises."""
        if self.asked.missing == "fill":
            values = _filled(time, values, gap)
        alive = ~np.isnan(values).any(1)
        lost = np.flatnonzero(~alive & np.append(True, alive[:-1]))  # the first of each hole
        for row in lost[(lost > 0)].tolist():
            self.said.add(
                "values are missing", f"{sheet.at(rows[row])}: values are missing: cut there"
            )
        wide = np.flatnonzero(np.diff(time) > 1.001 * gap)
        for row in wide.tolist():
            text = (
                f"no sample for {time[row + 1] - time[row]:.3g} s, {time[row]:.4f} s after "
                "the first: cut there"
            )
            self.said.add("no sample", f"{sheet.at(rows[row + 1])}: {text}")
        begins = np.zeros(len(time), dtype=bool)
        begins[wide + 1] = True
        begins |= alive != np.append(alive[:1], alive[:-1])
        for part in np.split(np.arange(len(time)), np.flatnonzero(begins)):
            if not len(part) or not alive[part[0]] or steps_at(time[part], self.rate) < 2:
                continue
            signal = resampled(time[part], values[part] * self.scale, self.rate)
            even = time[part[0]] + np.arange(len(signal)) / self.rate
            middles = (time[part][1:] + time[part][:-1]) / 2
            steps = labels[part][np.searchsorted(middles, even)]  # of the sample next to each
            yield from self._by_label(signal, steps)

    def _by_label(self, signal: np.ndarray, steps: np.ndarray) -> Iterator[Piece]:
        if self.asked.mixed and (steps >= 0).any():
            yield Piece(signal, 0, steps=steps)
        for part in np.split(np.arange(len(steps)), np.flatnonzero(np.diff(steps)) + 1):
            if steps[part[0]] >= 0 and not self.asked.mixed:
                yield Piece(signal[part], int(steps[part[0]]))


def _filled(time: np.ndarray, values: np.ndarray, gap: float) -> np.ndarray:
    """Draw a line over the missing values of each channel where the samples beside them are at most
    `gap` s apart."""
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
        "s (the default), ms, us, ns, datetime, or a form such as %%d.%%m.%%Y %%H:%%M:%%S",
    ),
    "--channels": ("A,B,…", "columns to learn from, * for any text; default: all other numbers"),
    "--label": ("COLUMN", "default: label, activity, …"),
    "--subject": ("COLUMN", "the person; default: subject, user, …"),
    "--recording": ("COLUMN", "what belongs to one recording; default: recording, session, …"),
    "--file-label": ("REGEX", "finds the label in a file's name, in its group"),
    "--file-subject": ("REGEX", "finds the person in a file's name, such as 'subject(\\d+)'"),
    "--label-map": ("MAP", "old=new,old=new, or FILE.csv:COLUMN, whose first column is old"),
    "--keep-classes": ("A,B,…", "keep these alone"),
    "--exclude-label": ("A,B,…", "leave out what has these, such as 0"),
    "--separator": ("CHAR", "of the cells (default: what the first line has most of)"),
    "--scale": ("F,…", "multiply all channels, or each, such as 9.81 for g to m/s2"),
}
"""Options that take a text, empty unless given: form and help."""


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
        help="a public set as it is published: its columns, labels and people",
    )
    told = f"names file, subject and label (default: FOLDER/{TABLE} if it is there)"
    add("--table", type=Path, metavar="CSV", help=told)
    for flag, (form, told) in TEXTS.items():
        add(flag, default="s" if flag == "--time-unit" else "", metavar=form, help=told)
    add("--no-label", action="store_true", help="of data to predict")
    add(
        "--mixed",
        action="store_true",
        help="keep recordings whole: a window has the label of its middle",
    )
    add(
        "--rate",
        type=float,
        default=0.0,
        metavar="HZ",
        help="steps a second to write (default: the recordings' own)",
    )
    told = "of a window (default: 128; cases: their own)"
    add("--length", type=whole_number(2), default=0, metavar="STEPS", help=told)
    add(
        "--pad",
        action="store_true",
        help="pad what is shorter, and add a channel `valid`; cases to the longest",
    )
    told = (
        "cut where no sample came for longer (default: 20 usual intervals, or a quarter of a "
        "window if that is more"
    )
    add("--max-gap", type=float, default=0.0, metavar="S", help=f"{told} than 3)")
    told = (
        "empty cells and NaN: refuse them (the default), draw a line over them up to "
        "--max-gap, or cut there"
    )
    add("--missing", choices=("refuse", "fill", "cut"), default="refuse", help=told)
    add(
        "--bad-lines",
        choices=("refuse", "skip"),
        default="refuse",
        help="lines that cannot be read",
    )
    first, _ = parser.parse_known_args(argv)
    parser.set_defaults(**LIKE.get(first.like or "", {}))
    asked = parser.parse_args(argv)
    for flag, text in (("--file-label", asked.file_label), ("--file-subject", asked.file_subject)):
        with contextlib.suppress(re.error):
            if not text or re.compile(text).groups == 1:
                continue
        parser.error(f"argument {flag}: {text!r} is no pattern with one group in brackets")
    try:
        _ = [float(one) for one in _words(asked.scale)]
    except ValueError:
        parser.error(f"argument --scale: {asked.scale!r} is no number")
    if asked.output.suffix != ".npz":
        parser.error(f"argument OUT.npz: {asked.output} does not end in .npz")
    if not (0 <= asked.rate < 1e9 and 0 <= asked.max_gap < 1e9):
        parser.error("argument --rate, --max-gap: give a number above 0")
    asked.mixed &= not asked.no_label  # then nothing is cut for its label
    return asked


def prepare(asked: argparse.Namespace) -> str:
    """Run the command line; returns the text to print. Raises LockstepError."""
    data: Path = asked.data
    if asked.output.exists():
        raise LockstepError("it exists", str(asked.output), "remove it, or give another name")
    if not data.exists():
        raise LockstepError(
            "no such file or folder", str(data), "give a table, or a folder of tables"
        )
    for folder in (data, data / "UCI HAR Dataset"):
        if (folder / "train" / "Inertial Signals").is_dir() or data.suffix == ".npz":
            raise LockstepError(
                "har reads it as it is", str(folder), f"python train.py har dataset.root={data}"
            )
    archive = cases.find(data) if data.is_dir() else data if _is_cases(asked) else None
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    said = Said()
    with tempfile.TemporaryFile(dir=asked.output.parent) as spool:
        out = Output(spool, asked.length, asked.pad)
        about = _of_cases(asked, archive, out) if archive else _of_tables(asked, out, said)
        return _write(asked, out, said, about)


def _is_cases(asked: argparse.Namespace) -> bool:
    """Whether a file has cases: by its ending, and a .tsv by numbers where a table has names."""
    path: Path = asked.data
    if path.suffix != ".tsv" or asked.columns:
        return path.suffix in cases.KINDS
    cell = next(sensor_tables.blocks(path, 1), [""])[0].split("\t")[0]
    return sensor_tables.is_number(cell) and not sensor_tables.is_missing(cell)


@dataclass
class About:
    """What was read: a line to print, the channels, and what is written beside the pieces."""

    classes: list[str]
    line: str
    channels: list[str]
    more: dict[str, np.ndarray]
    unit: str  # step of a recording, or case


def _of_cases(asked: argparse.Namespace, path: Path, out: Output) -> About:
    found, labels = cases.read(path), Labels(asked)
    chosen = []
    for series, label, where in zip(found.series, found.labels.tolist(), found.where, strict=True):
        holes = np.argwhere(np.isnan(series))
        if len(holes) and asked.missing != "fill":
            what = (
                f"{len(holes)} values are missing, the first in channel {holes[0, 1] + 1}, "
                f"step {holes[0, 0] + 1}"
            )
            raise LockstepError(what, where, "--missing fill draws a line over them")
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
    if low < high and not asked.pad and not asked.length:
        what = f"cases of {low} to {high} steps"
        todo = f"--pad pads them to {high} with a mask, --length {low} cuts each into windows"
        raise LockstepError(what, str(path), todo)
    out.length, asked.mixed = asked.length or high, False
    asked.length = out.length
    factor = _factors(asked, count := found.series[0].shape[1])
    for n, (series, number) in enumerate(zip(found.series, chosen, strict=True)):
        if number >= 0:
            test = bool(found.test is not None and found.test[n])
            out.add(Piece((series * factor).astype(np.float32), number, test=test), str(path))
    span = f"{low} to {high}" if high > low else str(low)
    line = f"{amount(len(sizes), 'case')} of {span} steps x {amount(count, 'channel')}"
    more = {"rate_hz": np.array(asked.rate)} if asked.rate else {}
    names = [f"channel_{n + 1}" for n in range(count)]
    return About([*labels.names], line, names, more, "case" if low == high or asked.pad else "step")


def _of_tables(asked: argparse.Namespace, out: Output, said: Said) -> About:
    from tqdm import tqdm

    out.length = asked.length = asked.length or 128
    sources, labels, how = sources_of(asked, said), Labels(asked), _reading(asked)
    if not asked.label and (sources[0].label or asked.file_label or asked.no_label):
        how.label = None
    if not asked.subject and (sources[0].subject or asked.file_subject):
        how.subject = None
    recordings = Recordings(asked, labels, said)
    rows, used = 0, dict[str, str]()
    with _uncollected(), tqdm(unit=" lines", unit_scale=True, disable=None) as bar:
        how.tell = bar.update
        for number, source in enumerate(sources, 1):
            bar.set_description(f"{source.path.name}, {number} of {len(sources)}")
            sheet = sensor_tables.read(source.path, how)
            for note in sheet.notes:
                said.add("lines and commas", note)
            if "subject" not in sheet.texts and not source.subject and not asked.file_subject:
                source.subject = source.path.name if len(sources) > 1 else ""
                todo = (
                    "each file counts as a person of its own"
                    if source.subject
                    else "training will split by piece"
                )
                said.once(
                    "person", f"nothing says who was recorded: {todo} (--subject, --file-subject)"
                )
            rows, used = rows + len(sheet.lines), used | sheet.used
            for piece in recordings.pieces(sheet, source):
                out.add(piece, str(source.path))
    if not asked.no_label:
        labels.check()
    if VALID in how.channels:
        raise LockstepError(
            f"a channel of the name {VALID!r}", str(sources[0].path), "rename it: it means padding"
        )
    taken = "".join(f"{what} {name}, " for what, name in used.items())
    line = (
        f"{amount(rows, 'sample')} in {amount(len(sources), 'file')}: {taken}channels "
        f"{', '.join(how.channels)}"
    )
    return About(
        [*labels.names], line, how.channels, {"rate_hz": np.array(float(recordings.rate))}, "step"
    )


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Collect no garbage: the lists of cells are no cycles, and looking for some takes as long as
    reading them."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _reading(asked: argparse.Namespace) -> Reading:
    if asked.time_unit not in (*sensor_tables.UNITS, "datetime") and "%" not in asked.time_unit:
        todo = "give s, ms, us, ns, datetime, or a form with %"
        raise LockstepError(f"unit {asked.time_unit!r}", "--time-unit", todo)
    how = Reading(_words(asked.columns), _words(asked.channels), unit=asked.time_unit)
    for what in sensor_tables.GUESSES:
        name = getattr(asked, what)
        setattr(how, what, None if name == "none" else name)
    how.separator, how.missing = asked.separator.replace("\\t", "\t"), asked.missing != "refuse"
    how.skip = asked.bad_lines == "skip"
    return how


def _write(asked: argparse.Namespace, out: Output, said: Said, about: About) -> str:
    left = sum(out.short.values())
    if not out.lengths:
        what = f"all {left} steps are in pieces shorter than the {out.length} of a window"
        raise LockstepError(
            what, str(asked.data), "give a smaller --length, a longer --max-gap, --mixed or --pad"
        )
    arrays = {"lengths": np.array(out.lengths)} | about.more
    order = sorted(range(len(about.classes)), key=lambda n: cases.natural(about.classes[n]))
    # old number -> new
    classes, place = [about.classes[n] for n in order], np.append(np.argsort(order), -1)
    labels = place[out.labels]
    if asked.mixed:
        steps = place[np.concatenate(out.steps)].astype(np.int32)
        arrays |= {"step_label": steps, "classes": np.array(classes)}
    elif not asked.no_label:
        arrays |= {"label": labels, "classes": np.array(classes)}
    if any(out.subjects):
        arrays["subject"] = np.array(out.subjects)
    if any(out.test):
        arrays["val"] = np.array(out.test)
    channels = about.channels + [VALID] * asked.pad
    out.save(asked.output, arrays | {"channels": np.array(channels)}, len(channels))
    people = {*out.subjects} - {""}
    whom = f" of {amount(len(people), 'person').replace('persons', 'people')}" if people else ""
    rate = f" at {about.more['rate_hz']:g} Hz" if about.more else ""
    size = f"{sum(out.lengths)} steps x {amount(len(channels), 'channel')}"
    lines = [
        about.line,
        f"Wrote {amount(len(out.lengths), 'recording')}{whom}, {size}{rate}, to {asked.output}",
    ]
    doubts = said.closed()
    if left:
        text = (
            f"{left} of {left + sum(out.lengths)} steps are left out, in pieces shorter than "
            f"{out.length}"
        )
        doubts.append(f"{text} (--length, --mixed, --pad)")
    if not asked.no_label:
        seen = [
            (classes[n], who)  # of each recording, or of each label in it
            for piece, (label, who) in enumerate(zip(labels.tolist(), out.subjects, strict=True))
            for n in (
                {*place[np.unique(out.steps[piece])].tolist()} - {-1} if asked.mixed else [label]
            )
        ]
        counts = Counter(name for name, _ in seen)
        lines[-1] += f" ({', '.join(f'{name} {counts[name]}' for name in classes)})"
        # -1 is no typo of 1
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
    stride = max(1, asked.length // 2) if about.unit == "step" else asked.length
    command = (
        f"train.py har dataset.root={asked.output} dataset.length={asked.length} "
        f"dataset.stride={stride}"
    )
    lines.append(f"python {f'tools/predict.py RUN {asked.output}' if asked.no_label else command}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    asked = parse(argv)
    return printed(lambda: prepare(asked), asked.output)
