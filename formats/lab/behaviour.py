"""Annotations of behaviour in videos: a common form for BORIS, DeepEthogram and SimBA.

BORIS          tabular and aggregated events, see `formats/lab/boris.py`
DeepEthogram   VIDEO_labels.csv: a row per frame, a column per behaviour with 1, 0, or -1 for not
               labelled
table of bouts video, start_s, stop_s, label: see `formats/lab/events/event_table.py`
SimBA          targets_inserted/VIDEO.csv: a row per frame with the pose, features, and at the end
               the behaviours, 0 or 1
"""

from __future__ import annotations

import configparser
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from engine.contract import LockstepError, amount
from formats.arrays import text_lines
from formats.cells import number_of
from formats.clock import Clock
from formats.lab import boris
from formats.lab.events import event_table, pairing, raters
from formats.lab.events.columns import FRAMES, VIDEOS, check_named, find_columns
from formats.lab.events.event import Event, overlaps
from formats.lab.events.pairing import ANY_FOLDER, Folders, Named, stem_of
from formats.lab.videos import STAMP
from formats.tables import Table, csv_rows, find_head

BACKGROUND = "background"
SHORT = "--allow-short"
"""The option of the tools for labels beyond the end of a video or a track."""
ROUNDED_S = 1.0  # by which a state may stop late: lengths are rounded
SUFFIX = "_labels.csv"  # of DeepEthogram's files
TARGETS = "targets_inserted"  # SimBA's folder
KINDS = (".csv", ".tsv", ".xlsx")
OTHERS = {".annot", ".eaf", ".anvil", ".mat", ".json", ".npy"}  # Bento, ELAN, Anvil, JAABA, CalMS21
EXPORT = {".ods", ".xls", ".boris", ".gz", ".pkl"}  # unsupported export formats of BORIS
READ = (
    f"events that BORIS exported, DeepEthogram's VIDEO{SUFFIX}, SimBA's "
    "targets_inserted/VIDEO.csv, a table video,start_s,stop_s,label, or a folder of them"
)


