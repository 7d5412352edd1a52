"""Convert tracked body parts to an .npz for the har task: CSV or .h5 of DeepLabCut or SLEAP.

    python tools/prepare_tracks.py tracks data/mice.npz --labels events.tsv --fps 30
    python train.py har dataset.root=data/mice.npz dataset.length=32 dataset.stride=8

Each frame has the position of each part in the animal's own frame (the centre of the body is 0, x
points to the front), the likelihood of each part, the speed of the centre in pixels per second, and
`valid`: 0 where the animal was not found. A part with a likelihood below --least is missing. Gaps
of up to --gap frames are filled with a line. A part that is missing for longer is at the mean
position, with likelihood 0. Where centre or front are missing, all channels are 0, and there is no
label.

--labels is a file or a folder of BORIS, DeepEthogram or SimBA, or a table of bouts: video, start_s,
stop_s, label (see tools/prepare_clips.py). A file belongs to the track of the video of the same
name. A frame has one label: `background` where no behaviour was seen, none where nobody looked.
Without --labels the recordings are for tools/predict.py. The split is by video, or by the groups of
--groups.
"""

from __future__ import annotations

import argparse
import io
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import LockstepError, amount
from engine.files.atomic import write_atomically
from formats.arrays import look_alikes
from formats.clock import Clock
from formats.lab import behaviour, tracks
from formats.lab.behaviour import BACKGROUND, Labels, first_of
from formats.lab.bouts import columns_of
from formats.lab.events import pairing
from formats.lab.events.pairing import Folders, Named, stem_of
from formats.lab.poses.track import Track
from formats.lab.videos import STAMP, read_clock
from formats.lab.windows import VALID
from tools.arguments import Parser, add_json, positive_number, printed, whole_number
from tools.lab.prepare_clips import (
    MULTI,
    add_labels,
    choice_of,
    groups_of,
    read_labels,
)
from tools.names import some_names

LENGTH = 32
"""Frames of a window in the printed command."""

