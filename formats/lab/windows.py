"""Read sensor recordings in four layouts and cut the recordings into windows.

    UCI HAR folder   {train,test}/Inertial Signals/*.txt, y_*.txt, subject_*.txt,
                     activity_labels.txt
    .ts              NAME_TRAIN.ts and NAME_TEST.ts of the UEA archive, or a single .ts file
    arrays           X.npy (N, T, C), y.npy (N,), subject.npy, with optional _train/_test suffixes;
                     or a single .npz with these arrays
    recordings       an .npz: signal (sum of lengths, C), lengths (R,), label (R,) or step_label
                     (sum of lengths,), and subject (R,) if known

A step_label is text or a number. An empty text or -1 means that the step is unlabelled. A window
has the label of its centre step, length // 2. A window with an unlabelled centre is left out. If
the last channel is named `valid`, the channel is a mask: 1 marks a measured step, 0 marks padding.

UCI HAR folders, arrays and .ts files of equal lengths already hold windows. Each window is used
unchanged. The remaining inputs hold recordings of any length. Windows of `length` steps start every
`stride` steps. The split is by person, not by window, because windows of the same person are near
copies of each other.
"""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.contract import Batch, LockstepError
from formats.arrays import load_npy, load_npz, map_npy, renumber, text_lines
from formats.ids import equal_ids
from formats.lab.bouts import columns_of, one_hot
from formats.preparation import cure_for
from formats.tables import NumberLines, read_numbers

LAYOUTS = "a UCI HAR folder, NAME_TRAIN.ts + NAME_TEST.ts, X.npy + y.npy, or one .npz"
FIELDS = (
    "give signal, lengths, label or step_label and, where known, subject: "
    "docs/your-own-data.md lists the fields"
)
VALID = "valid"
LENGTH = 128
"""Steps of a window, unless the user gives another number."""
FILL = "fill in missing values first, or leave that part out"


@dataclass(frozen=True)
class Recordings:
    """R labelled recordings, concatenated in one array, and the settings of the windows.

    signal    (sum of lengths, C) float32, stored channel by channel. A window is then C runs of T
              steps, and gathering is four times as fast.
    lengths   (R,) int64, steps of each recording; at least `length` steps each
    labels    (R,) int64, index into `classes`; all 0 if `step_labels` is set
    groups    (R,) int64, index into `subjects`, or the recording's own number without subjects
    val       (R,) bool, the validation split of the dataset, or None
    subjects  names; empty if unknown
    length, stride  of a window, in steps
    rate_hz   steps per second, or None
    step_labels  (sum of lengths,) int32, index into `classes` or -1; or None
    axes      3 if each group of three channels may be the axes of one sensor, which an augmentation
              rotates; else 0
    names     of the recordings, for example of their videos; empty if unknown
    multi     (sum of lengths, C) int8 labels that may overlap: 1 is on, 0 is off, -1 is not
              annotated; or None
    """

    signal: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray
    groups: np.ndarray
    val: np.ndarray | None
    classes: list[str]
    subjects: list[str]
    length: int
    stride: int
    where: str
    channels: list[str] = field(default_factory=list)
    rate_hz: float | None = None
    step_labels: np.ndarray | None = None
    axes: int = 3
    names: list[str] = field(default_factory=list)
    multi: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def masked(self) -> bool:
        """Return whether the last channel marks the measured steps."""
        return self.channels[-1:] == [VALID]

    def windows(self) -> np.ndarray:
        """Return (R,) int64, the number of windows of each recording, labelled or not.

        Leftover steps at the end of a recording are unused.
        """
        return (self.lengths - self.length) // self.stride + 1


