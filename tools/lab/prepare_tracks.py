"""Make recordings of tracked body parts, which the har task trains on: DeepLabCut's CSV, SLEAP's
analysis .h5.

    python tools/prepare_tracks.py tracks data/mice.npz --labels events.tsv --fps 30
    python train.py har dataset.root=data/mice.npz dataset.length=32 dataset.stride=8

Each frame has the place of each part in the animal's own frame (its centre is 0, x points to its
front), the likelihood of each, the speed of the centre in pixels per second, and `valid`: 0 where
the animal was not found. A part below --least counts as missing. Gaps of up to --gap frames are
filled with a line; a part that is missing for longer is at its mean place, with likelihood 0. Where
centre or front are missing, all is 0, and there is no label.

--labels is a file or a folder of BORIS, DeepEthogram or SimBA (see tools/prepare_clips.py); a file
belongs to the track of the video of the same name. A frame has one label: `background` where
nothing was seen, none where nobody looked. Without --labels the recordings are for
tools/predict.py. The split is by video, or by the groups of --groups.
"""

from __future__ import annotations

import argparse
import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import LockstepError, amount
from engine.files.atomic import write_atomically
from formats.lab import behaviour, tracks
from formats.lab.behaviour import BACKGROUND, Labels, first_of
from formats.lab.bouts import columns_of
from formats.lab.tracks import Track
from formats.lab.windows import VALID
from tools.arguments import printed, rate, whole_number
from tools.lab.prepare_clips import MULTI, add_labels, groups_of


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
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
        type=rate,
        default=0.0,
        metavar="HZ",
        help="frames per second (default: what BORIS' files say)",
    )
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
        help="the parts whose mean is the body's centre (default: by their names)",
    )
    add(
        "--front", **names, help="the parts to which the body points (default: nose, snout or head)"
    )
    how = (
        "of several: each = a recording of each, with the labels of the subject of its name; "
        "together = all in one"
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
    return parser.parse_args(argv)


def prepare(asked: argparse.Namespace) -> str:
    """Run the command line; returns the text to print. Raises LockstepError."""
    from tqdm import tqdm

    if asked.output.exists() or asked.output.suffix != ".npz":
        raise LockstepError(
            "is there already, or no .npz", str(asked.output), "give a new name that ends in .npz"
        )
    labels = (
        {one.stem: one for one in behaviour.read(asked.labels, asked.behaviours, asked.offset)}
        if asked.labels
        else {}
    )
    groups = groups_of(asked.groups) if asked.groups else {}
    paths = [asked.tracks]
    if asked.tracks.is_dir():
        kinds = (".csv", ".h5", ".slp")
        paths = sorted(path for path in asked.tracks.rglob("*") if path.suffix.lower() in kinds)
        paths = [
            path
            for path in paths
            if path.name[: -len(path.suffix)] not in ("", ".") and not _is_labels(path)
        ]
    if not paths:
        raise LockstepError("no tracks", str(asked.tracks), f"give {tracks.READ}")
    made: list[tuple[np.ndarray, np.ndarray]] = []
    many, classes = (
        list[np.ndarray](),
        [BACKGROUND, *sorted({b for one in labels.values() for b in one.behaviours})],
    )
    recordings = list[str]()
    subjects, channels, rates, notes = list[str](), list[str](), set[float](), list[str]()
    for path in tqdm(paths, unit="file", disable=None):
        found = tracks.read(path)
        label = _labels_of(labels, found[0], asked.labels)
        if asked.groups and found[0].video not in groups:
            raise LockstepError(
                f"no row of {found[0].video}", str(asked.groups), "name the group of each video"
            )
        fps = _fps(asked.fps, label, path)
        for animals, of in _recordings(found, label, asked):
            signal, names, note = _signal(animals, fps, asked)
            if channels and names != channels:
                what = (
                    f"channels {' '.join(names[:6])} ..., the first file has "
                    f"{' '.join(channels[:6])} ..."
                )
                raise LockstepError(
                    what, str(path), "give tracks of the same parts, in the same order"
                )
            channels = names
            if of is not None and asked.multi:
                check_events(of, len(signal), fps)
                many.append(of.overlapping(len(signal), fps, classes))
                many[-1][signal[:, -1] == 0] = -1
                seen = first_of(many[-1], classes)
            else:
                seen = (
                    np.full(len(signal), "") if of is None else _names(of, len(signal), fps, asked)
                )
            made.append((signal, np.where(signal[:, -1] > 0, seen, "")))
            subjects.append(groups[found[0].video]["group"] if groups else found[0].video)
            recordings.append(
                found[0].video + f" {animals[0].animal}" * (len(animals) < len(found))
            )
            notes.append(note)
        rates.add(fps)
    if max(rates) > 1.02 * min(rates):
        what = f"tracks at {min(rates):g} and {max(rates):g} frames/s"
        raise LockstepError(what, str(asked.tracks), "convert each rate to a file of its own")
    return _write(asked, made, subjects, recordings, channels, max(rates), notes, (many, classes))


def _is_labels(path: Path) -> bool:
    """Return whether a file beside tracks is one of labels."""
    return (
        path.suffix.lower() == ".csv"
        and not path.read_bytes()[:6].startswith(b"scorer")
        and behaviour.is_labels(path)
    )


def _labels_of(labels: dict[str, Labels], track: Track, where: Path | None) -> Labels | None:
    if not labels:
        return None
    if track.video not in labels:
        todo = (
            "name the two alike; there are labels of "
            f"{', '.join([*labels][:5])}{', ...' if len(labels) > 5 else ''}"
        )
        raise LockstepError(
            f"no labels of {track.video}, which {track.path.name} tracks", str(where), todo
        )
    return labels[track.video]


def _fps(asked: float, label: Labels | None, path: Path) -> float:
    told = label.fps if label else 0.0
    if asked and told and abs(asked - told) > 0.02 * told:
        what = f"--fps {asked:g}, but {told:g} frames/s were labelled"
        raise LockstepError(what, str(label and label.path), "give the video's own rate")
    if not asked and not told:
        raise LockstepError("the frame rate is not known", str(path), "give it: --fps 30")
    return asked or told


def _recordings(
    found: list[Track], label: Labels | None, asked: argparse.Namespace
) -> list[tuple[list[Track], Labels | None]]:
    """Return the animals of each recording, and its labels."""
    if len(found) == 1 or asked.animals == "together":
        return [(found, label and label.of(asked.subjects))]
    if label is None and asked.animals:
        return [([one], None) for one in found]
    if label is None or not {one.animal for one in found} <= {*label.subjects}:
        seen = (
            f", and labels of {', '.join(map(repr, label.subjects)) or 'no subjects'}"
            if label
            else ""
        )
        what = f"{len(found)} animals, {', '.join(one.animal for one in found)}{seen}"
        todo = "--animals together makes one recording of them"
        todo += "; or name the subjects as the animals" if label else ", --animals each one of each"
        raise LockstepError(what, str(found[0].path), todo)
    return [([one], label.of([one.animal])) for one in found]


def _names(label: Labels, count: int, fps: float, asked: argparse.Namespace) -> np.ndarray:
    """Return (count,) str, the label of each frame. Raises LockstepError for an event beyond the
    end of the track."""
    check_events(label, count, fps)
    return label.names(count, fps, asked.priority)


def check_events(label: Labels, count: int, fps: float) -> None:
    """Raise LockstepError for an event beyond the end of a track of `count` frames."""
    for event in label.events:
        if event.start_s * fps >= count + fps:  # a second beyond: lengths are rounded
            what = (
                f"{event.behaviour} at {event.start_s:g} s, the track ends after "
                f"{count / fps:.2f} s"
            )
            raise LockstepError(
                what,
                f"{label.path}:{event.line}",
                "give the labels and the rate of that very video",
            )


def _signal(
    animals: Sequence[Track], fps: float, asked: argparse.Namespace
) -> tuple[np.ndarray, list[str], str]:
    """Return (N, C) float32, the names of the channels, and a sentence on what was filled and is
    missing."""
    columns: list[np.ndarray] = []
    names: list[str] = []
    count = len(animals[0].xy)
    valid, counts = np.ones(count, dtype=bool), np.zeros(2, dtype=int)
    ready = []
    for one in animals:
        xy, *lost = tracks.filled(one, asked.least, asked.gap)
        centre, front = tracks.axis(one.parts, asked.centre, asked.front, one.path)
        ready.append((one, xy, centre, tracks.frame_of(xy, centre, front)))
        counts += lost
    for one, xy, centre, frame in ready:
        place, prefix = frame.of(xy), f"{one.animal}." if len(animals) > 1 else ""
        valid &= np.isfinite(frame.ahead).all(1)
        sure = np.where(np.isnan(xy[:, :, 0]), 0.0, one.likelihood)
        for p, part in enumerate(one.parts):
            if centre != [p]:  # it is always at 0
                columns += [_at_mean(place[:, p, 0]), _at_mean(place[:, p, 1])]
                names += [f"{prefix}{part}_x", f"{prefix}{part}_y"]
        columns += [*sure.T, np.nan_to_num(frame.speed(fps))]
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
    note += f", no animal in {amount(int((~valid).sum()), 'frame')}" * bool((~valid).any())
    return signal.astype(np.float32), [*names, VALID], note


def _at_mean(values: np.ndarray) -> np.ndarray:
    """(N,) -> the same with the mean where it is NaN; 0 if all are."""
    known = np.isfinite(values)
    return np.where(known, values, values[known].mean() if known.any() else 0.0)


def _write(
    asked: argparse.Namespace,
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
    if asked.labels:
        names = np.concatenate([seen for _, seen in made])
        counts = Counter(names.tolist())
        unseen = counts.pop("", 0)
        classes = sorted(counts)
        if asked.multi:
            every, behaviours = np.concatenate(multi[0]), multi[1]
            classes = [name for c, name in enumerate(behaviours) if (every[:, c] == 1).any()]
            arrays["labels"] = columns_of(every, behaviours, classes)
            counts = Counter(
                {name: int((arrays["labels"][:, c] == 1).sum()) for c, name in enumerate(classes)}
            )
        if len(classes) < 2:
            what = f"all labelled frames are {classes[0]}" if classes else "no frame has a label"
            raise LockstepError(
                what, str(asked.labels), "label more: a network tells classes apart"
            )
        number = {"": -1} | {name: c for c, name in enumerate(classes)}
        arrays |= {
            "classes": np.array(classes),
            "step_label": np.array([number[n] for n in names.tolist()], np.int16),
        }
        shares = ", ".join(f"{name} {counts[name]}" for name in classes)
        lines.append(f"Labelled frames: {shares}" + f"; {unseen} without a label" * bool(unseen))
    if len({*subjects}) < 2 and asked.labels:
        unit = "group" if asked.groups else "video"
        lines.append(
            f"warning: all are of one {unit}; training divides {unit}s, so it needs two or more"
        )
    data = io.BytesIO()
    np.savez(data, **arrays)
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(asked.output, lambda file: file.write(data.getbuffer()))
    size = f"{len(arrays['signal'])} frames x {len(channels)} channels at {fps:g} frames/s"
    lines.append(f"Wrote {amount(len(made), 'recording')}, {size}, to {asked.output}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    asked = parse(argv)
    return printed(lambda: prepare(asked), asked.output)