ROUNDED_HZ = 0.006
"""Difference of two rates that is rounding: BORIS exports 29.97 for 30000/1001."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        prog="prepare_tracks.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("tracks", type=Path, help=tracks.READ)
    add("output", type=Path, help="the .npz to make; must not exist")
    add("--labels", type=Path, metavar="FILE", help="a file or a folder of labels")
    add(
        "--fps",
        type=positive_number,
        default=0.0,
        metavar="HZ",
        help="frames per second (default: the rate in the files of BORIS, or of --videos)",
    )
    times = (
        "where the tracked videos are: each frame then has its own time, also where a camera has "
        "left out frames"
    )
    add("--videos", type=Path, metavar="FOLDER", help=times)
    add(
        "--least",
        type=float,
        default=0.6,
        metavar="P",
        help="likelihood below which a part is missing (default: 0.6)",
    )
    add(
        "--gap",
        type=whole_number(0),
        default=10,
        metavar="N",
        help="longest gap to fill, in frames (default: 10)",
    )
    names: Any = {"type": lambda text: text.split(","), "default": [], "metavar": "A,B,…"}
    add(
        "--centre",
        **names,
        help="the parts whose mean is the centre of the body (default: by the names of the parts)",
    )
    add(
        "--front", **names, help="the parts at the front of the body (default: nose, snout or head)"
    )
    add(
        "--parts",
        **names,
        help="the parts to take, by name or pattern such as 'tail*' (default: all)",
    )
    which = (
        "a text in the name of the file to take where a video has several: filtered, raw, or the "
        "number of a snapshot (default: an error)"
    )
    add("--prefer", **names, help=which)
    several = (
        "tracks of one name in several folders are of several videos, named with their folders "
        "(default: if the labels name the folders; else an error)"
    )
    add(tracks.BY_FOLDER, action="store_true", help=several)
    how = (
        "with several animals: each = a recording per animal, with the labels of the subject of "
        "the same name; together = one recording of all animals"
    )
    add("--animals", choices=("each", "together"), default="", help=how)
    add("--multi", action="store_true", help=MULTI)
    add(
        "--groups",
        type=Path,
        metavar="CSV",
        help="a table video,group: the animal or the cage of each video",
    )
    add_labels(parser.add_argument_group("of the labels").add_argument)
    add_json(parser)
    return parser.parse_args(argv)


def prepare(options: argparse.Namespace) -> str:
    """Write the .npz. Return the text to print. Raises LockstepError."""
    from tqdm import tqdm

    if options.output.exists() or options.output.suffix != ".npz":
        raise LockstepError(
            "is there already, or no .npz", str(options.output), "give a new name that ends in .npz"
        )
    all_labels = read_labels(options.labels, options) if options.labels else []
    root = options.tracks if options.tracks.is_dir() else options.tracks.parent
    sources, notes = _sources(options, root, all_labels)
    files = [source.like_video for source in sources]
    choice = choice_of(options, pairing.OF_FOLDER)
    if not options.any_folder:
        choice = replace(choice, folders=Folders.PREFER)
    labels: dict[Path, Labels] = {}
    if options.labels:
        paired = behaviour.pair(all_labels, files, root, options.labels, choice)
        labels = paired.of_video
        notes = [f"note: {note}" for note in paired.notes] + notes
    groups = {video: {"group": one.group} for video, one in labels.items() if one.group}
    if options.groups:
        groups = groups_of(options.groups, files, root, choice)
    made: list[tuple[np.ndarray, np.ndarray]] = []
    many, classes = (
        list[np.ndarray](),
        [BACKGROUND, *sorted({b for one in labels.values() for b in one.behaviours})],
    )
    recordings = list[str]()
    subjects, channels, rates = list[str](), list[str](), set[float]()
    for source in tqdm(sources, unit="file", disable=None):
        path, video = source.path, source.like_video
        found = [
            replace(tracks.with_parts(one, options.parts), video=source.video)
            for one in tracks.read(path)
        ]
        label = None
        if options.labels:
            label = _labels_of(labels, source, [one.stem for one in all_labels], options.labels)
        clock, clock_notes = _clock(found[0], label, options)
        notes += clock_notes
        for animals, of in _recordings(found, label, options):
            signal, names, note = _signal(animals, clock, options)
            if channels and names != channels:
                raise LockstepError(
                    (
                        f"channels {' '.join(names[:6])} ..., the first file has "
                        f"{' '.join(channels[:6])} ..."
                    ),
                    str(path),
                    "give tracks of the same parts, in the same order",
                )
            channels = names
            if of is not None:
                of, left_out = of.within(clock, f"the track of {of.video}", options.allow_short)
                notes += [left_out] if left_out else []
                notes += [f"note: {note}" for note in of.without_frame(clock, of.video)]
            rows = _even_rows(clock)
            signal = signal[rows]
            if of is not None and options.multi:
                many.append(of.overlapping(clock, classes)[rows])
                many[-1][signal[:, -1] == 0] = -1
                seen = first_of(many[-1], classes)
            else:
                seen = np.full(len(signal), "")
                if of is not None:
                    seen = of.names(clock, options.priority)[rows]
            made.append((signal, np.where(signal[:, -1] > 0, seen, "")))
            subjects.append(groups[video]["group"] if groups else source.video)
            recording = source.video
            if len(animals) < len(found):
                recording += f" {animals[0].animal}"
            recordings.append(recording)
            notes.append(note)
        rates.add(clock.fps)
    if max(rates) > 1.02 * min(rates):
        raise LockstepError(
            f"tracks at {min(rates):g} and {max(rates):g} frames/s",
            str(options.tracks),
            "convert each rate to a file of its own",
        )
    if max(rates) - min(rates) > ROUNDED_HZ:
        shift_s = 3600 * (1 - min(rates) / max(rates))
        notes.append(
            f"warning: tracks at {min(rates):g} and {max(rates):g} frames/s: the file has "
            f"{max(rates):g}, and seconds of predictions shift by up to {shift_s:.1f} s in an "
            "hour: make a file of each rate"
        )
    return _write(options, made, subjects, recordings, channels, max(rates), notes, (many, classes))


def _sources(
    options: argparse.Namespace, root: Path, labels: Sequence[Labels]
) -> tuple[list[tracks.Source], list[str]]:
    """Return the file of tracks of each video, and lines on the choices. Raises LockstepError."""
    sources = tracks.sources_of(options.tracks)
    if not options.tracks.is_dir():
        return sources, []
    if not sources:
        raise LockstepError("no tracks", str(options.tracks), f"give {tracks.READ}")
    names = [one.named for one in labels]
    by_folder = tracks.names_in_several_folders(sources)
    if not options.by_folder:
        by_folder = tracks.named_by_folder(sources, names, root) & by_folder
    sources, choices = tracks.one_of_each_video(sources, root, options.prefer, by_folder)
    return sources, [f"note: {choice}" for choice in choices]


def _labels_of(
    labels: Mapping[Path, Labels], source: tracks.Source, stems: Sequence[str], where: Path
) -> Labels:
    """Return the labels of a track. Raises LockstepError for a track without labels."""
    if source.like_video not in labels:
        names = some_names(sorted({*stems}), 5)
        what = f"no labels of {source.video}, which {source.path.name} tracks"
        raise LockstepError(what, str(where), f"name the two alike; there are labels of {names}")
    return labels[source.like_video]


def _clock(
    track: Track, label: Labels | None, options: argparse.Namespace
) -> tuple[Clock, list[str]]:
    """Return the times of a track's frames, and lines to print.

    The times come from the video of --videos; else the rate is even. Raises LockstepError for an
    unknown rate, and for a length that the labels contradict.
    """
    count = len(track.xy)
    if options.videos is None:
        fps, notes = _fps(options.fps, label, track.path)
        clock = Clock.even(count, fps)
        return clock, notes + _check_length(clock, label, options.allow_short)
    path = _video_of(track, options.videos)
    clock = read_clock(path)
    fps = options.fps
    if fps and abs(fps - clock.fps) > 0.02 * clock.fps:
        raise LockstepError(
            f"--fps {fps:g}, but {path.name} has {clock.fps:g} frames/s", str(path), "drop --fps"
        )
    if not clock.fps:
        raise LockstepError("its frames have no times", str(path), f"write them: {STAMP}")
    if count > clock.count:
        raise LockstepError(
            f"a track of {count} frames, {path.name} has {clock.count}",
            str(track.path),
            "give the track of that very video",
        )
    notes = [clock.note(path.name)]
    if clock.own_s is not None:
        notes[0] += f"; rows are at even times, {clock.fps:g} a second"
    if count < clock.count:
        notes.append(
            f"{track.path.name}: {count} frames of the {clock.count} of {path.name}: the rest is "
            "not tracked"
        )
    return clock.shortened(count), [note for note in notes if note]


def _even_rows(clock: Clock) -> np.ndarray:
    """Return the frames of a track's rows: all frames, or those nearest to even times."""
    if clock.own_s is None:
        return np.arange(clock.count)
    return clock.samples(clock.fps)


