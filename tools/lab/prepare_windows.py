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
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from engine.errors import LockstepError, amount
from formats import tables
from formats.arrays import look_alikes
from formats.cells import SECONDS, is_missing, is_number
from formats.counters import Courses
from formats.lab import cases, sensor_tables
from formats.lab.public_sensors import LIKE
from formats.lab.sensor_tables import Reading, Sheet
from formats.lab.sensors import streams
from formats.lab.windows import LENGTH, VALID
from formats.tables import Layout
from tools.arguments import Parser, add_json, printed, whole_number
from tools.lab import several_sensors
from tools.lab.recordings import Labels, Output, Piece, Recordings, factors_of
from tools.lab.sources import (
    TABLE,
    Source,
    Warnings,
    join_sources,
    name_inside,
    name_part,
    sources_of,
    split_commas,
)

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
    parser = Parser(
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
    add_json(parser)
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
        _ = [float(one) for one in split_commas(options.scale)]
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
    factor = factors_of(options, count := found.series[0].shape[1])
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
        sources = join_sources(options, sources)
    else:
        listed = options.table or options.data / TABLE if sources[0].where else None
        several_sensors.check_names([each.path for each in sources], options.data, listed)
    reader = _Reader(options, how, warnings, bool(sources[0].where))
    recordings = Recordings(options, labels, warnings)
    rows, used = 0, dict[str, str]()
    with _uncollected(), tqdm(unit=" lines", unit_scale=True, disable=None) as bar:
        how.progress = bar.update
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
                    source.subject = name_inside(options.data, source.path)
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
    how = Reading(_layout(options), split_commas(options.channels), unit=options.time_unit)
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
        columns=split_commas(options.columns),
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
            doubts.append("all is of one class; there is nothing to distinguish")
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
    return printed(lambda: prepare(options), options.output, options.json)