@dataclass(frozen=True)
class Labels:
    """The annotations of one video.

    video       file name of the video, possibly without suffix
    media       name of the video in the file, with folders; empty if the file itself is named after
                the video
    folder      subfolder of the file in the folder of labels
    path        the annotation file
    behaviours  B names
    observation  BORIS' observation id; of other files the name of the file
    left_out    other observations of this video, which were not chosen
    remark      how the columns of the file were read, to print once; may be empty
    group       the animal or the cage of the video; empty if the file does not name one
    rest        label of the frames after the last one of `frames`: -1, or 0 for bouts in frames
    unseen      behaviours that other files have and this file of frames lacks: nobody looked
    events      of a file of events; frames outside all events have no behaviour
    frames      (N, B) int8 of a file of frames: 1 is on, 0 is off, -1 is not annotated; None for
                events
    lines       (N,) line of each of these frames, 0 for a frame without a line
    length_s, fps  of the video if a file of events has the values; else 0
    """

    video: str
    path: Path
    behaviours: list[str]
    events: list[Event] = field(default_factory=list)
    frames: np.ndarray | None = None
    lines: np.ndarray | None = None
    length_s: float = 0.0
    fps: float = 0.0
    observation: str = ""
    left_out: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    remark: str = ""
    group: str = ""
    rest: int = -1
    media: str = ""
    folder: str = ""

    @property
    def stem(self) -> str:
        """Return the name of the video without folder and suffix."""
        return stem_of(self.video)

    @property
    def named(self) -> Named:
        return Named(self.media or self.video, self.folder)

    @property
    def where(self) -> str:
        """Return the file, and the line of the first event."""
        line = min((event.line for event in self.events), default=0)
        return f"{self.path}:{line}" if line else str(self.path)

    @property
    def subjects(self) -> list[str]:
        return sorted({event.subject for event in self.events})

    def of(self, subjects: Sequence[str]) -> Labels:
        """Select the events of the named subjects; without names, select all events.

        Raises LockstepError if the file has several subjects and none is named, and for a name that
        the file lacks.
        """
        there = self.subjects
        if (
            subjects
            and (missing := [name for name in subjects if name not in there])
            and self.frames is None
        ):
            todo = f"it has {', '.join(map(repr, there)) or 'no events'}"
            raise LockstepError(f"no events of the subject {missing[0]!r}", str(self.path), todo)
        if not subjects and len(there) > 1:
            what = (
                f"events of {len(there)} subjects in {self.video}: "
                f"{', '.join(name or '(none)' for name in there)}"
            )
            todo = (
                f"choose whose to learn: --subjects {there[-1]}; several, with commas, count as one"
            )
            raise LockstepError(what, str(self.path), todo)
        return replace(
            self, events=[e for e in self.events if not subjects or e.subject in subjects]
        )

    def among(self, behaviours: Iterable[str]) -> Labels:
        """Return the labels with the behaviours of all files, or of a model, as known.

        A file of frames without a column for one of the behaviours does not annotate that
        behaviour. In a file of events, a behaviour without an event is absent.
        """
        if self.frames is None or self.rest == 0:
            return self
        known = {BACKGROUND, *self.behaviours}
        return replace(self, unseen=tuple(sorted({*behaviours, *self.unseen} - known)))

    def within(self, clock: Clock, what: str, allow_short: bool) -> tuple[Labels, str]:
        """Return the labels within a video or a track, and a line on the labels that lie beyond.

        what         name of the video or the track, for messages
        allow_short  leave out labels beyond the end
        The line is empty if no label lies beyond. Raises LockstepError for such a label without
        `allow_short`, and for events of frames without times. A state may stop up to a second late,
        because lengths are rounded.
        """
        if self.frames is None and not clock.fps:
            raise LockstepError(
                f"{what} has no frame rate: its frames have no times",
                str(self.path),
                f"write them: {STAMP}",
            )
        cure = (
            f"give the labels of that very video and its rate, or {SHORT} leaves out what is beyond"
        )
        if self.frames is not None:
            beyond = len(self.frames) - clock.count
            if beyond <= 0:
                return self, ""
            if not allow_short:
                line = f":{self.lines[clock.count]}" if self.lines is not None else ""
                raise LockstepError(
                    f"{len(self.frames)} labelled frames: the label needs frame {clock.count} of "
                    f"{what}, which has {clock.count}",
                    f"{self.path}{line}",
                    cure,
                )
            lines = None if self.lines is None else self.lines[: clock.count]
            kept = replace(self, frames=self.frames[: clock.count], lines=lines)
            return kept, f"{self.path}: {amount(beyond, 'frame')} beyond the end of {what} left out"
        late = [event for event in self.events if _is_beyond(event, clock)]
        if late and not allow_short:
            event = late[0]
            when = f"at {event.start_s:g} s"
            if not _starts_beyond(event, clock):
                when += f" stops at {event.stop_s:g} s"
            raise LockstepError(
                f"{event.behaviour} {when}, {what} ends after {clock.end_s:.2f} s",
                f"{self.path}:{event.line}",
                cure,
            )
        if not late:
            return self, ""
        inside = [event for event in self.events if not _starts_beyond(event, clock)]
        ended = [replace(event, stop_s=min(event.stop_s, clock.end_s)) for event in inside]
        line = f"{self.path}: {amount(len(late), 'event')} beyond the end of {what}"
        cut = len(late) - (len(self.events) - len(inside))
        if cut < len(late):
            line += f", {len(late) - cut} left out"
        if cut:
            line += f", {cut} cut off at the end, {clock.end_s:.2f} s: the part inside stays"
        return replace(self, events=ended), line

    def without_frame(self, clock: Clock, what: str) -> list[str]:
        """Return a line on the events that label no frame: points, and states of less than a frame.

        what  name of the video or the track
        """
        if self.frames is not None:
            return []
        spans = [clock.span(event.start_s, event.stop_s) for event in self.events]
        pairs = zip(self.events, spans, strict=True)
        without = [event for event, span in pairs if span.start >= span.stop]
        if not without:
            return []
        points = sum(event.is_point for event in without)
        first = min(event.line for event in without)
        count = amount(len(without), "event")
        kinds = f"{points} without a duration, {len(without) - points} shorter than a frame"
        return [f"{self.path}:{first}: {count} of {what} label no frame ({kinds})"]

    def per_frame(self, clock: Clock) -> np.ndarray:
        """Return (N, B) int8 of the N frames: 1 is on, 0 is off, -1 is not annotated.

        A state lasts from the frame nearest to its start to the frame before the one nearest to its
        stop. Points have no duration. Labels beyond the last frame are left out, see `within`.
        """
        count = clock.count
        if self.frames is not None:
            inside = self.frames[:count]
            after = (count - len(inside), len(self.behaviours))
            rest = np.full(after, self.rest, dtype=np.int8)
            return np.concatenate([inside, rest])
        found = np.zeros((count, len(self.behaviours)), dtype=np.int8)
        for event in self.events:
            span = clock.span(event.start_s, event.stop_s)
            found[span, self.behaviours.index(event.behaviour)] = 1
        return found

    def names(
        self, clock: Clock, priority: Sequence[str] = (), background: str = BACKGROUND
    ) -> np.ndarray:
        """Return (N,) str, one behaviour for each frame of the clock.

        `background` marks a frame without behaviour; an empty text is not annotated. With `unseen`
        behaviours, a frame without behaviour is not annotated. Of several behaviours, the first in
        `priority` wins. Raises LockstepError if `priority` has none of the behaviours.
        """
        seen = self.per_frame(clock)
        order = [self.behaviours.index(name) for name in priority if name in self.behaviours]
        at_once = (seen == 1).sum(1) > 1
        at_once &= ~(seen[:, order] == 1).any(1)
        if at_once.any():
            frame = int(at_once.argmax())
            both = [name for name, on in zip(self.behaviours, seen[frame] == 1, strict=True) if on]
            line = f":{self.lines[frame]}" if self.lines is not None else ""
            what = f"{' and '.join(both)} at once in frame {frame} of {self.video}"
            what += f" ({at_once.sum()} such frames)"
            todo = f"a frame has one label here: --priority {','.join(both)} takes the first"
            raise LockstepError(what, f"{self.path}{line}", todo)
        names = np.array(["", background, *self.behaviours])
        unknown = (seen == -1).any(1)
        if self.unseen:
            unknown[:] = True
        chosen = np.where(unknown, 0, 1)
        for b in [*(b for b in range(len(self.behaviours)) if b not in order), *reversed(order)]:
            chosen[seen[:, b] == 1] = 2 + b
        return names[chosen]

    def overlapping(
        self, clock: Clock, classes: Sequence[str], background: str = BACKGROUND
    ) -> np.ndarray:
        """Return (N, C) int8 for the behaviours `classes`, which may overlap.

        1 is on, 0 is off, -1 is not annotated. `background` is on if no other behaviour is. A class
        that a file of events lacks is off.
        """
        seen = self.per_frame(clock)
        found = np.full(
            (clock.count, len(classes)), 0 if self.frames is None else -1, dtype=np.int8
        )
        for c, name in enumerate(classes):
            if name in self.behaviours:
                found[:, c] = seen[:, self.behaviours.index(name)]
        if background in classes:
            others = [c for c, name in enumerate(classes) if name != background]
            on, looked = (found[:, others] == 1).any(1), (found[:, others] >= 0).all(1)
            found[:, list(classes).index(background)] = np.where(on, 0, np.where(looked, 1, -1))
        return found