def _video_of(track: Track, folder: Path) -> Path:
    """Return the video of a track. Raises LockstepError unless there is one."""
    name = Named(stem_of(track.video), str(track.path.absolute().parent))
    (found,) = pairing.pair([name], pairing.videos_in(folder), folder)
    if not found:
        what = f"no video called {track.video} in {folder}"
        todo = pairing.cure_of_ending(track.video, folder)
        todo = todo or "give --videos FOLDER, with each tracked video"
        raise LockstepError(what, str(track.path), todo)
    if len(found) > 1:
        what = pairing.several_called(track.video, found, folder)
        todo = "put the track into a folder of the same name as that of its video"
        alone = pairing.cure_of_several("", found, folder, pairing.OF_VIDEOS)
        raise LockstepError(what, str(track.path), f"{todo}, or {alone}")
    return found[0]


def _check_length(clock: Clock, label: Labels | None, allow_short: bool) -> list[str]:
    """Return a line where the frames of a track and the length of the labelled video differ.

    Raises LockstepError for a difference of more than a second without `allow_short`: the camera
    may have left out frames, and then the times of all later frames are wrong.
    """
    if label is None or not label.length_s:
        return []
    expected = round(label.length_s * clock.fps)
    if abs(expected - clock.count) <= 1:
        return []
    what = (
        f"{clock.count} tracked frames, but {label.length_s:g} s at {clock.fps:g} frames/s are "
        f"{expected}"
    )
    if abs(expected - clock.count) <= clock.fps:
        return [f"{label.path}: {label.video}: {what}; the rate counts"]
    if clock.count < expected and allow_short:
        return [f"{label.path}: {label.video}: {what}; the track ends early"]
    cure = "--videos FOLDER takes the times of the frames from the video"
    if clock.count < expected:
        cure += f", or {behaviour.SHORT} if the track ends early"
    raise LockstepError(f"{label.video}: {what}: were frames left out?", str(label.path), cure)