class Windows:
    """The labelled windows of some recordings as a dataset.

    A batch is `{"x": (B, C, T) float32, "y": (B,) int64}`.

    labels     (N,) int64, one per window
    starts     (N,) int64, first row of each window in `signal`
    recording  (N,) int64, recording of each window
    step       (N,) int64, first step of each window within the recording
    sources    (N,) str, subject of each window, or the recording's number without subjects
    """

    def __init__(self, recordings: Recordings, chosen: np.ndarray):
        """Select the windows of the chosen recordings, (R,) bool.

        Windows are views of the shared signal. The signal is never copied.
        """
        counts = np.where(chosen, recordings.windows(), 0)
        owner = np.repeat(np.arange(len(recordings)), counts)  # (N,) recording of each window
        # number of each window within the recording
        nth = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        step = nth * recordings.stride
        starts = (np.cumsum(recordings.lengths) - recordings.lengths)[owner] + step
        labels = recordings.labels[owner]
        if recordings.step_labels is not None:
            labels = recordings.step_labels[starts + recordings.length // 2].astype(np.int64)
            owner, step, starts, labels = (
                each[labels >= 0] for each in (owner, step, starts, labels)
            )
        centre = starts + recordings.length // 2
        self.multi = None if recordings.multi is None else recordings.multi[centre]
        self._classes = len(recordings.classes)
        self.recording, self.step, self.labels, self.starts = (
            owner,
            step,
            labels,
            torch.from_numpy(starts),
        )
        names = recordings.subjects or [str(n) for n in range(len(recordings))]
        self.sources = np.array(names)[recordings.groups[owner]]
        self.length, self.masked = recordings.length, recordings.masked
        self.signal = torch.from_numpy(recordings.signal)
        self._y = torch.from_numpy(self.labels)
        self._texts = {
            "names of channels": np.array(recordings.channels),
            "names of classes": np.array(recordings.classes),
            "rate": np.array([str(recordings.rate_hz)]),
        }

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def held(self) -> dict[str, Any]:
        """Return the arrays that decide the windows, for the data's fingerprint."""
        return {"signal": self.signal, "first steps": self.starts} | self._texts

    @property
    def overlapping(self) -> bool:
        """Return whether a window may have several labels."""
        return self.multi is not None

    @property
    def targets(self) -> np.ndarray:
        """Return the (N,) labels, or (N, C) int8 labels after `one_hot`."""
        return self._y.numpy()

    def one_hot(self) -> None:
        """Switch `y` to (B, C) int8 labels: 1 is on, 0 is off, -1 is not annotated."""
        found = one_hot(self.labels, self._classes) if self.multi is None else self.multi
        self._y = torch.from_numpy(np.ascontiguousarray(found))

    def __getitems__(self, indices: list[int]) -> Batch:
        # An array takes a third of torch's time for a list.
        chosen = torch.from_numpy(np.asarray(indices, np.int64))
        every = self.signal.unfold(0, self.length, 1)  # (steps - T + 1, C, T), a view
        return {"x": every.index_select(0, self.starts[chosen]), "y": self._y[chosen]}

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[0] for name, values in self.__getitems__([index]).items()}

    def statistics(self, kept: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        """Return the (C,) mean and the (C,) standard deviation over the measured steps.

        Each step that a window covers counts once. `kept`, (N,) bool, selects windows; None selects
        all. The channel `valid` has mean 0 and deviation 1.
        """
        covered = torch.zeros(len(self.signal) + 1, dtype=torch.int64)
        starts = self.starts if kept is None else self.starts[torch.from_numpy(kept)]
        covered.index_add_(0, starts, torch.ones_like(starts))
        covered.index_add_(0, starts + self.length, -torch.ones_like(starts))
        seen = covered.cumsum(0)[:-1] > 0
        rows = (seen & (self.signal[:, -1] > 0) if self.masked else seen).nonzero().squeeze(1)
        # One channel at a time uses less memory.
        spread = [
            torch.std_mean(channel.index_select(0, rows).double(), correction=0)
            for channel in self.signal.T
        ]
        std, mean = (torch.stack(values) for values in zip(*spread, strict=True))
        if self.masked:
            mean[-1], std[-1] = 0, 1
        # The channel of a dead sensor has no spread. The channel is shifted to zero, not scaled.
        return mean.float(), torch.where(std > 1e-6 * mean.abs().clamp(min=1e-6), std, 1.0).float()


# --------------------------------------------------------------------------------------------------
# reading


def read(
    root: str | Path,
    length: int = LENGTH,
    stride: int = 64,
    labelled: bool = True,
    options: Sequence[str] = (),
) -> Recordings:
    """Detect the layout under `root` (a folder or a file, see the module) and read the recordings.

    length, stride  in steps; only recordings are cut, published windows are used unchanged
    labelled        False permits missing labels and sets all labels to 0; not for UCI HAR, where
                    labels are required
    options         of tools/prepare_windows.py, for the command in the message of a table
    Raises LockstepError with the file, and the line if known.
    """
    if length < 1 or stride < 1:
        raise LockstepError(
            f"length {length} and stride {stride} must be at least 1", "dataset", "raise them"
        )
    path = Path(os.path.expanduser(root))
    try:
        found = _recognise(path, length, stride, labelled)
        if found is None:
            raise _unknown(path, labelled, options)
        return found
    except OSError as error:  # no permission, or a name that is too long
        what = f"cannot read: {error.strerror or error}"
        raise LockstepError(
            what, str(error.filename or root), "give a path that you may read"
        ) from None


def renumbered(recordings: Recordings, classes: list[str]) -> Recordings:
    """Return the recordings with labels that index the `classes` of a model.

    Raises LockstepError if `classes` lacks a class of the recordings.
    """
    names, where, steps = recordings.classes, recordings.where, recordings.step_labels
    if steps is None:
        return replace(
            recordings, labels=renumber(recordings.labels, names, classes, where), classes=classes
        )
    present = np.flatnonzero(np.bincount(steps + 1, minlength=len(names) + 1)[1:])
    table = np.full(len(names) + 1, -1, np.int32)  # index -1 reads the last entry
    table[present] = renumber(present, names, classes, where)
    multi = (
        recordings.multi
        if recordings.multi is None
        else columns_of(recordings.multi, names, classes)
    )
    return replace(recordings, step_labels=table[steps], classes=classes, multi=multi)


def check_alike(
    new: Recordings, length: int, channels: int, names: list[str], rate_hz: float | None
) -> None:
    """Raise LockstepError if `new` differs from a model's training data.

    Only fields of Recordings that are known on both sides are compared.
    """
    found = new.signal.shape[1]
    todo = "give the same sensors in the same order"
    if names and {*names} <= {*new.channels}:
        options = shlex.join(preparation_options(length, names, rate_hz))
        todo = f"prepare the data with tools/prepare_windows.py {options}"
    if found != channels or (names and new.channels and names != new.channels):
        here, there = (
            f"{found} channels {' '.join(new.channels)}",
            f"{channels} channels {' '.join(names)}",
        )
        what = f"{here.strip()}, the model was trained on {there.strip()}"
    elif new.length != length:
        what = f"windows of {new.length} steps, the model was trained on {length}"
    elif new.rate_hz and rate_hz and abs(new.rate_hz - rate_hz) > 0.01 * rate_hz:
        what = f"recorded at {new.rate_hz:g} Hz, the model was trained at {rate_hz:g} Hz"
        todo = f"prepare the recordings again, with --rate {rate_hz:g} for prepare_windows.py"
    else:
        return
    raise LockstepError(what, new.where, todo)


def preparation_options(length: int, channels: Sequence[str], rate_hz: float | None) -> list[str]:
    """Return the options of tools/prepare_windows.py for data as those of a training.

    length    steps of a window
    channels  names, in order; empty if unknown
    """
    options = []
    if rate_hz:
        options += ["--rate", f"{rate_hz:g}"]
    if length != LENGTH:
        options += ["--length", str(length)]
    measured = [name for name in channels if name != VALID]
    if measured and not any("," in name for name in measured):
        options += ["--channels", ",".join(measured)]
    if VALID in channels:
        options.append("--pad")
    return options


def _unknown(path: Path, labelled: bool, options: Sequence[str]) -> LockstepError:
    """Return the error of a file or folder in no layout of the module."""
    what = "no sensor data found" if path.is_dir() else f"cannot read files of kind {path.suffix!r}"
    todo = cure_for(path, options, labelled) or f"give {LAYOUTS}"
    return LockstepError(what, str(path), todo)


def _recognise(root: Path, length: int, stride: int, labelled: bool) -> Recordings | None:
    """Return the recordings; None for data in no layout of the module."""
    if root.is_file():
        return _read_file(root, length, stride, labelled)
    if not root.is_dir():
        raise LockstepError("no such file or folder", str(root), f"give {LAYOUTS}")
    for folder in (root, root / "UCI HAR Dataset"):
        if (folder / "train" / "Inertial Signals").is_dir():
            return _read_uci(folder)
    if ts := sorted(root.glob("*.ts")):
        one = _one(root, [path for path in ts if not path.stem.endswith("_TEST")], ".ts")
        return _read_ts(one, length, stride, labelled)
    if (root / "X.npy").is_file() or (root / "X_train.npy").is_file():
        return _read_npy(root, labelled)
    if archives := sorted(root.glob("*.npz")):
        return _read_file(_one(root, archives, ".npz"), length, stride, labelled)
    return None


def _one(root: Path, paths: list[Path], kind: str) -> Path:
    if len(paths) != 1:
        names = ", ".join(path.name for path in paths) or "only _TEST"
        raise LockstepError(
            f"{len(paths)} data sets of kind {kind}: {names}", str(root), "name one file"
        )
    return paths[0]


def _read_file(path: Path, length: int, stride: int, labelled: bool) -> Recordings | None:
    if path.suffix == ".ts":
        return _read_ts(path, length, stride, labelled)
    if path.suffix != ".npz":
        return None
    arrays = load_npz(path) if labelled else _without_labels(load_npz(path))
    if "signal" in arrays:
        return _from_recordings(arrays, path, length, stride)
    if "X" in arrays:
        return _from_windows([arrays], path, None)
    found = ", ".join(arrays) or "nothing"
    raise LockstepError(f"holds neither 'signal' nor 'X' but {found}", str(path), FIELDS)


def _without_labels(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    kept = {
        name: value
        for name, value in arrays.items()
        if name not in ("classes", "val", "step_label", "labels")
    }
    for of, name in (("X", "y"), ("lengths", "label")):
        if of in kept:
            kept[name] = np.zeros(kept[of].shape[:1], dtype=np.int64)
    return kept


def _read_uci(root: Path) -> Recordings:
    names = [f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"]
    labels_path = root / "activity_labels.txt"
    pairs = [line.split(None, 1) for line in text_lines(labels_path) if line.strip()]
    if [pair[0] for pair in pairs] != [str(n) for n in range(1, len(pairs) + 1)] or any(
        len(p) != 2 for p in pairs
    ):
        what = "expected one '1 NAME' per line, numbered from 1"
        raise LockstepError(what, str(labels_path), "take the file as it is published")
    classes = [name.strip() for _, name in pairs]
    parts = []
    for part in ("train", "test"):
        folder = root / part / "Inertial Signals"
        axes = [read_numbers(folder / f"{name}_{part}.txt").values for name in names]
        for name, axis in zip(names, axes, strict=True):
            if axis.shape != axes[0].shape:
                what = "{} windows of {} steps, but {} has {} of {}".format(
                    *axis.shape, names[0], *axes[0].shape
                )
                raise LockstepError(
                    what, str(folder / f"{name}_{part}.txt"), "take the files as they are published"
                )
        y_path = root / part / f"y_{part}.txt"
        column = _column(y_path)
        y = column.values[:, 0].astype(np.int64)
        for row in np.flatnonzero((y < 1) | (y > len(classes))).tolist():
            what, where = f"label {y[row]} is not in {labels_path.name}", column.lines[row]
            todo = f"labels go from 1 to {len(classes)}"
            raise LockstepError(what, f"{y_path}:{where}", todo)
        column = _column(root / part / f"subject_{part}.txt")
        subject = column.values[:, 0].astype(np.int64)
        shared = {
            "classes": np.array(classes),
            "channels": np.array(names),
            "rate_hz": np.array(50.0),
        }
        parts.append({"X": np.stack(axes, 2), "y": y - 1, "subject": subject, **shared})
    return _from_windows(parts, root, ["train", "test"])


def _read_npy(root: Path, labelled: bool) -> Recordings:
    suffixes = [""] if (root / "X.npy").is_file() else ["_train", "_test"]
    parts = []
    for suffix in suffixes:
        part = {}
        if labelled:
            part["y"] = load_npy(root / f"y{suffix}.npy")
        subjects = root / f"subject{suffix}.npy"
        if subjects.is_file():
            part["subject"] = load_npy(subjects)
        part["X"] = np.asarray(map_npy(root / f"X{suffix}.npy"))  # copied later
        parts.append(part if labelled else _without_labels(part))
    return _from_windows(
        parts, root, [suffix.strip("_") for suffix in suffixes] if len(parts) > 1 else None
    )


def _read_ts(path: Path, length: int, stride: int, labelled: bool) -> Recordings:
    """Read a .ts file. With a _TRAIN.ts, the _TEST.ts becomes the predefined validation split."""
    paths = [path]
    if path.stem.endswith("_TRAIN") or path.stem.endswith("_TEST"):
        name = path.stem.rsplit("_", 1)[0]
        paths = [path.with_name(f"{name}_{part}.ts") for part in ("TRAIN", "TEST")]
    parts = [parse_ts(p, labelled) for p in paths]
    train, *others = parts
    for _, _, classes, _ in others:
        if classes != train[2]:
            what = f"classes {' '.join(classes)} differ from those of {paths[0].name}"
            raise LockstepError(what, str(paths[1]), "give both files the same @classLabel")
    series = [one for part in parts for one in part[0]]
    if len({one.shape[1] for one in series}) > 1:
        what = "train and test have different numbers of channels"
        raise LockstepError(what, str(path), "give both the same channels")
    lengths = np.array([len(one) for one in series], dtype=np.int64)
    if len({*lengths.tolist()}) == 1:
        length = stride = int(lengths[0])  # the file already holds windows
    arrays = {
        "label": np.array([label for part in parts for label in part[1]]),
        "classes": np.array(train[2]),
    }
    if others:
        arrays["val"] = np.arange(len(series)) >= len(train[0])
    return _recordings(series, lengths, arrays, length, stride, str(path))


TsPart = tuple[list[np.ndarray], list[int], list[str], list[int]]


def parse_ts(path: Path, labelled: bool, missing: bool = False) -> TsPart:
    """Return (recordings, each (T, C) float32; labels; classes; lines).

    Each line of the file is one recording: channel:channel:…:label.

    missing  permit missing values, `?` or NaN, and read them as NaN
    """
    header: dict[str, list[str]] = {}
    series: list[np.ndarray] = []
    labels: list[int] = []
    classes: list[str] = []
    lines: list[int] = []
    for number, line in enumerate(text_lines(path), 1):
        line, where = line.strip(), f"{path}:{number}"
        if not line or line.startswith(("#", "%")):
            continue
        if line.startswith("@"):
            key, *values = line[1:].split() or [""]
            header[key.lower()] = values
            if key.lower() == "data":
                has_labels = labelled or _flag(header, "classlabel") != "false"
                classes = _ts_classes(header, where) if has_labels else [""]
            continue
        if "data" not in header:
            raise LockstepError("a recording before @data", where, "write a line @data above it")
        *channels, label = line.split(":") if has_labels else [*line.split(":"), ""]
        if label.strip() not in classes:
            what = f"label {label.strip()!r} is not in @classLabel"
            raise LockstepError(what, where, f"choose one of {' '.join(classes)}, or add it there")
        series.append(_ts_series(channels, header, where, missing))
        if series[-1].shape[1] != series[0].shape[1]:
            what = f"{len(channels)} channels, the first recording has {series[0].shape[1]}"
            raise LockstepError(what, where, "give each recording the same channels")
        labels.append(classes.index(label.strip()))
        lines.append(number)
    if not series:
        raise LockstepError("no recordings after @data", str(path), "write one a line")
    return series, labels, classes, lines


def _flag(header: dict[str, list[str]], key: str) -> str:
    """Return the first word of a header's line, `true` or `false`; empty without the line."""
    return (header.get(key) or [""])[0].lower()


def _ts_classes(header: dict[str, list[str]], where: str) -> list[str]:
    if _flag(header, "timestamps") == "true":
        raise LockstepError("@timeStamps true is not supported", where, "resample to an even rate")
    if _flag(header, "targetlabel") == "true":
        what = "its labels are numbers to predict (@targetLabel), and har distinguishes classes"
        raise LockstepError(
            what, where, "write a task that learns numbers: examples/own_task.py is one"
        )
    if _flag(header, "classlabel") != "true" or not (classes := header["classlabel"][1:]):
        raise LockstepError(
            "no '@classLabel true NAME NAME ...' in the header", where, "add that line"
        )
    return classes


def _ts_series(
    channels: list[str], header: dict[str, list[str]], where: str, missing: bool
) -> np.ndarray:
    """Convert the channels of a line to (T, C) float32.

    Raises LockstepError if the header's @dimensions or @seriesLength differ.
    """

    def compare(count: int, unit: str, key: str) -> None:
        stated = header.get(key.lower(), [str(count)])
        if stated != [str(count)]:
            what = f"{count} {unit}, @{key} is {' '.join(stated)}"
            raise LockstepError(what, where, "fix the header or the line")

    compare(len(channels), "channels", "dimensions")
    if not channels:
        raise LockstepError("no ':' between values and label", where, "write channel:channel:label")
    rows = [
        (channel.replace("?", "nan") if missing else channel).split(",") for channel in channels
    ]
    sizes = sorted({len(row) for row in rows})
    if len(sizes) != 1:
        what = f"channels of different lengths ({sizes[0]} and {sizes[-1]})"
        raise LockstepError(what, where, "give all channels the same steps")
    if _flag(header, "equallength") != "false":
        compare(sizes[0], "steps", "seriesLength")
    try:
        # A value too large for float32 becomes infinite and is rejected later.
        with np.errstate(over="ignore"):
            values = np.array(rows, dtype=np.float32).T
    except ValueError as error:
        raise LockstepError(f"not a number: {error}", where, FILL) from None
    if not (np.isfinite(values) | (missing & np.isnan(values))).all():
        raise LockstepError("a value is NaN or infinite", where, FILL)
    return np.ascontiguousarray(values)


# ---------------------------------------------------------------------------- arrays to recordings


def _from_windows(
    parts: list[dict[str, np.ndarray]], path: Path, names: list[str] | None
) -> Recordings:
    """Join training and validation, or convert a single part.

    Each part has X (N, T, C), y (N,) and the arrays that `_recordings` reads.
    """
    train, where = parts[0], str(path)
    for number, part in enumerate(parts):
        here = f"{path}, {names[number]}" if names else where
        if "y" not in part:
            raise LockstepError("X has no labels y", here, "add y (windows,)")
        _check_numbers(part, "X", "windows, steps, channels", here)
        _check_sizes(part, ("y", "subject", "val"), "X", "window", here)
        # Check each part before joining, because messages number windows within their file.
        count, steps, width = part["X"].shape
        _check_finite(part["X"].reshape(-1, width), np.full(count, steps), "window", here)
        if part["X"].shape[1:] != train["X"].shape[1:] or part.keys() != train.keys():
            what = "train and test differ in window length, channels or files"
            raise LockstepError(what, where, "give both the same")
    read = [name for name in ("y", "subject", "val") if name in train]
    arrays = train | {name: np.concatenate([part[name] for part in parts]) for name in read}
    arrays["label"] = arrays["y"]
    if names:
        arrays["val"] = np.arange(len(arrays["y"])) >= len(train["y"])
    steps, width = train["X"].shape[1:]
    lengths = np.full(len(arrays["y"]), steps, dtype=np.int64)
    return _recordings(
        [part["X"].reshape(-1, width) for part in parts], lengths, arrays, steps, steps, where
    )


def _from_recordings(
    arrays: dict[str, np.ndarray], path: Path, length: int, stride: int
) -> Recordings:
    where = str(path)
    for name in ("signal", "lengths", *(["label"] if "step_label" not in arrays else [])):
        if name not in arrays:
            raise LockstepError(f"no array {name!r}", where, FIELDS)
    signal, lengths = arrays["signal"], arrays["lengths"]
    _check_numbers(arrays, "signal", "steps, channels", where)
    if (
        lengths.ndim != 1
        or lengths.dtype.kind not in "iu"
        or ((lengths < 1) | (lengths > len(signal))).any()
    ):
        what = (
            f"lengths are {lengths.dtype} of shape {lengths.shape}, or not all from 1 to the "
            f"{len(signal)} of signal"
        )
        raise LockstepError(what, where, "give the steps of each recording, as whole numbers")
    if lengths.sum() != len(signal):
        what = f"lengths add up to {lengths.sum()} steps, signal has {len(signal)}"
        raise LockstepError(what, where, "give the steps of each recording, in the order of signal")
    _check_sizes(arrays, ("label", "subject", "val"), "lengths", "recording", where)
    _check_sizes(arrays, ("step_label",), "signal", "step", where)
    _check_finite(signal, lengths, "recording", where)
    return _recordings([signal], lengths.astype(np.int64), arrays, length, stride, where)


def _recordings(
    signal: list[np.ndarray],
    lengths: np.ndarray,
    arrays: dict[str, np.ndarray],
    length: int,
    stride: int,
    where: str,
) -> Recordings:
    """Read the arrays that all layouts share.

    The arrays are label or step_label, and optionally subject, val, classes, channels and rate_hz.
    """
    by_step = "step_label" in arrays
    labels, classes = _classes(arrays["step_label" if by_step else "label"], arrays, where, by_step)
    steps, labels = (
        (labels.astype(np.int32), np.zeros(len(lengths), np.int64)) if by_step else (None, labels)
    )
    groups, subjects = _groups(arrays.get("subject"), len(lengths), where)
    val, channels, rate_hz = (
        _given_split(arrays, where),
        _strings(arrays, "channels", where),
        _rate(arrays, where),
    )
    short = np.flatnonzero(lengths < length)
    if len(short):
        least = int(lengths.min())
        what = f"recording {short[0]} has {lengths[short[0]]} steps, a window {length}"
        cut = f"dataset.length={least} dataset.stride={max(1, least // 2)} cuts each into windows"
        raise LockstepError(
            what, where, f"{cut}; or leave such recordings out, or pad all to one length"
        )
    if channels and len(channels) != signal[0].shape[1]:
        what = f"{len(channels)} channel names for {signal[0].shape[1]} channels"
        raise LockstepError(what, where, "name each channel once, or none")
    if twice := [name for c, name in enumerate(classes) if name in classes[:c]]:
        raise LockstepError(f"class {twice[0]!r} stands twice", where, "name each class once")
    whole = _by_channel(signal)
    if channels[-1:] == [VALID] and not ((whole[:, -1] == 0) | (whole[:, -1] == 1)).all():
        raise LockstepError(
            "the channel 'valid' holds more than 0 and 1", where, "give it another name"
        )
    names = _strings(arrays, "recording", where)
    if names and len(names) != len(lengths):
        what = f"{len(names)} names of recordings for {len(lengths)} recordings"
        raise LockstepError(what, where, "name each recording once, or none")
    multi = arrays.get("labels")
    if multi is not None and (
        multi.shape != (len(whole), len(classes)) or not np.isin(multi, (-1, 0, 1)).all()
    ):
        what = f"labels are {multi.dtype} of shape {multi.shape}, or hold more than -1, 0 and 1"
        raise LockstepError(what, where, f"give ({len(whole)} steps, {len(classes)} classes)")
    multi = None if multi is None else multi.astype(np.int8)
    about: tuple[Any, ...] = (length, stride, where, channels, rate_hz, steps)
    about += (3 if np.all(arrays.get("axes", 3) == 3) else 0, names, multi)
    return Recordings(whole, lengths, labels, groups, val, classes, subjects, *about)


def _check_numbers(arrays: dict[str, np.ndarray], name: str, axes: str, where: str) -> None:
    array = arrays[name]
    if array.ndim != axes.count(",") + 1 or not array.size or array.dtype.kind not in "fiu":
        what = f"{name} is {array.dtype} of shape {array.shape}, expected numbers ({axes})"
        raise LockstepError(what, where, "save it in this form")


def _check_sizes(
    arrays: dict[str, np.ndarray], names: Sequence[str], of: str, unit: str, where: str
) -> None:
    """Raise LockstepError unless each present array has one value for each `unit`."""
    for name in names:
        if name in arrays and arrays[name].shape != arrays[of].shape[:1]:
            what = f"{name} has shape {arrays[name].shape}, {of} has {arrays[of].shape}"
            raise LockstepError(what, where, f"give one {name} per {unit}")


def _check_finite(signal: np.ndarray, lengths: np.ndarray, unit: str, where: str) -> None:
    """Raise LockstepError unless signal (sum of lengths, C) is finite.

    unit  name of the items that `lengths` counts
    """
    with np.errstate(over="ignore"):  # a value too large becomes infinite and is rejected
        signal = np.ascontiguousarray(signal, dtype=np.float32)
    # A float64 sum of float32 values cannot overflow: one pass without a copy.
    if np.isfinite(signal.sum(dtype=np.float64)):
        return
    bad = np.flatnonzero(~np.isfinite(signal).all(1))
    if len(bad):
        ends = np.cumsum(lengths)
        owner = int(np.searchsorted(ends, bad[0], side="right"))
        step = bad[0] - ends[owner] + lengths[owner]
        what = (
            f"NaN or infinite value in {len(bad)} steps, the first in {unit} {owner}, step {step}"
        )
        raise LockstepError(f"{what} (counted from 0)", where, FILL)


def _by_channel(parts: list[np.ndarray]) -> np.ndarray:
    """Join the steps (S, C) of all parts into one array (sum of S, C) float32.

    The array is stored channel by channel.
    """
    joined, filled = np.empty((sum(map(len, parts)), parts[0].shape[1]), np.float32, order="F"), 0
    for part in parts:
        for first in range(0, len(part), 8192):  # pieces fit into the CPU cache
            piece = part[first : first + 8192]
            joined[filled : filled + len(piece)] = piece
            filled += len(piece)
    return joined


def _classes(
    y: np.ndarray, arrays: dict[str, np.ndarray], where: str, by_step: bool = False
) -> tuple[np.ndarray, list[str]]:
    """Convert stored labels to indices into `classes`.

    With class names, y indexes the names from 0. Without names, each distinct value is a class.

    by_step  "" and -1 mean unlabelled, and become -1
    """
    if y.dtype.kind not in "iuU":
        todo = "save them as whole numbers or text: labels.astype(int) or labels.astype(str)"
        raise LockstepError(f"labels are {y.dtype}, expected integers or strings", where, todo)
    if y.dtype.kind != "U" and y.min() < -by_step:
        what = (
            f"label {y.min()} is negative, the first at {int(np.argmax(y < -by_step))} "
            "(counted from 0)"
        )
        none = "give -1 to" if by_step else "leave out"
        raise LockstepError(what, where, f"number the classes from 0, and {none} what has no label")
    if "classes" not in arrays:
        values, labels = np.unique(y, return_inverse=True)
        # of a class: this comes before
        first = int(by_step and values[0] == ("" if y.dtype.kind == "U" else -1))
        classes = [str(value) for value in values[first:]]
        labels = labels.astype(np.int64) - first
    else:
        classes = _strings(arrays, "classes", where)
        if y.dtype.kind == "U" or y.max() >= len(classes):
            known = {str(n) for n in range(-by_step, len(classes))}
            found = sorted(
                {str(value) for value in np.unique(y)} - known
                or {str(value) for value in np.unique(y)}
            )[0]
            what = f"label {found} is not one of the {len(classes)} classes (counted from 0)"
            raise LockstepError(
                what, where, "number the labels by their place in classes, or leave classes out"
            )
        labels = y.astype(np.int64, copy=False)
    if by_step and not (labels >= 0).any():
        raise LockstepError(
            "not one step has a label", where, "give step_label, or label for each recording"
        )
    return labels, classes


def _groups(subject: np.ndarray | None, count: int, where: str) -> tuple[np.ndarray, list[str]]:
    if subject is None:
        return np.arange(count), []
    if subject.dtype.kind not in "iuU":
        todo = "save them as whole numbers or text: subject.astype(int) or subject.astype(str)"
        raise LockstepError(
            f"subjects are {subject.dtype}, expected integers or strings", where, todo
        )
    values, groups = np.unique(subject, return_inverse=True)
    names = [str(value) for value in values]
    if equal := equal_ids(names):
        what = f"subjects {equal[0][0]!r} and {equal[0][1]!r} are equal as numbers"
        todo = "write one text for one person; if they are two, rename one"
        raise LockstepError(what, where, todo)
    return groups.astype(np.int64), names


def _given_split(arrays: dict[str, np.ndarray], where: str) -> np.ndarray | None:
    if "val" not in arrays:
        return None
    if not np.isin(arrays["val"], (0, 1)).all():
        raise LockstepError(
            "val holds more than yes and no", where, "give True for what to validate on"
        )
    return arrays["val"].astype(bool)


def _strings(arrays: dict[str, np.ndarray], name: str, where: str) -> list[str]:
    if name not in arrays:
        return []
    if arrays[name].ndim != 1:
        what = f"{name} has shape {arrays[name].shape}"
        raise LockstepError(
            what, where, f"give a list of names, such as numpy.array(['a', 'b']), or no {name}"
        )
    return [str(one) for one in arrays[name]]


def _rate(arrays: dict[str, np.ndarray], where: str) -> float | None:
    if "rate_hz" not in arrays:
        return None
    rate = arrays["rate_hz"]
    if rate.size != 1 or rate.dtype.kind not in "iuf" or not 0 < rate.item() < np.inf:
        raise LockstepError(
            "rate_hz is not one number above 0", where, "give the steps per second, or none"
        )
    return float(rate.item())


# --------------------------------------------------------------------------------------------------
# files


def _column(path: Path) -> NumberLines:
    """Read one whole number per line as (lines, 1). Raises LockstepError."""
    found = read_numbers(path)
    values = found.values
    wrong = (values != values.round()) | (abs(values) > 2**24)
    if values.shape[1] != 1 or wrong.any():
        row = int(wrong.any(1).argmax())
        where = f"{path}:{found.lines[row]}"
        todo = "take it as it is published"
        raise LockstepError("expected one whole number per line", where, todo)
    return found


# --------------------------------------------------------------------------------------------------
# splitting


def split(
    recordings: Recordings,
    val_subjects: Sequence[str] = (),
    val_share: float = 0.2,
    seed: int = 0,
    given: bool = True,
    test: np.ndarray | None = None,
) -> np.ndarray:
    """Return (R,) bool, the recordings to validate on. No group is ever on both sides.

    `val_subjects` have priority. Next comes the predefined split of the dataset if `given`. Else a
    random `val_share` of the subjects is drawn from `seed`. Without subjects, recordings of each
    class are drawn.

    test  (R,) bool, the recordings of the test set, or None; only the rest is split
    """
    left = np.ones(len(recordings), dtype=bool) if test is None else ~test
    if val_subjects:
        val = _named(recordings, val_subjects, "val_subjects")
    elif given and recordings.val is not None:
        val = recordings.val & left
    else:
        val = _drawn(recordings, left, val_share, seed)
    _check_split(
        recordings, {"train": ~val & left, "validation" if test is not None else "test": val}, test
    )
    return val


def choose_test(
    recordings: Recordings, test_subjects: Sequence[str], test_share: float, seed: int, split: str
) -> np.ndarray | None:
    """Return (R,) bool, the recordings to test on, or None for no test set.

    `test_subjects` have priority. split="given-test" takes the second part of the predefined split.
    Else a random `test_share` is drawn as in `split`, with a separate random stream. With
    split="given", recordings of the predefined validation split are never drawn.
    """
    if test_subjects:
        return _named(recordings, test_subjects, "test_subjects")
    if split == "given-test":
        if recordings.val is None:
            todo = "give dataset.test_subjects, or dataset.test_share"
            raise LockstepError(
                "the data come with no test set of their own", recordings.where, todo
            )
        return recordings.val
    left = np.ones(len(recordings), dtype=bool)
    if split == "given" and recordings.val is not None:
        left = ~recordings.val
    return _drawn(recordings, left, test_share, seed + OTHER_SEED) if test_share else None


OTHER_SEED = 1 << 32
"""Offset of the seed for the choice of a test set, larger than any seed of a config."""


def _named(recordings: Recordings, names: Sequence[str], key: str) -> np.ndarray:
    if not recordings.subjects:
        what = f"{key} given, but the data name no subjects"
        raise LockstepError(
            what, recordings.where, f"use dataset.{key.replace('subjects', 'share')}"
        )
    if unknown := [name for name in names if name not in recordings.subjects]:
        todo = f"dataset.{key} may name {', '.join(recordings.subjects)}"
        raise LockstepError(f"no subject {', '.join(unknown)}", recordings.where, todo)
    return np.isin(recordings.groups, [recordings.subjects.index(name) for name in names])


def _drawn(recordings: Recordings, left: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Draw a random share of the `left` subjects, (R,) bool, and return (R,) bool.

    Without subjects, recordings of each class are drawn.
    """
    if recordings.subjects:
        return np.isin(
            recordings.groups,
            _draw(np.array(sorted({*recordings.groups[left].tolist()})), share, seed),
        )
    per_class = [
        np.flatnonzero(left & (recordings.labels == c)) for c in range(len(recordings.classes))
    ]
    chosen = [
        _draw(members, share, seed + c) for c, members in enumerate(per_class) if len(members)
    ]
    return np.isin(np.arange(len(recordings)), np.concatenate(chosen))


def _draw(members: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Draw a random share of some groups: at least one group, but never all.

    A lone group stays in training.
    """
    count = min(max(1, round(share * len(members))), len(members) - 1)
    return np.random.default_rng(seed).permutation(members)[:count]


def _check_split(
    recordings: Recordings, sides: dict[str, np.ndarray], test: np.ndarray | None
) -> None:
    """Raise LockstepError unless every group is on one side and both sides have recordings."""
    sides = sides if test is None else {**sides, "test": test}
    for (one, first), (other, second) in itertools.combinations(sides.items(), 2):
        # Python's sets: the first use of NumPy's set functions loads masked arrays, a tenth of all
        # import time.
        if both := sorted(
            {*recordings.groups[first].tolist()} & {*recordings.groups[second].tolist()}
        ):
            names = ", ".join(
                recordings.subjects[g] if recordings.subjects else str(g) for g in both[:5]
            )
            todo = (
                "set dataset.split to random"
                if test is None
                else "name each subject for one of them"
            )
            raise LockstepError(
                f"subject {names} is in both {one} and {other}", recordings.where, todo
            )
    counts = [int(chosen.sum()) for chosen in sides.values()]
    if not all(counts):
        what = f"{counts[0]} recordings to train on and {counts[1]} to validate on"
        todo = "change dataset.val_subjects or dataset.val_share"
        if test is not None:
            what, todo = (
                (
                    f"{what[: what.index(' and ')]}, {counts[1]} to validate and {counts[2]} to "
                    "test "
                    "on"
                ),
                f"{todo}, or those of the test",
            )
        raise LockstepError(what, recordings.where, todo)