def _starts_beyond(event: Event, clock: Clock) -> bool:
    """Return whether no frame is left of an event, because the video ends before it."""
    if event.is_point:
        return event.start_s > clock.end_s + ROUNDED_S
    return clock.frame_at(event.start_s) >= clock.count


def _is_beyond(event: Event, clock: Clock) -> bool:
    return _starts_beyond(event, clock) or event.stop_s > clock.end_s + ROUNDED_S


def first_of(
    overlapping: np.ndarray, classes: Sequence[str], background: str = BACKGROUND
) -> np.ndarray:
    """Reduce (N, C) of 1, 0 and -1 to (N,) str, one label each, for the split and the counts.

    The label is the first behaviour that is on, else `background`. A row without any annotation
    gives an empty text.
    """
    names = np.array([*classes, background, ""])
    on, unseen = (overlapping == 1).any(1), (overlapping < 0).all(1)
    return names[np.where(on, (overlapping == 1).argmax(1), len(classes) + unseen)]


def read(
    path: Path,
    behaviours: Sequence[str] = (),
    offset: str = "",
    columns: Mapping[str, str] | None = None,
    player: int = 0,
) -> list[Labels]:
    """Return all labels in a file, or in all files of a folder and its subfolders.

    behaviours    columns of SimBA's files with behaviours; by default the project's list
    offset        treatment of BORIS' time offsets, if any: `subtract` or `ignore`
    columns       columns of a table of bouts: {name here: name in the file}
    player        number of BORIS' player whose video counts; 0: the first, with a remark
    A video may have several labels, see `one_of_each_video`. Raises LockstepError with the file,
    and the line if known.
    """
    how = _How(behaviours, offset, columns or {}, player)
    if not path.is_dir():
        of_file = _read_file(path, how)
        return [replace(one, observation=one.observation or path.name) for one in of_file]
    files = sorted(
        each for each in path.rglob("*") if each.suffix.lower() in KINDS and each.is_file()
    )
    # The folder may also contain other tables.
    own = [each for each in files if each.name.endswith(SUFFIX) or each.parent.name == TARGETS]
    labels = []
    for each in own or files:
        name = each.relative_to(path)
        folder = str(name.parent)
        for one in _read_file(each, how):
            observation = one.observation or str(name)
            labels.append(replace(one, observation=observation, folder=folder))
    if not labels:
        raise LockstepError("no labels", str(path), f"give {READ}")
    return labels