def _fps(given: float, label: Labels | None, path: Path) -> tuple[float, list[str]]:
    """Return the frame rate, and a line where --fps and the file of labels differ slightly.

    The file's rate counts: 30 in place of 29.97 is three seconds in an hour. Raises LockstepError
    for an unknown rate, and for two different rates.
    """
    labelled = label.fps if label else 0.0
    if not given and not labelled:
        raise LockstepError("the frame rate is not known", str(path), "give it: --fps 30")
    if not given or not labelled:
        return given or labelled, []
    where = str(label and label.path)
    if abs(given - labelled) > 0.02 * labelled:
        raise LockstepError(
            f"--fps {given:g}, but {labelled:g} frames/s were labelled",
            where,
            "give the video's own rate",
        )
    if abs(given - labelled) < ROUNDED_HZ:
        return given, []
    return labelled, [f"{where}: {labelled:g} frames/s were labelled, which count, not --fps"]


def _recordings(
    found: list[Track], label: Labels | None, options: argparse.Namespace
) -> list[tuple[list[Track], Labels | None]]:
    """Return the animals and the labels of each recording.

    Raises LockstepError for unclear animals.
    """
    if len(found) == 1 or options.animals == "together":
        return [(found, label and label.of(options.subjects))]
    if label is None and options.animals:
        return [([one], None) for one in found]
    if label is None or not {one.animal for one in found} <= {*label.subjects}:
        what = f"{len(found)} animals, {', '.join([one.animal for one in found])}"
        if label:
            what += f", and labels of {', '.join(map(repr, label.subjects)) or 'no subjects'}"
        todo = "--animals together makes one recording of them"
        todo += "; or name the subjects as the animals" if label else ", --animals each one of each"
        raise LockstepError(what, str(found[0].path), todo)
    return [([one], label.of([one.animal])) for one in found]


def _signal(
    animals: Sequence[Track], clock: Clock, options: argparse.Namespace
) -> tuple[np.ndarray, list[str], str]:
    """Return (N, C) float32, the names of the channels, and a sentence on missing parts."""
    columns: list[np.ndarray] = []
    names: list[str] = []
    count = len(animals[0].xy)
    valid, counts = np.ones(count, dtype=bool), np.zeros(2, dtype=int)
    ready = []
    for one in animals:
        xy, *lost = tracks.filled(one, options.least, options.gap)
        centre, front = tracks.axis(one.parts, options.centre, options.front, one.path)
        ready.append((one, xy, centre, tracks.frame_of(xy, centre, front)))
        counts += lost
    for one, xy, centre, frame in ready:
        place, prefix = frame.of(xy), f"{one.animal}." if len(animals) > 1 else ""
        valid &= np.isfinite(frame.ahead).all(1)
        sure = np.where(np.isnan(xy[:, :, 0]), 0.0, one.likelihood)
        for p, part in enumerate(one.parts):
            if centre != [p]:  # a part that is the centre is always at 0
                columns += [_at_mean(place[:, p, 0]), _at_mean(place[:, p, 1])]
                names += [f"{prefix}{part}_x", f"{prefix}{part}_y"]
        columns += [*sure.T, np.nan_to_num(frame.speed(clock))]
        names += [*(f"{prefix}{part}_likelihood" for part in one.parts), f"{prefix}speed"]
        for other, _, _, theirs in ready:
            if other is not one:
                columns += [_at_mean(each) for each in frame.of(theirs.centre[:, None])[:, 0].T]
                names += [f"{prefix}to_{other.animal}_x", f"{prefix}to_{other.animal}_y"]
    signal = np.stack([*columns, valid], 1) * valid[:, None]
    share = 100 * counts / (count * sum(len(one.parts) for one in animals))
    of_all = " and ".join(one.animal for one in animals)
    who = f"{animals[0].video} {of_all}" if animals[0].animal else f"{animals[0].video}{of_all}"
    note = f"{who}: {count} frames, {share[0]:.1f}% of the parts filled, {share[1]:.1f}% missing"
    if animals[0].unique:
        note += f", of no animal: {', '.join(animals[0].unique)}"
    if not valid.all():
        note += f", no animal in {amount(int((~valid).sum()), 'frame')}"
    return signal.astype(np.float32), [*names, VALID], note


