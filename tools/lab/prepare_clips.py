"""Cut videos by what people saw in them into a packed folder of gray clips that the video task
trains on.

    python tools/prepare_clips.py annotations.csv data/mice --videos recordings --size 256 --frames
    17 python tools/prepare_clips.py events.tsv data/mice --videos recordings python train.py video
    --root data/mice

A table has a header and one row per trial:

    video                 file name, relative to --videos
    label                 class of the trial
    start, center or end  the frame of the video, counted from 0, at which the trial starts, is
                          centred or ends;
                          or start_s, center_s or end_s: the same in seconds, at the video's average
                          frame rate
    group                 optional: the animal or the cage of the video; no group is trained on and
    validated

Exactly one of the six time columns is needed. A trial that reaches beyond its video is an error:
nothing is padded.

Or a file, or a folder, of labels: events that BORIS exported (tabular or aggregated; CSV, TSV,
.xlsx), DeepEthogram's VIDEO_labels.csv, SimBA's targets_inserted/VIDEO.csv. Clips are cut one after
the other from the start of each video, one every --step frames, and have the label of their centre
frame: `background` where nothing was seen, none where nobody looked. With --per-event there is a
clip for each event instead, around its middle, and none of the background.

Frames are converted to gray, cropped, and resized to a square. The folder appears only when it is
complete. Needs PyAV: pip install av
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import LockstepError, amount
from formats.arrays import csv_rows, look_alikes, stays_below, text_lines
from formats.lab import behaviour
from formats.lab.bouts import columns_of
from formats.lab.clips import CUTTING, GROUP, LABELS, ClipsWriter, check_group, read_table
from formats.lab.videos import SUFFIXES, BrokenVideo, Cutting, gray_square, import_av, opened
from tools.arguments import printed, rate, whole_number

MOST = 1e9  # frames or seconds: no video is longer, and numpy's own whole numbers end at 9e18
OFTEN = 3  # trials of one label, from which on one that occurs once may be a typo
MULTI = "labels may overlap: keep a column for each behaviour, for loss.kind=binary"
MOVE = "move or remove it, or use fewer --frames or a smaller --stride"
TIMES = ("start", "center", "end", "start_s", "center_s", "end_s")


@dataclass
class Trial:
    """One row of the table: `at` in frames or seconds, `line` the row's line. One that was `cut`
    from events may lie beyond the end of its video, whose length was rounded. `labels` are those of
    all behaviours, if they may overlap."""

    label: str
    at: float
    line: int
    cut: bool = False
    labels: np.ndarray | None = None


@dataclass
class Plan:
    """The trials to cut out of each video.

    column  the one of TIMES that the table has
    groups  {video: {"video", "group", "line" where it stands first}}; empty without that column
    """

    column: str
    cutting: Cutting
    trials: dict[str, list[Trial]] = field(default_factory=dict)
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    rates: set[float] = field(default_factory=set)  # frames per second of the videos that were cut
    behaviours: list[str] = field(default_factory=list)  # of labels that may overlap

    def numbers(self, trial: Trial, fps: float) -> np.ndarray:
        """Return (T,) the numbers of the trial's frames in the video."""
        at = round(trial.at * fps) if self.column.endswith("_s") else round(trial.at)
        offsets = self.cutting.offsets(fps)
        before = {"start": 0, "center": offsets[-1] // 2, "end": offsets[-1]}[
            self.column.removesuffix("_s")
        ]
        return at - before + offsets

    def class_of_frames(
        self, video: str, fps: float, count: int, classes: list[str]
    ) -> np.ndarray | None:
        """Return (N,) class numbers of a video's frames, -1 without a trial or for a class that is
        not in `classes`; None if the video has no trials."""
        number = {name: c for c, name in enumerate(classes)}
        found = np.full(count, -1)
        for trial in self.trials.get(video, []):
            frames = self.numbers(trial, fps)
            found[max(0, frames[0]) : max(0, frames[-1] + 1)] = number.get(trial.label, -1)
        return found if video in self.trials else None