class _How(NamedTuple):
    """The options of `read` for one file."""

    behaviours: Sequence[str]
    offset: str
    columns: Mapping[str, str]
    player: int


@dataclass(frozen=True)
class Choice:
    """Which labels belong to a video.

    observations  names or patterns, such as *_anna, that choose among several observations
    folders       how the folders in the names of videos count
    way           how the tool takes one of several videos of one name, for messages
    """

    observations: Sequence[str] = ()
    folders: Folders = Folders.FIT
    way: str = pairing.OF_VIDEOS


class Paired(NamedTuple):
    """Labels and their videos.

    of_video  {video: its labels}
    missing   labels without a video
    notes     lines to print
    """

    of_video: dict[Path, Labels]
    missing: list[Labels]
    notes: list[str]


def pair(
    labels: Sequence[Labels], files: Sequence[Path], root: Path, path: Path, choice: Choice
) -> Paired:
    """Return the labels of each video that has some, in the order of the labels.

    files  videos below the folder `root`, or files of tracks by the name of their video
    path   file or folder of the labels
    Raises LockstepError for labels of a name that several videos have, and for a video with several
    labels of which none is chosen.
    """
    observed = [one.observation for one in labels]
    raters.check_chosen(observed, choice.observations, VIDEOS, str(path))
    of_video: dict[Path, list[Labels]] = {}
    missing = []
    names = [one.named for one in labels]
    pairs = pairing.pair(names, files, root, choice.folders)
    for one, videos in zip(labels, pairs, strict=True):
        if len(videos) > 1:
            what = pairing.several_called(one.video, videos, root)
            todo = pairing.cure_of_several(one.media, videos, root, choice.way)
            raise LockstepError(what, one.where, todo)
        if videos:
            of_video.setdefault(videos[0], []).append(one)
        else:
            missing.append(one)
    chosen = one_of_each_video(of_video, path, choice.observations)
    every = {name for one in (*chosen.values(), *missing) for name in one.behaviours}
    known = {video: one.among(every) for video, one in chosen.items()}
    lines = notes([*known.values()], choice.observations)
    if choice.folders is not Folders.IGNORE:
        lines += _elsewhere(known, root)
    return Paired(known, missing, lines)