def _at_mean(values: np.ndarray) -> np.ndarray:
    """Return (N,) values with NaN replaced by the mean; 0 if all are NaN."""
    known = np.isfinite(values)
    return np.where(known, values, values[known].mean() if known.any() else 0.0)


def _write(
    options: argparse.Namespace,
    made: list[tuple[np.ndarray, np.ndarray]],
    subjects: list[str],
    recordings: list[str],
    channels: list[str],
    fps: float,
    notes: list[str],
    multi: tuple[list[np.ndarray], list[str]],
) -> str:
    arrays: dict[str, Any] = {"signal": np.concatenate([signal for signal, _ in made])}
    arrays |= {
        "lengths": np.array([len(signal) for signal, _ in made]),
        "subject": np.array(subjects),
    }
    arrays |= {"channels": np.array(channels), "rate_hz": np.array(fps), "axes": np.array(0)}
    arrays["recording"] = np.array(recordings)
    lines = notes
    if options.labels:
        names = np.concatenate([seen for _, seen in made])
        counts = Counter(names.tolist())
        unseen = counts.pop("", 0)
        classes = sorted(counts)
        if options.multi:
            every, behaviours = np.concatenate(multi[0]), multi[1]
            classes = [name for c, name in enumerate(behaviours) if (every[:, c] == 1).any()]
            arrays["labels"] = columns_of(every, behaviours, classes)
            counts = Counter(
                {name: int((arrays["labels"][:, c] == 1).sum()) for c, name in enumerate(classes)}
            )
        if len(classes) < 2:
            raise LockstepError(
                f"all labelled frames are {classes[0]}" if classes else "no frame has a label",
                str(options.labels),
                "label more: a network distinguishes classes",
            )
        number = {"": -1} | {name: c for c, name in enumerate(classes)}
        arrays |= {
            "classes": np.array(classes),
            "step_label": np.array([number[n] for n in names.tolist()], np.int16),
        }
        shares = ", ".join(f"{name} {counts[name]}" for name in classes)
        lines += [f"warning: {warning}" for warning in look_alikes(counts)]
        if unseen:
            shares += f"; {unseen} without a label"
        lines.append(f"Labelled frames: {shares}")
    if len({*subjects}) < 2 and options.labels:
        unit = "group" if options.groups else "video"
        lines.append(
            f"warning: all are of one {unit}; training divides {unit}s, so it needs two or more"
        )
    data = io.BytesIO()
    np.savez(data, **arrays)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(options.output, lambda file: file.write(data.getbuffer()))
    size = f"{len(arrays['signal'])} frames x {len(channels)} channels at {fps:g} frames/s"
    lines.append(f"Wrote {amount(len(made), 'recording')}, {size}, to {options.output}")
    shortest = min(len(signal) for signal, _ in made)
    return "\n".join([*lines, _next_of(options, shortest)])


def _next_of(options: argparse.Namespace, shortest: int) -> str:
    """Return the command that trains on the recordings, or predicts them without labels.

    shortest  frames of the shortest recording; windows are no longer
    """
    data = shlex.quote(str(options.output))
    if not options.labels:
        return f"python tools/predict.py RUN {data}"
    length = min(LENGTH, shortest)
    command = f"python train.py har dataset.root={data} dataset.length={length}"
    command += f" dataset.stride={max(1, length // 4)}"
    if options.multi:
        command += " loss.kind=binary"
    return command


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    return printed(lambda: prepare(options), options.output, options.json)