def read_annotations(path: Path, cutting: Cutting, classes: list[str]) -> tuple[Plan, list[str]]:
    """Return the plan, its trials by video in the table's order, and the classes: those given, else
    the sorted labels.

    Raises LockstepError, naming the line, for a missing column, a time that is no number, a label
    not in `classes`, or a video outside of the folder of videos.
    """
    lines = text_lines(path)
    header, _ = csv_rows(path, lines)
    columns = [name for name in TIMES if name in header]
    if not {"video", "label"} <= {*header} or len(columns) != 1:
        todo = f"it needs video, label and exactly one of {', '.join(TIMES)}"
        raise LockstepError(f"the header has {', '.join(header) or 'nothing'}", f"{path}:1", todo)
    plan = Plan(columns[0], cutting)
    for line, row in read_table(path, "\n".join(lines), columns):
        trial = _trial(row, columns[0], classes, f"{path}:{line}", line)
        video = os.path.normpath(row["video"].strip())
        if twin := [other.line for other in plan.trials.get(video, []) if other.at == trial.at]:
            what = f"{video} has a trial at the same time in line {twin[0]}"
            raise LockstepError(
                what, f"{path}:{line}", "keep one: a trial has one label, and counts once"
            )
        plan.trials.setdefault(video, []).append(trial)
        if GROUP in header:
            if not (group := row[GROUP].strip()):
                raise LockstepError(
                    "an empty group",
                    f"{path}:{line}",
                    "name the animal or the cage, or drop the column",
                )
            found = {"video": video, GROUP: group, "line": line}
            check_group(found, plan.groups.setdefault(video, found), path)
    labels = {trial.label for trials in plan.trials.values() for trial in trials}
    if not labels:
        raise LockstepError("no trials", str(path), "write a row for each")
    return plan, classes or sorted(labels)


def _trial(row: dict[str, str], column: str, classes: list[str], where: str, line: int) -> Trial:
    label = row["label"].strip()
    if not label or (classes and label not in classes):
        what = f"label {label!r} is not among the classes" if label else "an empty label"
        todo = (
            f"choose one of {', '.join(classes)}, or add it to --classes"
            if classes
            else "name the class"
        )
        raise LockstepError(what, where, todo)
    if not row["video"].strip():
        raise LockstepError("an empty video", where, "name the file")
    if not stays_below(row["video"].strip()):
        what = f"video {row['video']!r} is not in the folder of videos"
        raise LockstepError(what, where, "give a name relative to --videos, without ..")
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
    asked: argparse.Namespace, cutting: Cutting, folder: Path, classes: list[str]
) -> Plan:
    """Return the clips to cut by files of labels; labels that are not in `classes`, if any, are
    left out.

    Raises LockstepError with the file and the line, also for a video that is not in the folder or
    is there twice.
    """
    plan = Plan("center_s" if asked.per_event else "start", cutting)
    groups = groups_of(asked.groups) if asked.groups else {}
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    if asked.multi and asked.per_event:
        raise LockstepError(
            "--multi is for clips one after the other", "--per-event", "drop one of the two"
        )
    found_labels = behaviour.read(asked.annotations, asked.behaviours, asked.offset)
    if asked.multi:
        plan.behaviours = classes or [
            behaviour.BACKGROUND,
            *sorted({b for one in found_labels for b in one.behaviours}),
        ]
    for labels in found_labels:
        labels = labels.of(asked.subjects)
        found = [path for path in files if behaviour.stem_of(path.name) == labels.stem]
        if len(found) != 1:
            what = (
                f"{len(found)} videos called {labels.stem} in {folder}"
                if found
                else f"no video {labels.video} in {folder}"
            )
            raise BrokenVideo(
                what, where=str(labels.path), todo="give --videos FOLDER, with each video once"
            )
        video = str(found[0].relative_to(folder))
        with opened(found[0]) as (_, fps):
            trials = plan.trials[video] = (
                _by_event(labels, fps) if asked.per_event else _by_step(labels, fps, plan, asked)
            )
        trials[:] = [trial for trial in trials if not classes or trial.label in classes]
        if asked.groups:
            if labels.stem not in groups:
                raise LockstepError(
                    f"no row of {labels.video}", str(asked.groups), "name the group of each video"
                )
            plan.groups[video] = groups[labels.stem] | {"video": video}
    plan.trials = {video: trials for video, trials in plan.trials.items() if trials}
    if not plan.trials:
        raise LockstepError(
            "no clips", str(asked.annotations), "label more, or shorten --frames and --step"
        )
    return plan