def _elsewhere(of_video: Mapping[Path, Labels], root: Path) -> list[str]:
    """Return a line on labels that name a video in other folders than its own."""
    found = []
    for video, one in of_video.items():
        fit = pairing.fit_of(one.named, video, root, Folders.PREFER)
        if pairing.folders_of(one.media) and fit and not fit.folders and not fit.exact:
            found.append(f"labels of {one.media} are used for {video}, in another folder")
    if len(found) > 1:
        return [f"{found[0]} ({len(found)} such videos)"]
    return found


def cure_of_missing(labels: Labels, files: Sequence[Path], root: Path) -> str:
    """Return how to give labels a video, where only the folder in the name excludes it."""
    pairs = pairing.pair([labels.named], files, root, Folders.IGNORE)
    if not pairs[0]:
        return ""
    video = pairs[0][0]
    name = video.relative_to(root)
    todo = f"for {video}, in another folder, write {name} in place of {labels.media}"
    return f"{todo}, or {ANY_FOLDER} takes it"


def one_of_each_video(
    of_video: Mapping[Path, list[Labels]], path: Path, observations: Sequence[str]
) -> dict[Path, Labels]:
    """Return the labels of each video. Of several observations, `observations` chooses one.

    A video with one observation keeps the observation. Raises LockstepError for a video with
    several that are chosen, or with none.
    """
    chosen = {}
    unclear = []
    for video, several in of_video.items():
        one = _one_of(several, observations)
        if one is None:
            unclear.append(several)
        else:
            chosen[video] = one
    if unclear:
        raise _several_observations(unclear, path)
    return chosen


def _one_of(several: list[Labels], observations: Sequence[str]) -> Labels | None:
    """Return the only observation of a video, or the only chosen one; else None."""
    place = raters.choose([one.observation for one in several], observations)
    if place is None:
        return None
    others = [one.observation for n, one in enumerate(several) if n != place]
    return replace(several[place], left_out=tuple(others))


def _several_observations(unclear: list[list[Labels]], path: Path) -> LockstepError:
    """Return the error for videos with several observations, named in full for the first."""
    several = unclear[0]
    first, second = several[:2]
    if first.observation == second.observation:
        return _same_observation(first, second, path)
    where = second.where if second.events else str(path)
    names = [one.observation for one in several]
    examples = [of[0].observation for of in unclear]
    return raters.several_raters(first.video, names, examples, VIDEOS, where)


def _same_observation(first: Labels, second: Labels, path: Path) -> LockstepError:
    """Return the error for a video that one observation has twice."""
    if first.path == second.path:
        what = f"labels of {first.media} and of {second.media} are both of {first.stem} here"
        todo = "write one name for one video; of two videos give both, in folders of these names"
        return LockstepError(what, second.where, todo)
    files = [one.path for one in (first, second)]
    if path.is_dir():
        files = [file.relative_to(path) for file in files]
    what = f"{files[0]} and {files[1]} are both of {first.stem}"
    return LockstepError(what, str(path), f"keep one of the two files: move {files[1]} away")


def notes(labels: Sequence[Labels], observations: Sequence[str] = ()) -> list[str]:
    """Return a line for each choice between observations, and for each column that a file lacks."""
    lines = [*dict.fromkeys(one.remark for one in labels if one.remark)]
    for one in labels:
        chosen = any(raters.is_called(one.observation, name) for name in observations)
        if one.left_out:
            lines.append(
                f"{one.video}: observation {one.observation}; not used: {', '.join(one.left_out)}"
            )
        elif observations and not chosen:
            lines.append(f"{one.video}: observation {one.observation}, the only one")
        if one.unseen:
            lines.append(
                f"{one.path.name} has no column {', '.join(one.unseen)}: nobody looked for that "
                "there, so its frames without a behaviour have no label"
            )
    return lines


def is_labels(path: Path, columns: Mapping[str, str] | None = None) -> bool:
    """Return whether `read` reads the path; otherwise the path is a table of trials."""
    kinds = {".xlsx", *EXPORT, *OTHERS}
    if path.is_dir() or path.suffix in kinds or path.name.endswith(SUFFIX):
        return True
    lines = text_lines(path)
    if _is_bout_table(path, lines, columns or {}):
        return True
    return boris.layout_of(lines) is not None or _is_simba(csv_rows(path, lines)[0])


