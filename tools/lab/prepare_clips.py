"""Cut videos by annotations into a packed folder of gray clips for the video task.

    python tools/prepare_clips.py annotations.csv data/mice --videos recordings --size 256
        --frames 17
    python tools/prepare_clips.py events.tsv data/mice --videos recordings
    python train.py video dataset.root=data/mice

A table has a header and one row per trial:

    video                 file name, relative to --videos
    label                 class of the trial
    start, center or end  the frame of the video, counted from 0, at which the trial starts, is
                          centred or ends;
                          or start_s, center_s or end_s: the same in seconds, by the time of each
                          frame in the video
    group                 optional: the animal or the cage of the video; no group is used both for
                          training and for validation

Exactly one of the six time columns is needed. A trial that reaches beyond the end of a video is an
error: no clip is padded.

In place of a table of trials, give a file or a folder of labels: events that BORIS exported
(tabular or aggregated; CSV, TSV, .xlsx), DeepEthogram's VIDEO_labels.csv, SimBA's
targets_inserted/VIDEO.csv, or a table of bouts: video, start_s, stop_s, label.
Clips start at the beginning of each video, one every --step frames. A clip has the label of the
centre frame: `background` where no behaviour was seen, none where nobody looked. With --per-event
there is a clip around the middle of each event instead, and no clip of the background.

Frames are converted to gray, cropped, and resized to a square. The folder appears only when it is
complete. Needed package: pip install av
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.errors import LockstepError, amount
from formats.arrays import look_alikes, stays_below, text_lines
from formats.clock import Clock, some_notes
from formats.lab import behaviour, boris
from formats.lab.bouts import columns_of
from formats.lab.clips import CUTTING, GROUP, LABELS, ClipsWriter, check_group, read_table, rename
from formats.lab.events import pairing
from formats.lab.events.columns import VIDEOS, find_columns, find_length
from formats.lab.events.event_table import cure_of_units
from formats.lab.events.pairing import Folders
from formats.lab.videos import (
    STAMP,
    BrokenVideo,
    Cutting,
    gray_square,
    import_av,
    in_time,
    opened,
    read_clock,
)
from formats.tables import csv_rows
from tools.arguments import Parser, add_json, positive_number, printed, whole_number
from tools.names import some_names

MOST = 1e9  # frames or seconds: no video is longer, and numpy's int64 ends at 9e18
LISTED = 20  # names in a message
OFTEN = 3  # a label that occurs once may be a typo of a label with so many trials
MULTI = "labels may overlap: keep a column for each behaviour, for loss.kind=binary"
MOVE = "move or remove it, or use fewer --frames or a smaller --stride"
BOUTS = (
    ", or both start_s and stop_s; columns of other names: "
    "--columns video=COLUMN,label=COLUMN,start_s=COLUMN,stop_s=COLUMN"
)
COLUMNS = (
    "names of the columns of a table: video=File,start_s=Onset,stop_s=Offset,label=Behaviour, also "
    "subject=, rater=, group= (default: usual names)"
)
TIMES = ("start", "center", "end", "start_s", "center_s", "end_s")


@dataclass
class Trial:
    """A row of the table, or a clip of labels.

    at      frames or seconds
    line    line of the row; 0 if unknown
    labels  labels of all behaviours, if behaviours may overlap
    """

    label: str
    at: float
    line: int
    labels: np.ndarray | None = None


@dataclass
class Plan:
    """The trials to cut out of each video.

    column      the time column of the table, of TIMES
    groups      {video: {"video", "group", "line" of the first row}}; empty without a column of
                groups
    clocks      {video: times of its frames}
    behaviours  names of labels that may overlap
    broken      {video: why it cannot be read}
    notes       lines to print
    """

    column: str
    cutting: Cutting
    trials: dict[str, list[Trial]] = field(default_factory=dict)
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    clocks: dict[str, Clock] = field(default_factory=dict)
    behaviours: list[str] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def numbers(self, trial: Trial, clock: Clock) -> np.ndarray:
        """Return (T,) the numbers of the trial's frames in the video."""
        if self.in_seconds and not clock.fps:
            raise LockstepError(
                f"seconds of a video whose frames have no times: {self.column}={trial.at:g}",
                f"line {trial.line}",
                f"write them: {STAMP}, or annotate in frames",
            )
        anchor = self.column.removesuffix("_s")
        if self.by_time(clock):
            at_s = trial.at if self.in_seconds else float(clock.time_of(int(trial.at)))
            offsets_s = self.cutting.offsets_s()
            before_s = {"start": 0.0, "center": offsets_s[-1] / 2, "end": offsets_s[-1]}
            return clock.frames_at(at_s - before_s[anchor] + offsets_s)
        at = clock.frame_at(trial.at) if self.in_seconds else int(trial.at)
        offsets = self.cutting.offsets(clock.fps)
        middle = offsets[-1] // 2
        if len(offsets) % 2:  # at another rate, the picture in the middle may not be half way
            middle = offsets[len(offsets) // 2]
        before = {"start": 0, "center": middle, "end": offsets[-1]}
        return at - before[anchor] + offsets

    @property
    def in_seconds(self) -> bool:
        return self.column.endswith("_s")

    def by_time(self, clock: Clock) -> bool:
        """Return whether the frames of a trial are chosen by time: --fps of an uneven video."""
        return clock.own_s is not None and self.cutting.fps > 0

    def class_of_frames(self, video: str, clock: Clock, classes: list[str]) -> np.ndarray | None:
        """Return (N,) class numbers of a video's frames; None if the video has no trials.

        The number is -1 without a trial, and for a class that is not in `classes`.
        """
        number = {name: c for c, name in enumerate(classes)}
        found = np.full(clock.count, -1)
        for trial in self.trials.get(video, []):
            frames = self.numbers(trial, clock)
            found[max(0, frames[0]) : max(0, frames[-1] + 1)] = number.get(trial.label, -1)
        return found if video in self.trials else None


def read_annotations(
    path: Path, cutting: Cutting, classes: list[str], renamed: Mapping[str, str] | None = None
) -> tuple[Plan, list[str]]:
    """Return the plan, trials by video in the table's order, and the classes.

    renamed  {name of a column here: name in the file}
    The classes are the given classes, or else the sorted labels. Raises LockstepError, with the
    line, for a missing column, a time that is no number, a label not in `classes`, or a video
    outside of the folder of videos.
    """
    lines = text_lines(path)
    header = rename(path, csv_rows(path, lines)[0], renamed or {})
    column = _check_header(path, header)
    plan = Plan(column, cutting)
    for line, row in read_table(path, "\n".join(lines), [column], renamed):
        trial = _trial(row, column, classes, f"{path}:{line}", line)
        video = os.path.normpath(row["video"].strip())
        trials = plan.trials.setdefault(video, [])
        for twin in trials:
            if twin.at == trial.at:
                raise LockstepError(
                    f"{video} has a trial at the same time in line {twin.line}",
                    f"{path}:{line}",
                    "keep one: a trial has one label, and counts once",
                )
        trials.append(trial)
        if GROUP in header:
            group = {"video": video, GROUP: row[GROUP].strip(), "line": line}
            if not group[GROUP]:
                raise LockstepError(
                    "an empty group",
                    f"{path}:{line}",
                    "name the animal or the cage, or drop the column",
                )
            check_group(group, plan.groups.setdefault(video, group), path)
    labels = {trial.label for trials in plan.trials.values() for trial in trials}
    if not labels:
        raise LockstepError("no trials", str(path), "write a row for each")
    return plan, classes or sorted(labels)


def _check_header(path: Path, header: Sequence[str]) -> str:
    """Return the column of times. Raises LockstepError for a header that is none of trials."""
    columns = [name for name in TIMES if name in header]
    hint = _hint_of_bouts(header)
    if not {"video", "label"} <= {*header} or len(columns) != 1 or hint:
        raise LockstepError(
            f"the header has {', '.join(header) or 'nothing'}",
            f"{path}:1",
            f"it needs video, label and exactly one of {', '.join(TIMES)}{hint or BOUTS}",
        )
    if length := find_length(header):
        what = f"a column {length} beside {columns[0]}: a trial has no length of its own"
        todo = "write bouts, with start_s and duration_s; for trials, "
        raise LockstepError(what, f"{path}:1", f"{todo}--columns other={length} leaves it out")
    return columns[0]


def _hint_of_bouts(header: Sequence[str]) -> str:
    """Return how to name the times of bouts; empty for a header without start and stop."""
    columns = find_columns(header, {}, VIDEOS)
    if not columns:
        return ""
    hint = f"; bouts name their unit: {cure_of_units(columns, VIDEOS)}"
    if columns.is_duration:
        hint += f"; for trials, --columns other={columns.stop.name} leaves it out"
    return hint


def _trial(row: dict[str, str], column: str, classes: list[str], where: str, line: int) -> Trial:
    """Return the trial of a row. Raises LockstepError with the line."""
    label = row["label"].strip()
    if not label or (classes and label not in classes):
        what = f"label {label!r} is not among the classes" if label else "an empty label"
        todo = "name the class"
        if classes:
            todo = f"choose one of {', '.join(classes)}, or add it to --classes"
        raise LockstepError(what, where, todo)
    if not row["video"].strip():
        raise LockstepError("an empty video", where, "name the file")
    if not stays_below(row["video"].strip()):
        raise LockstepError(
            f"video {row['video']!r} is not in the folder of videos",
            where,
            "give a name relative to --videos, without ..",
        )
    try:
        at = float(row[column])
        if not 0 <= at < MOST:
            raise ValueError
    except ValueError:
        todo = f"give a number from 0 to {MOST:g}"
        if column.endswith("_s") and ":" in row[column]:
            todo = "give seconds, as a number since the start of the video"
        raise LockstepError(f"{column}={row[column]!r}", where, todo) from None
    if not column.endswith("_s") and at != int(at):
        raise LockstepError(
            f"{column}={at}", where, f"give a whole frame, or seconds as {column}_s"
        )
    return Trial(label, at, line)


def plan_of_labels(
    options: argparse.Namespace, cutting: Cutting, folder: Path, classes: list[str]
) -> Plan:
    """Return the plan of files of labels. Labels that are not in `classes`, if any, are left out.

    Raises LockstepError with the file and the line, also for a video that is missing or exists
    twice.
    """
    plan = Plan("center_s" if options.per_event else "start", cutting)
    if options.multi and options.per_event:
        raise LockstepError(
            "--multi is for clips one after the other", "--per-event", "drop one of the two"
        )
    paired = _paired(options, folder)
    plan.notes = paired.notes
    groups = {}
    if options.groups:
        groups = groups_of(options.groups, [*paired.of_video], folder, choice_of(options))
    found_labels = {str(file.relative_to(folder)): one for file, one in paired.of_video.items()}
    if options.multi:
        behaviours = {name for one in found_labels.values() for name in one.behaviours}
        plan.behaviours = classes or [behaviour.BACKGROUND, *sorted(behaviours)]
    found_labels = {video: one.of(options.subjects) for video, one in found_labels.items()}
    for video, labels in found_labels.items():
        clock = plan.clocks[video] = read_clock(folder / video)
        labels, left_out = _fitted(labels, video, clock, options)
        plan.notes += left_out
        if options.per_event:
            trials = _by_event(labels)
        else:
            trials = _by_step(labels, clock, plan, options)
        trials = [trial for trial in trials if not classes or trial.label in classes]
        if labels.group and not options.groups:
            plan.groups[video] = {"video": video, GROUP: labels.group, "line": 0}
        if options.groups:
            plan.groups[video] = groups[folder / video] | {"video": video}
        plan.trials[video] = trials
    plan.trials = {video: trials for video, trials in plan.trials.items() if trials}
    if not plan.trials:
        raise LockstepError(
            "no clips", str(options.annotations), "label more, or shorten --frames and --step"
        )
    return plan


def _paired(options: argparse.Namespace, folder: Path) -> behaviour.Paired:
    """Return the labels of each video. Raises BrokenVideo with all videos that are missing."""
    labels = read_labels(options.annotations, options)
    files = pairing.videos_in(folder, [one.media for one in labels])
    paired = behaviour.pair(labels, files, folder, options.annotations, choice_of(options))
    if paired.missing:
        raise _without_video(paired, files, folder)
    return paired


def _without_video(paired: behaviour.Paired, files: Sequence[Path], folder: Path) -> BrokenVideo:
    """Return the error that names all labels without a video."""
    missing = paired.missing
    names = [one.media or one.video for one in missing]
    what = f"no video {some_names(names, LISTED)} in {folder}"
    if len(missing) > 1:
        count = len(missing) + len(paired.of_video)
        what = f"{len(missing)} of {count} videos are missing: {what}"
    todo = behaviour.cure_of_missing(missing[0], files, folder)
    todo = (
        todo
        or pairing.cure_of_ending(names[0], folder)
        or "give --videos FOLDER, with each video once"
    )
    return BrokenVideo(what, where=missing[0].where, todo=todo)


def _fitted(
    labels: behaviour.Labels, video: str, clock: Clock, options: argparse.Namespace
) -> tuple[behaviour.Labels, list[str]]:
    """Return the labels within the video, and lines on what is left out.

    Raises LockstepError as `Labels.within`.
    """
    labels, left_out = labels.within(clock, video, options.allow_short)
    notes = [left_out] if left_out else []
    if not options.per_event:
        notes += labels.without_frame(clock, video)
    length_s = labels.length_s
    if length_s and clock.fps and abs(length_s - clock.end_s) > behaviour.ROUNDED_S:
        notes.append(
            f"{labels.path}: {video} lasts {length_s:g} s there, the file itself "
            f"{clock.end_s:.2f} s; the times of its frames count"
        )
    return labels, notes


def _by_event(labels: behaviour.Labels) -> list[Trial]:
    """Return a trial around the middle of each event."""
    if labels.frames is not None:
        raise LockstepError(
            "--per-event needs events, such as those of BORIS",
            str(labels.path),
            "drop it: there is a label for each frame",
        )
    return [
        Trial(each.behaviour, (each.start_s + each.stop_s) / 2, each.line) for each in labels.events
    ]


def _by_step(
    labels: behaviour.Labels, clock: Clock, plan: Plan, options: argparse.Namespace
) -> list[Trial]:
    """Return a trial every --step frames."""
    count = _labelled(labels, clock)
    if options.multi:
        many = labels.overlapping(clock, plan.behaviours)
        names = behaviour.first_of(many, plan.behaviours)
    else:
        many = None
        names = labels.names(clock, options.priority)
    trials = []
    first = 0
    while first < count:
        numbers = plan.numbers(Trial("", first, 0), clock)
        if numbers[-1] >= count:
            break
        centre = centre_of(numbers)
        name = str(names[centre])
        if name and not (options.no_background and name == behaviour.BACKGROUND):
            trial = Trial(name, first, _line_of(labels, name, centre, clock))
            if many is not None:
                trial.labels = many[centre]
            trials.append(trial)
        first = first + options.step if options.step else int(numbers[-1]) + 1
    return trials


def centre_of(numbers: np.ndarray) -> int:
    """Return the frame in the middle of a trial's (T,) frames; of two, the earlier one.

    It is one of the trial's own frames, whose picture the network has.
    """
    return int(numbers[(len(numbers) - 1) // 2])


def _labelled(labels: behaviour.Labels, clock: Clock) -> int:
    """Return the number of frames that somebody looked at, from the first frame on.

    Bouts and events without a length of the video are of the whole video.
    """
    if labels.frames is not None and labels.rest < 0:
        return len(labels.frames)
    if not labels.length_s:
        return clock.count
    last_s = max([labels.length_s, *[event.stop_s for event in labels.events]])
    return min(clock.count, clock.frame_at(last_s))


def _line_of(labels: behaviour.Labels, name: str, frame: int, clock: Clock) -> int:
    """Return the line of a frame's label; 0 if unknown."""
    if labels.lines is not None:
        return int(labels.lines[frame]) if frame < len(labels.lines) else 0
    for event in labels.events:
        span = clock.span(event.start_s, event.stop_s)
        if event.behaviour == name and span.start <= frame < span.stop:
            return event.line
    return 0


def groups_of(
    table: Path, files: Sequence[Path], folder: Path, choice: behaviour.Choice
) -> dict[Path, dict[str, Any]]:
    """Return {video: group and line} of a table `video,group`, for the videos `files`.

    Raises LockstepError for a video without a group or with two, and for a row of several videos.
    """
    rows = []
    for line, row in read_table(table, "\n".join(text_lines(table)), ("video", GROUP)):
        group: dict[str, Any] = {"video": row["video"].strip(), GROUP: row[GROUP].strip()}
        if not group[GROUP]:
            raise LockstepError("an empty group", f"{table}:{line}", "name the animal or the cage")
        rows.append(group | {"line": line})
    names = [pairing.Named(row["video"]) for row in rows]
    groups: dict[Path, dict[str, Any]] = {}
    pairs = pairing.pair(names, files, folder, choice.folders)
    for row, videos in zip(rows, pairs, strict=True):
        if len(videos) > 1:
            what = pairing.several_called(row["video"], videos, folder)
            todo = pairing.cure_of_several(row["video"], videos, folder, choice.way)
            raise LockstepError(what, f"{table}:{row['line']}", todo)
        for video in videos:
            check_group(row, groups.setdefault(video, row), table)
    for video in files:
        if video not in groups:
            what = f"no row of {video.relative_to(folder)}"
            raise LockstepError(what, str(table), "name the group of each video")
    return groups


def check_rates(plan: Plan, table: Path) -> None:
    """Raise LockstepError for several frame rates without --fps, and for a video without times
    where seconds or --fps need times."""
    for video, clock in plan.clocks.items():
        if (plan.cutting.fps or plan.in_seconds) and not clock.fps:
            raise LockstepError(
                f"{video} has no frame rate: its frames have no times",
                place(table, plan.trials[video][0].line),
                f"write them: {STAMP}, or annotate in frames, without --fps",
            )
    known = {video: clock.fps for video, clock in plan.clocks.items() if clock.fps}
    if not known or plan.cutting.fps:
        return
    slow = min(known, key=known.__getitem__)
    fast = max(known, key=known.__getitem__)
    if known[fast] > 1.02 * known[slow]:
        raise LockstepError(
            (
                f"videos of several frame rates: {slow} has {known[slow]:g} frames/s, {fast} "
                f"{known[fast]:g}"
            ),
            place(table, max(plan.trials[v][0].line for v in (slow, fast))),
            f"--fps {known[slow]:g} takes each at that rate, so that all clips last equally long",
        )


def check_inside(plan: Plan, folder: Path, table: Path) -> None:
    """Raise LockstepError for a trial that reaches beyond the start or the end of its video."""
    for video, clock in plan.clocks.items():
        for trial in plan.trials.get(video, []):
            numbers = plan.numbers(trial, clock)
            if numbers[0] < 0:
                raise LockstepError(
                    f"the trial would start at frame {numbers[0]} of {folder / video}",
                    place(table, trial.line),
                    MOVE,
                )
            if numbers[-1] >= clock.count:
                raise beyond(trial, int(numbers[-1]), folder / video, clock.count, table)


def beyond(trial: Trial, frame: int, path: Path, count: int, table: Path) -> LockstepError:
    """Return the error of a trial that needs a frame beyond the `count` of a video."""
    return LockstepError(
        f"the trial needs frame {frame} of {path}, which has {count}",
        place(table, trial.line),
        MOVE,
    )


def place(table: Path, line: int) -> str:
    """Return the file and the line; the file alone for line 0."""
    if line:
        return f"{table}:{line}"
    return str(table)


# ---- cutting
# --------------------------------------------------------------------------------------------------

# trial, number of its first frame in the video, (T, size, size) uint8
Cut = tuple[Trial, int, np.ndarray]


def cut(video: str, plan: Plan, folder: Path, table: Path) -> Iterator[Cut]:
    """Yield the trials of one video, in the order of the last frames.

    The video is decoded once from the beginning, because the target of a seek depends on the
    encoder. A frame stays in memory only while a trial needs the frame. Raises LockstepError if the
    video is unreadable or too short.
    """
    path, trials, clock = folder / video, plan.trials[video], plan.clocks[video]
    with opened(path) as decoded:
        yield from _collect(in_time(decoded, clock, path), plan, trials, clock, path, table)


def _collect(
    decoded: Iterator[Any], plan: Plan, trials: list[Trial], clock: Clock, path: Path, table: Path
) -> Iterator[Cut]:
    waiting = [(trial, plan.numbers(trial, clock)) for trial in trials]
    needed = set(np.concatenate([numbers for _, numbers in waiting]).tolist())
    waiting.sort(key=lambda item: (item[1][-1], item[0].line))
    kept: dict[int, np.ndarray] = {}
    count = 0
    for number, frame in enumerate(decoded):
        count = number + 1
        if number in needed:
            kept[number] = gray_square(frame, plan.cutting.crop, plan.cutting.size, path)
        while waiting and waiting[0][1][-1] == number:
            trial, numbers = waiting.pop(0)
            yield trial, int(numbers[0]), np.stack([kept[n] for n in numbers])
            oldest = min((later[0] for _, later in waiting), default=number + 1)
            kept = {n: picture for n, picture in kept.items() if n >= oldest}
        if not waiting:
            return
    trial, numbers = waiting[0]
    raise beyond(trial, int(numbers[-1]), path, count, table)


# ---- command line
# --------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        prog="prepare_clips.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("annotations", type=Path, help="the table, CSV in UTF-8; or a file or a folder of labels")
    add("output", type=Path, help="the packed folder to make; must not exist")
    add(
        "--videos",
        type=Path,
        metavar="FOLDER",
        help="where the videos are; default: the table's folder",
    )
    add(
        "--classes",
        default="",
        metavar="A,B,…",
        help="classes in the order of their numbers; default: all, by name",
    )
    add(
        "--frames",
        type=whole_number(1),
        default=17,
        metavar="T",
        help="frames per trial (default: 17)",
    )
    add(
        "--stride",
        type=whole_number(1),
        default=1,
        metavar="N",
        help="use every Nth frame of the video (default: 1)",
    )
    many = (
        "frames per second of the clips, for videos of several rates (default: the rate of the "
        "videos, which must all be equal)"
    )
    add("--fps", type=positive_number, default=0.0, metavar="HZ", help=many)
    add(
        "--size",
        type=whole_number(8),
        default=256,
        metavar="PX",
        help="height and width of the clips (default: 256)",
    )
    box = (
        "keep a box of the video, in pixels of the video: without a time stamp, or without the "
        "surroundings of the arena"
    )
    add("--crop", type=whole_number(0), nargs=4, metavar=("X", "Y", "W", "H"), help=box)
    add(
        "--allow-rare",
        action="store_true",
        help="keep a label that occurs once and may be a typo",
    )
    more = parser.add_argument_group("with files of labels")
    add_labels(more.add_argument)
    add = more.add_argument
    add(
        "--step",
        type=whole_number(1),
        default=0,
        metavar="N",
        help="a clip every N frames (default: end to end)",
    )
    add("--per-event", action="store_true", help="a clip around the middle of each event instead")
    add("--no-background", action="store_true", help="leave out clips without a behaviour")
    add(
        "--groups",
        type=Path,
        metavar="CSV",
        help="a table video,group: the animal or the cage of each video",
    )
    add("--multi", action="store_true", help=MULTI)
    add = parser.add_argument
    add(
        "--skip-broken",
        action="store_true",
        help="leave out unreadable videos, and print the names",
    )
    add_json(parser)
    options = parser.parse_args(argv)
    if options.crop and not (options.crop[2] and options.crop[3]):
        parser.error("argument --crop: width and height must be at least 1")
    return options


def add_labels(add: Any) -> None:
    """Add the options for reading labels."""
    words: Any = {
        "type": lambda text: [name.strip() for name in text.split(",")],
        "default": [],
        "metavar": "A,B,…",
    }
    add("--subjects", **words, help="the subjects whose events count (default: all)")
    add(
        "--priority",
        **words,
        help="where behaviours overlap, the first of these behaviours is the label",
    )
    add(
        "--behaviours",
        **words,
        help="SimBA's columns of behaviours (default: the behaviours of the project)",
    )
    times = "handling of a time offset of BORIS (default: an error)"
    add("--offset", choices=("subtract", "ignore"), default="", help=times)
    which = (
        "which observation counts where a video has several, such as those of two observers: ids, "
        "or patterns such as '*_anna' (default: an error)"
    )
    add("--observation", **words, help=which)
    at_once = (
        "the player whose video has the events, where an observation of BORIS shows several videos "
        "at once (default: 1)"
    )
    add(boris.PLAYER, type=whole_number(1), default=0, metavar="N", help=at_once)
    short = "leave out labels beyond the end of a video or a track (default: an error)"
    add(behaviour.SHORT, action="store_true", help=short)
    folders = "the folders in names of videos do not count (default: they must fit, if any)"
    add(pairing.ANY_FOLDER, action="store_true", help=folders)
    add("--columns", type=columns_of_text, default={}, metavar="HERE=THERE,…", help=COLUMNS)


def read_labels(path: Path, options: argparse.Namespace) -> list[behaviour.Labels]:
    """Return all labels of a file, read as the options of `add_labels` name them."""
    return behaviour.read(path, options.behaviours, options.offset, options.columns, options.player)


def choice_of(options: argparse.Namespace, way: str = pairing.OF_VIDEOS) -> behaviour.Choice:
    """Return which labels belong to a video, by the options of `add_labels`.

    way  how the tool takes one of several videos of one name
    """
    folders = Folders.FIT
    if options.any_folder:
        folders = Folders.IGNORE
    return behaviour.Choice(options.observation, folders, way)


def columns_of_text(text: str) -> dict[str, str]:
    """Return {name here: name in the file} of a text such as video=File,start_s=Onset."""
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(here.strip() and there.strip() for here, _, there in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not such as video=File,start_s=Onset")
    return {here.strip(): there.strip() for here, _, there in pairs}


def prepare(options: argparse.Namespace) -> str:
    """Write the packed folder. Return the text to print. Raises LockstepError."""
    import_av()  # fails before the folder is created
    table, folder = options.annotations, options.videos or options.annotations
    folder = folder if folder.is_dir() else folder.parent
    plan, classes = _planned(options, table, folder)
    _check_rare(plan, table, options.allow_rare)
    _check_videos(plan, table, folder, options.skip_broken)
    check_rates(plan, table)
    check_inside(plan, folder, table)
    videos, broken = _write_clips(options, plan, classes, table, folder)
    lines = [f"skipped: {line}" for line in broken]
    if broken:
        lines.append(f"Skipped {len(broken)} of {len(plan.trials)} videos")
    shares = ", ".join(f"{name} {len(of)}" for name, of in videos.items())
    size = f"{options.frames} x {options.size} x {options.size}"
    lines.append(
        f"Wrote {sum(map(len, videos.values()))} trials of {size} to {options.output} ({shares})"
    )
    return "\n".join([*lines, *_notes(plan, videos, options), _training_of(options)])


def _training_of(options: argparse.Namespace) -> str:
    """Return the command that trains on the clips, with the config for this machine."""
    command = "python train.py --config configs/video_small.yaml"
    if torch.cuda.is_available():
        command = "./train_multigpu.sh --config configs/video.yaml"
    command += f" dataset.root={shlex.quote(str(options.output))}"
    if options.multi:
        command += " loss.kind=binary"
    return command


def _planned(options: argparse.Namespace, table: Path, folder: Path) -> tuple[Plan, list[str]]:
    """Return the plan and the classes of a table of trials or of files of labels."""
    classes = [name.strip() for name in options.classes.split(",") if name.strip()]
    cutting = Cutting(
        options.frames,
        options.stride,
        tuple(options.crop) if options.crop else None,
        options.size,
        options.fps,
    )
    if not behaviour.is_labels(table, options.columns):
        if options.multi:
            raise LockstepError(
                "a table has one label for each trial", "--multi", "give labels, or drop it"
            )
        return read_annotations(table, cutting, classes, options.columns)
    plan = plan_of_labels(options, cutting, folder, classes)
    trials = [*itertools.chain(*plan.trials.values())]
    classes = classes or sorted({trial.label for trial in trials})
    every = [trial.labels for trial in trials if trial.labels is not None]
    if every and not options.classes:  # keep a class that occurs only beside a preferred class
        there = (np.stack(every) == 1).any(0)
        classes = [name for name, on in zip(plan.behaviours, there, strict=True) if on]
    return plan, classes


def _check_rare(plan: Plan, table: Path, allowed: bool) -> None:
    """Raise LockstepError for a label that occurs once, if a label occurs at least OFTEN times."""
    counts = Counter(trial.label for trial in itertools.chain(*plan.trials.values()))
    if allowed or max(counts.values()) < OFTEN:
        return
    for video, trials in plan.trials.items():
        for trial in trials:
            if counts[trial.label] > 1:
                continue
            names = [name for name in counts if name == trial.label or counts[name] > 1]
            near = look_alikes({name: counts[name] for name in names})
            what = f"label {trial.label!r} occurs once, in {video}"
            if near:
                what += f"; {near[0]}"
            raise LockstepError(
                what,
                place(table, trial.line),
                "correct it, or --allow-rare keeps it: it is trained on or validated, never both",
            )


def _check_videos(plan: Plan, table: Path, folder: Path, skip_broken: bool) -> None:
    """Read the times of each video's frames into the plan, before hours of decoding.

    Raises LockstepError for videos that are missing, cannot be opened, or have two names.
    """
    missing = [video for video in plan.trials if not os.path.exists(folder / video)]
    if missing and not skip_broken:
        raise _missing(missing, plan, table, folder)
    files: dict[tuple[int, int], str] = {}
    for video, trials in plan.trials.items():
        if video in missing:
            plan.broken[video] = f"{folder / video}: cannot read the video: there is no such file"
            continue
        where = place(table, trials[0].line)
        about_file = os.stat(folder / video)
        if (twin := files.setdefault((about_file.st_dev, about_file.st_ino), video)) != video:
            raise LockstepError(
                f"{video} is the file {twin} of line {plan.trials[twin][0].line}",
                where,
                "call it by one name: the split is by video",
            )
        if video in plan.clocks:
            continue
        try:
            plan.clocks[video] = read_clock(folder / video)
        except BrokenVideo as error:
            if not skip_broken:
                raise _of_line(error, where) from None
            plan.broken[video] = str(error)


def _missing(missing: list[str], plan: Plan, table: Path, folder: Path) -> BrokenVideo:
    """Return the error that names all missing videos."""
    what = f"cannot read the video: there is no {folder / missing[0]}"
    if len(missing) > 1:
        what = (
            f"{len(missing)} of {len(plan.trials)} videos are missing in {folder}: "
            f"{some_names(missing, LISTED)}"
        )
    return BrokenVideo(
        what,
        where=place(table, plan.trials[missing[0]][0].line),
        todo="fix the name, or give --videos FOLDER, or --skip-broken leaves them out",
    )


def _write_clips(
    options: argparse.Namespace, plan: Plan, classes: list[str], table: Path, folder: Path
) -> tuple[dict[str, list[str]], list[str]]:
    """Cut and write the packed folder.

    Return the video of each trial by label, and a sentence on each video that was left out.
    """
    from tqdm import tqdm

    videos: dict[str, list[str]] = {name: [] for name in classes}
    labels: list[np.ndarray] = []
    broken: list[str] = []
    extra = ("source_frame", "source_line", *([GROUP] if plan.groups else []))
    total = sum(map(len, plan.trials.values()))
    with (
        ClipsWriter(options.output, classes, extra) as writer,
        tqdm(total=total, unit="trial", disable=None) as bar,
    ):
        for video, trials in plan.trials.items():
            if video in plan.broken:
                broken.append(plan.broken[video])
                continue
            bar.set_description(Path(video).name)
            clips: Iterable[Cut] = cut(video, plan, folder, table)
            try:
                # With --skip-broken a video with an unreadable end is left out completely. The
                # clips of the video stay in memory until the end is read.
                group = {GROUP: plan.groups[video][GROUP]} if plan.groups else {}
                if options.skip_broken:
                    clips = list(clips)
                for trial, first, clip in clips:
                    writer.add(
                        clip,
                        video,
                        trial.label,
                        source_frame=first,
                        source_line=trial.line,
                        **group,
                    )
                    videos[trial.label].append(video)
                    if trial.labels is not None:
                        labels.append(trial.labels)
                    bar.update()
            except BrokenVideo as error:
                if not options.skip_broken:
                    raise _of_line(error, place(table, trials[0].line)) from None
                broken.append(str(error))
        about = {"crop": plan.cutting.crop, "stride": options.stride, "size": options.size}
        about["fps"] = sorted({round(clock.fps, 2) for clock in plan.clocks.values()} - {0})
        if options.fps:
            about |= {"fps": [options.fps], "resampled": True}
        if plan.behaviours:
            writer.write_array(LABELS, columns_of(np.stack(labels), plan.behaviours, classes))
        writer.write_text(CUTTING, json.dumps(about) + "\n")
        if not writer.num_trials:
            raise LockstepError("not one video could be read", str(folder), broken[0])
    return videos, broken


def _notes(plan: Plan, videos: dict[str, list[str]], options: argparse.Namespace) -> list[str]:
    """Return the groups and the warnings as lines to print.

    A doubt is a warning and no error: the folder is complete, and may serve another purpose.
    """
    unit = "video"
    unit_of = {video: video for video in plan.trials}  # the unit that a split divides
    if plan.groups:
        unit = "group"
        unit_of = {video: plan.groups[video][GROUP] for video in plan.trials}
    units = Counter(unit_of[video] for video in sorted({*itertools.chain(*videos.values())}))
    counts = {label: len(names) for label, names in videos.items() if names}
    warnings = []
    if len(units) < 2:
        warnings.append(
            f"all trials are of one {unit}; training divides {unit}s, so it needs two or more"
        )
    if len(counts) < 2:
        warnings.append("all trials are of one class; there is nothing to distinguish")
    slow = [video for video, clock in plan.clocks.items() if clock.fps < 0.98 * options.fps]
    if slow:
        warnings.append(
            f"{slow[0]} has {plan.clocks[slow[0]].fps:g} frames/s, fewer than --fps "
            f"{options.fps:g}: some are taken twice"
        )
    uneven = [video for video, clock in plan.clocks.items() if clock.own_s is not None]
    if uneven and not options.fps:
        warnings.append(
            f"frames of {some_names(uneven, LISTED)} are unevenly apart, so clips last unequally "
            f"long: --fps {plan.clocks[uneven[0]].fps:g} takes frames at even times"
        )
    for label, names in videos.items():
        owners = {unit_of[name] for name in names}
        if len(owners) == 1 and len(units) > 1:
            warnings.append(
                f"all of {label!r} is in {owners.pop()}: trained on or validated, never both"
            )
    stems: dict[str, str] = {}
    for name in sorted(plan.trials):
        other = stems.setdefault(os.path.splitext(name)[0], name)
        if other != name:
            warnings.append(f"{other} and {name} differ in their ending: two videos, or one?")
    warnings += look_alikes(counts)
    lines = []
    if plan.groups:
        warnings += look_alikes(units, typos=False)
        sizes = [f"{name} ({amount(count, 'video')})" for name, count in sorted(units.items())]
        lines.append(f"Groups: {', '.join(sizes)}")
    notes = [*plan.notes, *some_notes(plan.clocks)]
    lines += [f"note: {note}" for note in notes]
    return lines + [f"warning: {warning}" for warning in warnings]


def _of_line(error: BrokenVideo, where: str) -> BrokenVideo:
    """Return the error with the line of the table and the option that leaves out the video."""
    return BrokenVideo(str(error), where, "or --skip-broken leaves it out")


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    return printed(lambda: prepare(options), options.output, options.json)