def _by_event(labels: behaviour.Labels, fps: float) -> list[Trial]:
    if labels.frames is not None:
        todo = "drop it: there is a label for each frame"
        raise LockstepError(
            "--per-event needs events, such as those of BORIS", str(labels.path), todo
        )
    return [
        Trial(each.behaviour, (each.start_s + each.stop_s) / 2, each.line) for each in labels.events
    ]


def _by_step(
    labels: behaviour.Labels, fps: float, plan: Plan, asked: argparse.Namespace
) -> list[Trial]:
    offsets, lines, of_events = plan.cutting.offsets(fps), labels.lines, labels.frames is None
    if of_events and not fps:
        raise LockstepError(
            f"{labels.video} has no frame rate",
            str(labels.path),
            "convert it: events are in seconds",
        )
    last_s = max([labels.length_s, *(event.stop_s for event in labels.events)])
    count = round(last_s * fps) if labels.frames is None else len(labels.frames)
    many = labels.overlapping(count, fps, plan.behaviours) if asked.multi else None
    names = (
        labels.names(count, fps, asked.priority)
        if many is None
        else behaviour.first_of(many, plan.behaviours)
    )
    trials = []
    for first in range(0, count - int(offsets[-1]), asked.step or int(offsets[-1]) + 1):
        name = str(names[centre := first + int(offsets[-1]) // 2])
        if name and not (asked.no_background and name == behaviour.BACKGROUND):
            inside = [
                e.line
                for e in labels.events
                if e.behaviour == name and e.start_s * fps <= centre < e.stop_s * fps
            ]
            line = int(lines[centre]) if lines is not None else (inside or [0])[0]
            trials.append(
                Trial(name, first, line, of_events, None if many is None else many[centre])
            )
    return trials


def groups_of(path: Path) -> dict[str, dict[str, Any]]:
    """Return {name of a video without its ending: its group and line} of a table `video,group`."""
    found: dict[str, dict[str, Any]] = {}
    for line, row in read_table(path, "\n".join(text_lines(path)), ("video", GROUP)):
        one: dict[str, Any] = {
            "video": row["video"].strip(),
            GROUP: row[GROUP].strip(),
            "line": line,
        }
        if not one[GROUP]:
            raise LockstepError("an empty group", f"{path}:{line}", "name the animal or the cage")
        check_group(one, found.setdefault(behaviour.stem_of(one["video"]), one), path)
    return found


def check_rates(plan: Plan, rates: dict[str, float], table: Path) -> None:
    """Raise LockstepError if {video: frames per second} are several rates, and no --fps makes them
    one."""
    known = {video: rate for video, rate in rates.items() if rate}
    slow, fast = (
        (min(known, key=known.__getitem__), max(known, key=known.__getitem__))
        if known
        else ("", "")
    )
    if plan.cutting.fps and (odd := next((video for video in rates if video not in known), "")):
        raise LockstepError(
            f"{odd} has no frame rate", place(table, plan.trials[odd][0].line), "convert it"
        )
    if known and not plan.cutting.fps and known[fast] > 1.02 * known[slow]:
        what = (
            f"videos of several frame rates: {slow} has {known[slow]:g} frames/s, {fast} "
            f"{known[fast]:g}"
        )
        todo = f"--fps {known[slow]:g} takes each at that rate, so that all clips last equally long"
        raise LockstepError(
            what, place(table, max(plan.trials[v][0].line for v in (slow, fast))), todo
        )


def place(table: Path, line: int) -> str:
    return f"{table}:{line}" if line else str(table)


# ---- cutting
# --------------------------------------------------------------------------------------------------

# trial, number of its first frame in the video, (T, size, size) uint8
Cut = tuple[Trial, int, np.ndarray]


def cut(path: Path, plan: Plan, trials: list[Trial], table: Path) -> Iterator[Cut]:
    """Yield the trials of one video, in the order they end.

    The video is decoded once from its start, because where a seek lands depends on the encoder.
    Only the frames that some trial still needs are kept. Raises LockstepError if the video is
    unreadable or too short.
    """
    with opened(path) as (decoded, fps):
        if not fps and plan.column.endswith("_s"):
            raise LockstepError("the video has no frame rate", str(path), "annotate in frames")
        plan.rates |= {round(fps, 2)} - {0}
        yield from _collect(decoded, plan, trials, fps, path, table)


def _collect(
    decoded: Iterator[Any], plan: Plan, trials: list[Trial], fps: float, path: Path, table: Path
) -> Iterator[Cut]:
    waiting = [(trial, plan.numbers(trial, fps)) for trial in trials]
    for trial, numbers in waiting:
        if numbers[0] < 0:
            what = f"the trial would start at frame {numbers[0]} of {path}"
            raise LockstepError(what, place(table, trial.line), MOVE)
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
    for trial, numbers in waiting:
        if not trial.cut:
            what = f"the trial needs frame {numbers[-1]} of {path}, which has {count}"
            raise LockstepError(what, place(table, trial.line), MOVE)


# ---- command line
# --------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
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
        help="take every Nth frame of the video (default: 1)",
    )
    many = (
        "frames per second at which videos of any rate are taken (default: their own, which "
        "must be one)"
    )
    add("--fps", type=rate, default=0.0, metavar="HZ", help=many)
    add(
        "--size",
        type=whole_number(8),
        default=256,
        metavar="PX",
        help="height and width of the clips (default: 256)",
    )
    box = (
        "keep this box of the video, in its pixels: leaves out a time stamp, or what lies "
        "around the arena"
    )
    add("--crop", type=whole_number(0), nargs=4, metavar=("X", "Y", "W", "H"), help=box)
    add(
        "--allow-rare",
        action="store_true",
        help="keep a label that occurs once, which may be a typo",
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
    add("--no-background", action="store_true", help="leave out clips in which nothing was seen")
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
        help="leave out videos that cannot be read, and name them",
    )
    asked = parser.parse_args(argv)
    if asked.crop and not (asked.crop[2] and asked.crop[3]):
        parser.error("argument --crop: width and height must be at least 1")
    return asked


def add_labels(add: Any) -> None:
    """Add the options of reading labels."""
    words: Any = {
        "type": lambda text: [name.strip() for name in text.split(",")],
        "default": [],
        "metavar": "A,B,…",
    }
    add("--subjects", **words, help="whose events count, where there are several")
    add(
        "--priority",
        **words,
        help="the behaviours that win where several are seen at once, the first one first",
    )
    add(
        "--behaviours",
        **words,
        help="SimBA's columns of behaviours (default: those of its project)",
    )
    times = "what to do with a time offset of BORIS (default: refuse it)"
    add("--offset", choices=("subtract", "ignore"), default="", help=times)


def prepare(asked: argparse.Namespace) -> str:
    """Run the command line; returns the text to print. Raises LockstepError."""
    import_av()  # fails before anything is written
    table, folder = asked.annotations, asked.videos or asked.annotations
    folder = folder if folder.is_dir() else folder.parent
    plan, classes = _planned(asked, table, folder)
    _check_rare(plan, table, asked.allow_rare)
    rates = _check_videos(plan, table, folder, asked.skip_broken)
    check_rates(plan, rates, table)
    videos, broken = _write_clips(asked, plan, classes, table, folder)
    lines = [f"skipped: {line}" for line in broken]
    if broken:
        lines.append(f"Skipped {len(broken)} of {len(plan.trials)} videos")
    shares = ", ".join(f"{name} {len(of)}" for name, of in videos.items())
    size = f"{asked.frames} x {asked.size} x {asked.size}"
    lines.append(
        f"Wrote {sum(map(len, videos.values()))} trials of {size} to {asked.output} ({shares})"
    )
    return "\n".join([*lines, *_told(plan, videos, rates, asked.fps)])


def _planned(asked: argparse.Namespace, table: Path, folder: Path) -> tuple[Plan, list[str]]:
    """Return what is to be cut, and the classes, out of a table of trials or files of labels."""
    classes = [name.strip() for name in asked.classes.split(",") if name.strip()]
    cutting = Cutting(
        asked.frames, asked.stride, tuple(asked.crop) if asked.crop else None, asked.size, asked.fps
    )
    if not behaviour.is_labels(table):
        if asked.multi:
            raise LockstepError(
                "a table has one label for each trial", "--multi", "give labels, or drop it"
            )
        return read_annotations(table, cutting, classes)
    plan = plan_of_labels(asked, cutting, folder, classes)
    classes = classes or sorted(
        {trial.label for trials in plan.trials.values() for trial in trials}
    )
    every = [
        trial.labels
        for trials in plan.trials.values()
        for trial in trials
        if trial.labels is not None
    ]
    if every and not asked.classes:  # a class may be on only where another one is, too
        there = (np.stack(every) == 1).any(0)
        classes = [name for name, on in zip(plan.behaviours, there, strict=True) if on]
    return plan, classes


def _check_rare(plan: Plan, table: Path, allowed: bool) -> None:
    """Raise LockstepError for a label that occurs once beside one that occurs often."""
    counts = Counter(trial.label for trials in plan.trials.values() for trial in trials)
    rare = [
        (trial, video)
        for video, trials in plan.trials.items()
        for trial in trials
        if counts[trial.label] == 1
    ]
    if rare and max(counts.values()) >= OFTEN and not allowed:
        trial, video = rare[0]
        near = look_alikes(
            {name: counts[name] for name in counts if name == trial.label or counts[name] > 1}
        )
        what = f"label {trial.label!r} occurs once, in {video}" + f"; {near[0]}" * bool(near)
        todo = "correct it, or --allow-rare keeps it: it is trained on or validated, never both"
        raise LockstepError(what, place(table, trial.line), todo)


def _check_videos(plan: Plan, table: Path, folder: Path, skip_broken: bool) -> dict[str, float]:
    """Return the frames per second of each video, before hours of decoding. Raises LockstepError
    for one that is not there, cannot be opened, or has two names."""
    files: dict[tuple[int, int], str] = {}
    rates: dict[str, float] = {}
    for video, trials in plan.trials.items():
        where = place(table, trials[0].line)
        try:
            about_file = os.stat(folder / video)
        except OSError:
            if not skip_broken:
                what = f"cannot read the video: there is no {folder / video}"
                raise BrokenVideo(
                    what, where=where, todo="fix the name, or give --videos FOLDER"
                ) from None
            continue
        if (twin := files.setdefault((about_file.st_dev, about_file.st_ino), video)) != video:
            what = f"{video} is the file {twin} of line {plan.trials[twin][0].line}"
            raise LockstepError(what, where, "call it by one name: the split is by video")
        try:
            with opened(folder / video) as (_, rates[video]):
                pass
        except BrokenVideo as error:
            if not skip_broken:
                raise _of_line(error, where) from None
    return rates


def _write_clips(
    asked: argparse.Namespace, plan: Plan, classes: list[str], table: Path, folder: Path
) -> tuple[dict[str, list[str]], list[str]]:
    """Cut and write the packed folder; return the video of each trial by label, and a sentence on
    each left out."""
    from tqdm import tqdm

    videos: dict[str, list[str]] = {name: [] for name in classes}
    many: list[np.ndarray] = []
    broken: list[str] = []
    extra = ("source_frame", "source_line", *([GROUP] if plan.groups else []))
    total = sum(len(trials) for trials in plan.trials.values())
    with (
        ClipsWriter(asked.output, classes, extra) as writer,
        tqdm(total=total, unit="trial", disable=None) as bar,
    ):
        for video, trials in plan.trials.items():
            bar.set_description(Path(video).name)
            clips: Iterable[Cut] = cut(folder / video, plan, trials, table)
            try:
                # With --skip-broken a video that breaks half-way is left out whole, so its clips
                # wait in memory.
                group = {GROUP: plan.groups[video][GROUP]} if plan.groups else {}
                for trial, first, clip in list(clips) if asked.skip_broken else clips:
                    writer.add(
                        clip,
                        video,
                        trial.label,
                        source_frame=first,
                        source_line=trial.line,
                        **group,
                    )
                    videos[trial.label].append(video)
                    many += [] if trial.labels is None else [trial.labels]
                    bar.update()
            except BrokenVideo as error:
                if not asked.skip_broken:
                    raise _of_line(error, place(table, trials[0].line)) from None
                broken.append(str(error))
        about = {"crop": plan.cutting.crop, "stride": asked.stride, "size": asked.size}
        about |= (
            {"fps": [asked.fps], "resampled": True} if asked.fps else {"fps": sorted(plan.rates)}
        )
        if plan.behaviours:
            writer.write_array(LABELS, columns_of(np.stack(many), plan.behaviours, classes))
        writer.write_text(CUTTING, json.dumps(about) + "\n")
        if not writer.num_trials:
            raise LockstepError("not one video could be read", str(folder), broken[0])
    return videos, broken


def _told(
    plan: Plan, videos: dict[str, list[str]], rates: dict[str, float], fps: float
) -> list[str]:
    """Return the groups and warnings, no more: the folder is complete and may have another
    purpose."""
    # what a split divides
    of = {video: plan.groups[video][GROUP] if plan.groups else video for video in plan.trials}
    unit = "group" if plan.groups else "video"
    groups = Counter(
        of[video] for video in sorted({name for names in videos.values() for name in names})
    )
    sizes = (
        [f"{name} ({amount(count, 'video')})" for name, count in sorted(groups.items())]
        if plan.groups
        else []
    )
    found = {label: len(names) for label, names in videos.items()}
    warnings = []
    if len(groups) < 2:
        warnings.append(
            f"all trials are of one {unit}; training divides {unit}s, so it needs two or more"
        )
    if sum(count > 0 for count in found.values()) < 2:
        warnings.append("all trials are of one class; there is nothing to tell apart")
    slow = [video for video, each in rates.items() if each < 0.98 * fps]
    if slow:
        warnings.append(
            f"{slow[0]} has {rates[slow[0]]:g} frames/s, fewer than --fps {fps:g}: some are "
            "taken twice"
        )
    alone = {
        label: of[names[0]]
        for label, names in videos.items()
        if len({of[name] for name in names}) == 1
    }
    alone = alone if len(groups) > 1 else {}
    warnings += [
        f"all of {label!r} is in {name}: trained on or validated, never both"
        for label, name in alone.items()
    ]
    stems: dict[str, str] = {}
    for name in sorted(plan.trials):
        if (other := stems.setdefault(os.path.splitext(name)[0], name)) != name:
            warnings.append(f"{other} and {name} differ in their ending: two videos, or one?")
    warnings += look_alikes({name: count for name, count in found.items() if count})
    warnings += look_alikes(groups, typos=False) if plan.groups else []
    return [
        *([f"Groups: {', '.join(sizes)}"] if sizes else []),
        *(f"warning: {warning}" for warning in warnings),
    ]


def _of_line(error: BrokenVideo, where: str) -> BrokenVideo:
    return BrokenVideo(str(error), where, "or --skip-broken leaves it out")


def main(argv: list[str] | None = None) -> int:
    asked = parse(argv)
    return printed(lambda: prepare(asked), asked.output)