def _is_bout_table(path: Path, lines: list[str], columns: Mapping[str, str]) -> bool:
    """Return whether a text is a table of bouts whose columns name a unit of time."""
    if boris.layout_of(lines) is not None:
        return False
    table = _table_of(path, lines)
    if table is None:
        return False
    found = find_columns(table.names, columns, VIDEOS)
    return found is not None and event_table.names_unit(table, found)


def _table_of(path: Path, lines: list[str]) -> Table | None:
    """Return the table of a text; None for a text without a line."""
    if not any(map(str.strip, lines)):
        return None
    head = find_head(path, lines)
    return Table(head, [*head.rows(lines)])


def _read_file(path: Path, how: _How) -> list[Labels]:
    if path.name.endswith(SUFFIX):
        return [_deepethogram(path)]
    if path.suffix in EXPORT:
        todo = "in BORIS export events, tabular or aggregated, as CSV, TSV or .xlsx"
        raise LockstepError(f"files of kind {path.suffix!r} are not read", str(path), todo)
    if path.suffix in OTHERS:
        todo = "write a table of its bouts: video,start_s,stop_s,label"
        raise LockstepError(f"files of kind {path.suffix!r} are not read", str(path), todo)
    if path.suffix.lower() != ".xlsx":
        lines = text_lines(path)
        header = csv_rows(path, lines)[0] if boris.layout_of(lines) is None else []
        if _is_simba(header):
            return [_simba(path, lines, header, how.behaviours)]
        if header and BACKGROUND in header:
            return [_deepethogram(path)]
        if header and (bouts := _bouts(path, lines, how.columns)):
            return bouts
        if boris.layout_of(lines) is None:
            raise LockstepError("no file of labels", str(path), f"give {READ}")
    found = []
    for one in boris.read(path, how.offset, how.player):
        names = sorted({event.behaviour for event in one.events})
        of_file = Labels(one.video, path, names, one.events, observation=one.name)
        of_file = replace(of_file, media=one.media, remark=one.note)
        found.append(replace(of_file, length_s=one.length_s, fps=one.fps))
    return found


# ---- a row per bout
# --------------------------------------------------------------------------------------------------


def _bouts(path: Path, lines: list[str], named: Mapping[str, str]) -> list[Labels]:
    """Return the labels of each rater in each video; none for a table without start and stop."""
    table = _table_of(path, lines)
    if table is None:
        return []
    check_named(table.head, named)
    columns = find_columns(table.names, named, VIDEOS)
    if columns is None:
        return []
    bouts = event_table.read(table, columns, VIDEOS)
    labels = []
    for one in bouts.rated:
        events = [event for event in one.events if event.behaviour != BACKGROUND]
        names = sorted({event.behaviour for event in events})
        of_video = Labels(one.video, path, names, events, group=one.group)
        of_video = replace(of_video, observation=one.observation)
        if columns.file:
            of_video = replace(of_video, media=one.video)
        remark = "; ".join([f"{path.name}: bouts {bouts}", *bouts.notes])
        if bouts.unit == FRAMES:
            if empty := sum(event.is_point for event in events):
                remark += f"; {amount(empty, 'bout')} of {one.video} of no frame"
            frames, of_frames = _frames_of_bouts(events, names)
            of_video = replace(of_video, events=[], frames=frames, lines=of_frames, rest=0)
        if number := len(overlaps(events)):
            remark += f"; {number} of {one.video} overlap another of the same behaviour"
        labels.append(replace(of_video, remark=remark))
    return labels


def _frames_of_bouts(events: Sequence[Event], names: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return (N, B) int8 and (N,) lines of bouts whose times are frames, up to the last stop."""
    count = max((int(event.stop_s) for event in events), default=0)
    frames = np.zeros((count, len(names)), dtype=np.int8)
    lines = np.zeros(count, dtype=np.int64)
    for event in events:
        span = slice(int(event.start_s), int(event.stop_s))
        frames[span, names.index(event.behaviour)] = 1
        lines[span] = event.line
    return frames, lines


# ---- a row per frame -----------------------------------------------------------------------------


def _deepethogram(path: Path) -> Labels:
    header, rows = csv_rows(path, text_lines(path))
    names = [name for name in header if name and name not in ("Unnamed: 0", BACKGROUND)]
    if BACKGROUND not in header or not names:
        what = f"the header has {', '.join(header) or 'nothing'}"
        raise LockstepError(
            what, f"{path}:1", f"DeepEthogram's has an index, {BACKGROUND} and the behaviours"
        )
    frames, lines = _frames(path, header, [*rows], names, header[0] in (BACKGROUND, *names))
    return Labels(path.name.removesuffix(SUFFIX), path, names, frames=frames, lines=lines)


def _is_simba(header: list[str]) -> bool:
    return any(
        name.endswith("_x") and {f"{name[:-1]}y", f"{name[:-1]}p"} <= {*header} for name in header
    )


def _simba(path: Path, lines: list[str], header: list[str], behaviours: Sequence[str]) -> Labels:
    named = [*behaviours] or _of_project(path)
    rows = [*csv_rows(path, lines)[1]]
    if not named:  # the last columns with only 0 and 1
        for c in range(len(header) - 1, 0, -1):
            if header[c].endswith(("_x", "_y", "_p")) or not {
                row[c].strip() for _, row in rows
            } <= {
                "0",
                "1",
                "0.0",
                "1.0",
                "0,0",
                "1,0",
            }:
                break
            named.insert(0, header[c])
    if missing := [name for name in named if name not in header]:
        todo = "label the video in SimBA first, or name its columns by --behaviours"
        raise LockstepError(f"no column {missing[0]}", f"{path}:1", todo)
    if not named:
        raise LockstepError(
            "no column of behaviours at the end", f"{path}:1", "name them: --behaviours A,B"
        )
    frames, of = _frames(path, header, rows, named, header[0].endswith("_x"))
    return Labels(path.stem, path, named, frames=frames, lines=of)


def _of_project(path: Path) -> list[str]:
    """Return the behaviours in SimBA's project_config.ini; none without the file."""
    config = configparser.ConfigParser(interpolation=None, strict=False)
    for folder in [*path.absolute().parents][:4]:
        try:
            if config.read(folder / "project_config.ini", encoding="utf-8"):
                return [
                    value
                    for key, value in config["SML settings"].items()
                    if re.fullmatch(r"target_name_\d+", key)
                ]
        except (configparser.Error, KeyError, UnicodeDecodeError):
            todo = "repair it, or name the behaviours by --behaviours"
            raise LockstepError("no project_config.ini of SimBA", str(folder), todo) from None
    return []


def _state(cell: str) -> int:
    """Return 1, 0 or -1 of a cell, also of 1.0 and 1,0; 2 for another number."""
    value = number_of(cell)
    return int(value) if value in (-1, 0, 1) else 2


def _frames(
    path: Path,
    header: list[str],
    rows: list[tuple[int, list[str]]],
    names: list[str],
    counted: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Return (N, B) int8 of the columns `names`, and (N,) lines.

    The first column is the frame number. A missing frame is not annotated. With `counted`, the
    first column is not a frame number, and rows are numbered in order.
    """
    places, found = [header.index(name) for name in names], dict[int, tuple[int, list[int]]]()
    for n, (line, row) in enumerate(rows):
        where = f"{path}:{line}"
        try:
            values = [_state(row[c]) for c in places]
            frame = n if counted else int(number_of(row[0]))
        except (ValueError, IndexError, OverflowError):
            values, frame = [2], 0
        if 2 in values:
            what = f"{names[values.index(2)]} is no 0, 1 or -1, or the first cell no frame"
            raise LockstepError(
                what, where, "give 1 where it was seen, 0 where not, -1 where nobody looked"
            )
        if frame in found or not 0 <= frame < 10**8:
            raise LockstepError(
                f"frame {frame} stands twice, or is none", where, "give each frame one row"
            )
        found[frame] = line, values
    if not found:
        raise LockstepError("no frames", str(path), "give a row for each frame")
    frames = np.full((max(found) + 1, len(names)), -1, dtype=np.int8)
    lines = np.zeros(len(frames), dtype=np.int64)
    for frame, (line, values) in found.items():
        frames[frame], lines[frame] = values, line
    return frames, lines
