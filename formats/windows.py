"""Sensor recordings cut into windows: four layouts on disk, one dataset that gathers from the recordings.

    UCI HAR folder   {train,test}/Inertial Signals/*.txt, y_*.txt, subject_*.txt, activity_labels.txt
    .ts              NAME_TRAIN.ts and NAME_TEST.ts of the UEA archive, or one .ts file
    arrays           X.npy (N, T, C), y.npy (N,), subject.npy, with optional _train/_test suffixes; or one .npz of these
    recordings       an .npz: signal (sum of lengths, C), lengths (R,), label (R,), subject (R,)

The first and the third hold windows already, and so does a .ts file of equal lengths: each is taken whole. The others
hold recordings of any length, cut into windows of `length` steps that start every `stride` steps. People, not windows,
are divided between training and validation: two windows of one person are near copies of each other.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.contract import Batch, LockstepError

LAYOUTS = "a UCI HAR folder, NAME_TRAIN.ts + NAME_TEST.ts, X.npy + y.npy, or one .npz"
FIELDS = "data/watch/README.md lists the fields"


@dataclass(frozen=True)
class Recordings:
    """R labelled recordings, end to end in one array, and how to cut them.

    signal    (sum of lengths, C) float32
    lengths   (R,) int64, steps of each recording; none is shorter than `length`
    labels    (R,) int64, index into `classes`
    groups    (R,) int64, index into `subjects`; where no subject is known, the recording's own number
    val       (R,) bool, the split that the data come with, or None
    subjects  names; empty where no subject is known
    length, stride  of a window, in steps
    rate_hz   steps per second, or None
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

    def __len__(self) -> int:
        return len(self.lengths)

    def windows(self) -> np.ndarray:
        """(R,) int64: how many windows each recording gives; steps left over at its end are not used."""
        return (self.lengths - self.length) // self.stride + 1


class Windows:
    """The windows of some recordings as a dataset: `{"x": (B, C, T) float32, "y": (B,) int64}`.

    labels  (N,) int64, one per window;   starts  (N,) int64, row of `signal` where each begins
    """

    def __init__(self, recordings: Recordings, chosen: np.ndarray):
        """chosen  (R,) bool: which recordings. Windows overlap in memory: the signal is shared, never copied."""
        counts = np.where(chosen, recordings.windows(), 0)
        owner = np.repeat(np.arange(len(recordings)), counts)  # (N,) recording of each window
        nth = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)  # its number within the recording
        offsets = np.cumsum(recordings.lengths) - recordings.lengths
        self.starts = torch.from_numpy(offsets[owner] + nth * recordings.stride)
        self.labels = recordings.labels[owner]
        self.length = recordings.length
        self.signal = torch.from_numpy(recordings.signal)
        self._y = torch.from_numpy(self.labels)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitems__(self, indices: list[int]) -> Batch:
        chosen = torch.as_tensor(indices)
        every = self.signal.unfold(0, self.length, 1)  # (steps - T + 1, C, T), a view
        return {"x": every[self.starts[chosen]].contiguous(), "y": self._y[chosen]}

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[0] for name, values in self.__getitems__([index]).items()}

    def statistics(self) -> tuple[Tensor, Tensor]:
        """(C,) mean and (C,) standard deviation over every step that some window covers, each counted once."""
        covered = torch.zeros(len(self.signal) + 1, dtype=torch.int64)
        covered.index_add_(0, self.starts, torch.ones_like(self.starts))
        covered.index_add_(0, self.starts + self.length, -torch.ones_like(self.starts))
        steps = self.signal[covered.cumsum(0)[:-1] > 0].double()
        mean, std = steps.mean(0), steps.std(0, correction=0)
        # A dead sensor has no spread: it is shifted to zero, not blown up.
        return mean.float(), torch.where(std > 1e-6 * mean.abs().clamp(min=1e-6), std, 1.0).float()


# ---------------------------------------------------------------------------------------------------- reading


def read(root: str | Path, length: int = 128, stride: int = 64) -> Recordings:
    """Recognise the layout under `root` (a folder or a file, see above) and read it.

    length, stride  in steps; they cut recordings only: what is published as windows is taken whole
    Raises LockstepError with the file, and the line where there is one.
    """
    root = Path(root).expanduser()
    if length < 1 or stride < 1:
        raise LockstepError(f"length {length} and stride {stride} must be at least 1", where="dataset")
    if root.is_file():
        return _read_file(root, length, stride)
    if not root.is_dir():
        raise LockstepError("no such file or folder", where=str(root), todo=f"give {LAYOUTS}")
    for folder in (root, root / "UCI HAR Dataset"):
        if (folder / "train" / "Inertial Signals").is_dir():
            return _read_uci(folder)
    if ts := sorted(root.glob("*.ts")):
        return _read_ts(_one(root, [path for path in ts if not path.stem.endswith("_TEST")], ".ts"), length, stride)
    if (root / "X.npy").is_file() or (root / "X_train.npy").is_file():
        return _read_npy(root)
    if archives := sorted(root.glob("*.npz")):
        return _read_file(_one(root, archives, ".npz"), length, stride)
    raise LockstepError("no sensor data found", where=str(root), todo=f"give {LAYOUTS}")


def _one(root: Path, paths: list[Path], kind: str) -> Path:
    if len(paths) != 1:
        names = ", ".join(path.name for path in paths) or "only _TEST"
        raise LockstepError(f"{len(paths)} data sets of kind {kind}: {names}", where=str(root), todo="name one file")
    return paths[0]


def _read_file(path: Path, length: int, stride: int) -> Recordings:
    if path.suffix == ".ts":
        return _read_ts(path, length, stride)
    if path.suffix != ".npz":
        raise LockstepError(f"cannot read files of kind {path.suffix!r}", where=str(path), todo=f"give {LAYOUTS}")
    arrays = _load_npz(path)
    if "signal" in arrays:
        return _from_recordings(arrays, path, length, stride)
    if "X" in arrays:
        return _from_windows([arrays], path, None)
    found = ", ".join(arrays) or "nothing"
    raise LockstepError(f"holds neither 'signal' nor 'X' but {found}", where=str(path), todo=FIELDS)


def _read_uci(root: Path) -> Recordings:
    names = [f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"]
    labels_path = root / "activity_labels.txt"
    pairs = [line.split(None, 1) for line in _lines(labels_path) if line.strip()]
    if [pair[0] for pair in pairs] != [str(n) for n in range(1, len(pairs) + 1)] or any(len(p) != 2 for p in pairs):
        raise LockstepError("expected one '1 NAME' per line, numbered from 1", where=str(labels_path))
    classes = [name.strip() for _, name in pairs]
    parts = []
    for part in ("train", "test"):
        axes = [_table(root / part / "Inertial Signals" / f"{name}_{part}.txt") for name in names]
        for name, axis in zip(names, axes, strict=True):
            if axis.shape != axes[0].shape:
                raise LockstepError(
                    f"{axis.shape[0]} windows of {axis.shape[1]} steps, but {names[0]} has {axes[0].shape[0]} of"
                    f" {axes[0].shape[1]}",
                    where=str(root / part / "Inertial Signals" / f"{name}_{part}.txt"),
                )
        y_path = root / part / f"y_{part}.txt"
        y = _column(y_path)
        for line in np.flatnonzero((y < 1) | (y > len(classes))):
            raise LockstepError(f"label {y[line]} is not in activity_labels.txt", where=f"{y_path}:{line + 1}")
        subject = _column(root / part / f"subject_{part}.txt")
        parts.append({"X": np.stack(axes, 2), "y": y - 1, "subject": subject, "classes": np.array(classes)})
    return _from_windows(parts, root, ["train", "test"], channels=names, rate_hz=50.0)


def _read_npy(root: Path) -> Recordings:
    suffixes = [""] if (root / "X.npy").is_file() else ["_train", "_test"]
    parts = []
    for suffix in suffixes:
        names = ["X", "y"] + ["subject"] * (root / f"subject{suffix}.npy").is_file()
        parts.append({name: _load_npy(root / f"{name}{suffix}.npy") for name in names})
    return _from_windows(parts, root, [suffix.strip("_") for suffix in suffixes] if len(parts) > 1 else None)


def _read_ts(path: Path, length: int, stride: int) -> Recordings:
    """One .ts file, or a _TRAIN.ts with its _TEST.ts, whose recordings become the predefined validation split."""
    paths = [path]
    if path.stem.endswith("_TRAIN") or path.stem.endswith("_TEST"):
        name = path.stem.rsplit("_", 1)[0]
        paths = [path.with_name(f"{name}_{part}.ts") for part in ("TRAIN", "TEST")]
    parts = [_parse_ts(p) for p in paths]
    classes = parts[0][2]
    for p, part in zip(paths[1:], parts[1:], strict=True):
        if part[2] != classes:
            raise LockstepError(f"classes {' '.join(part[2])} differ from those of {paths[0].name}", where=str(p))
    series = [one for part in parts for one in part[0]]
    labels = [one for part in parts for one in part[1]]
    if len({one.shape[1] for one in series}) > 1:
        raise LockstepError("train and test have different numbers of channels", where=str(path))
    sizes = {len(one) for one in series}
    if len(sizes) == 1:
        length = stride = sizes.pop()  # windows already
    numbers = np.arange(len(series))
    return _checked(
        Recordings(
            signal=np.concatenate(series),
            lengths=np.array([len(one) for one in series], dtype=np.int64),
            labels=np.array(labels, dtype=np.int64),
            groups=numbers,
            val=numbers >= len(parts[0][0]) if len(parts) > 1 else None,
            classes=classes,
            subjects=[],
            length=length,
            stride=stride,
            where=str(path),
        )
    )


def _parse_ts(path: Path) -> tuple[list[np.ndarray], list[int], list[str]]:
    """-> recordings, each (T, C) float32; labels; classes. One recording a line: channel:channel:…:label."""
    header: dict[str, list[str]] = {}
    series: list[np.ndarray] = []
    labels: list[int] = []
    classes: list[str] = []
    for number, line in enumerate(_lines(path), 1):
        line, where = line.strip(), f"{path}:{number}"
        if not line or line.startswith("#"):
            continue
        if line.startswith("@"):
            key, *values = line[1:].split() or [""]
            header[key.lower()] = values
            if key.lower() == "data":
                classes = _ts_classes(header, where)
            continue
        if "data" not in header:
            raise LockstepError("a recording before @data", where=where)
        *channels, label = line.split(":")
        if label.strip() not in classes:
            raise LockstepError(f"label {label.strip()!r} is not in @classLabel", where=where)
        series.append(_ts_series(channels, header, where))
        if series[-1].shape[1] != series[0].shape[1]:
            raise LockstepError(f"{len(channels)} channels, the first recording has {series[0].shape[1]}", where=where)
        labels.append(classes.index(label.strip()))
    if not series:
        raise LockstepError("no recordings after @data", where=str(path))
    return series, labels, classes


def _ts_classes(header: dict[str, list[str]], where: str) -> list[str]:
    if [word.lower() for word in header.get("timestamps", [])] == ["true"]:
        raise LockstepError("@timeStamps true is not supported", where=where, todo="resample to an even rate")
    said, *classes = header.get("classlabel") or ["false"]
    if said.lower() != "true" or not classes:
        raise LockstepError("no '@classLabel true NAME NAME ...' in the header", where=where)
    return classes


def _ts_series(channels: list[str], header: dict[str, list[str]], where: str) -> np.ndarray:
    """The channels of one line -> (T, C) float32, checked against the header's @dimensions and @seriesLength."""
    if header.get("dimensions", [str(len(channels))]) != [str(len(channels))]:
        raise LockstepError(f"{len(channels)} channels, @dimensions says {' '.join(header['dimensions'])}", where=where)
    rows = [channel.split(",") for channel in channels]
    sizes = sorted({len(row) for row in rows})
    if len(sizes) != 1:
        raise LockstepError(f"channels of different lengths ({sizes[0]} and {sizes[-1]})", where=where)
    if header.get("serieslength", [str(sizes[0])]) != [str(sizes[0])]:
        raise LockstepError(f"{sizes[0]} steps, @seriesLength says {' '.join(header['serieslength'])}", where=where)
    try:
        values = np.array(rows, dtype=np.float32).T
    except ValueError as error:
        raise LockstepError(f"not a number: {error}", where=where, todo="fill in missing values first") from None
    if not np.isfinite(values).all():
        raise LockstepError("a value is NaN or infinite", where=where, todo="fill in missing values first")
    return np.ascontiguousarray(values)


# ---------------------------------------------------------------------------------------- arrays to recordings


def _from_windows(
    parts: list[dict[str, np.ndarray]],
    path: Path,
    names: list[str] | None,
    channels: Sequence[str] = (),
    rate_hz: float | None = None,
) -> Recordings:
    """X (N, T, C), y (N,) and perhaps subject (N,), classes (K,), val (N,): one part, or training and validation."""
    for number, part in enumerate(parts):
        where = f"{path}, {names[number]}" if names else str(path)
        _check_part(part, where)
        if part["X"].shape[1:] != parts[0]["X"].shape[1:] or part.keys() != parts[0].keys():
            raise LockstepError("train and test differ in window length, channels or files", where=str(path))
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0] if name not in _LISTS}
    labels, classes = _classes(joined["y"], parts[0].get("classes"), str(path))
    count, steps, width = joined["X"].shape
    groups, subjects = _groups(joined.get("subject"), count)
    val = joined["val"].astype(bool) if "val" in joined else None
    if names:
        val = np.arange(count) >= len(parts[0]["y"])
    return _checked(
        Recordings(
            signal=np.ascontiguousarray(joined["X"].reshape(count * steps, width), dtype=np.float32),
            lengths=np.full(count, steps, dtype=np.int64),
            labels=labels,
            groups=groups,
            val=val,
            classes=classes,
            subjects=subjects,
            length=steps,
            stride=steps,
            where=str(path),
            channels=list(channels) or _strings(parts[0], "channels"),
            rate_hz=rate_hz or _rate(parts[0]),
        )
    )


_LISTS = ("classes", "channels", "rate_hz")


def _check_part(part: dict[str, np.ndarray], where: str) -> None:
    if "y" not in part:
        raise LockstepError("X has no labels y", where=where)
    if part["X"].ndim != 3 or not part["X"].size or part["X"].dtype.kind not in "fiu":
        found = f"X is {part['X'].dtype} of shape {part['X'].shape}"
        raise LockstepError(f"{found}, expected numbers (windows, steps, channels)", where=where)
    for name in ("y", "subject", "val"):
        if name in part and part[name].shape != part["X"].shape[:1]:
            raise LockstepError(f"{name} has shape {part[name].shape}, X has {part['X'].shape}", where=where)


def _from_recordings(arrays: dict[str, np.ndarray], path: Path, length: int, stride: int) -> Recordings:
    where = str(path)
    for name in ("signal", "lengths", "label", "subject"):
        if name not in arrays:
            raise LockstepError(f"no array {name!r}", where=where, todo=FIELDS)
    signal, lengths = arrays["signal"], arrays["lengths"]
    if signal.ndim != 2 or not signal.size or signal.dtype.kind not in "fiu":
        raise LockstepError(
            f"signal is {signal.dtype} of shape {signal.shape}, expected numbers (steps, channels)", where=where
        )
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or (lengths < 1).any() or lengths.sum() != len(signal):
        raise LockstepError(f"lengths add up to {lengths.sum()} steps, signal has {len(signal)}", where=where)
    for name in ("label", "subject", "val"):
        if name in arrays and arrays[name].shape != lengths.shape:
            raise LockstepError(f"{name} has shape {arrays[name].shape}, lengths has {lengths.shape}", where=where)
    labels, classes = _classes(arrays["label"], arrays.get("classes"), where)
    groups, subjects = _groups(arrays["subject"], len(lengths))
    return _checked(
        Recordings(
            signal=np.ascontiguousarray(signal, dtype=np.float32),
            lengths=lengths.astype(np.int64),
            labels=labels,
            groups=groups,
            val=arrays["val"].astype(bool) if "val" in arrays else None,
            classes=classes,
            subjects=subjects,
            length=length,
            stride=stride,
            where=where,
            channels=_strings(arrays, "channels"),
            rate_hz=_rate(arrays),
        )
    )


def _checked(recordings: Recordings) -> Recordings:
    """The checks that every layout shares."""
    bad = np.flatnonzero(~np.isfinite(recordings.signal).all(1))
    if len(bad):
        owner = int(np.searchsorted(np.cumsum(recordings.lengths), bad[0], side="right"))
        raise LockstepError(
            f"NaN or infinite value in {len(bad)} steps, the first in recording {owner}",
            where=recordings.where,
            todo="fill in missing values first",
        )
    short = np.flatnonzero(recordings.lengths < recordings.length)
    if len(short):
        raise LockstepError(
            f"recording {short[0]} has {recordings.lengths[short[0]]} steps, a window {recordings.length}",
            where=recordings.where,
            todo=f"set dataset.length to {recordings.lengths.min()} or less, or leave such recordings out",
        )
    if recordings.channels and len(recordings.channels) != recordings.signal.shape[1]:
        names, width = len(recordings.channels), recordings.signal.shape[1]
        raise LockstepError(f"{names} channel names for {width} channels", where=recordings.where)
    return recordings


def _classes(y: np.ndarray, names: np.ndarray | None, where: str) -> tuple[np.ndarray, list[str]]:
    """Labels as written -> index into `classes`. With names, y counts from 0 into them; else each value is a class."""
    if y.dtype.kind not in "iuU":
        raise LockstepError(f"labels are {y.dtype}, expected integers or strings", where=where)
    if names is None:
        values, labels = np.unique(y, return_inverse=True)
        return labels.astype(np.int64), [str(value) for value in values]
    classes = [str(name) for name in names]
    if y.dtype.kind == "U" or y.min() < 0 or y.max() >= len(classes):
        found = sorted({str(value) for value in y} - {str(n) for n in range(len(classes))})[0]
        raise LockstepError(f"label {found} is not one of the {len(classes)} classes (counted from 0)", where=where)
    return y.astype(np.int64), classes


def _groups(subject: np.ndarray | None, count: int) -> tuple[np.ndarray, list[str]]:
    if subject is None:
        return np.arange(count), []
    values, groups = np.unique(subject, return_inverse=True)
    return groups.astype(np.int64), [str(value) for value in values]


def _strings(arrays: dict[str, np.ndarray], name: str) -> list[str]:
    return [str(one) for one in np.atleast_1d(arrays[name])] if name in arrays else []


def _rate(arrays: dict[str, np.ndarray]) -> float | None:
    return float(arrays["rate_hz"]) if "rate_hz" in arrays else None


# ---------------------------------------------------------------------------------------------------- files


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise LockstepError(f"cannot read: {error.strerror}", where=str(path)) from None
    except UnicodeDecodeError:
        raise LockstepError("not a text file", where=str(path)) from None


def _table(path: Path) -> np.ndarray:
    """Numbers in columns -> (lines, columns) float32."""
    lines = _lines(path)
    if not any(line.strip() for line in lines):
        raise LockstepError("the file is empty", where=str(path))
    try:
        values = np.loadtxt(lines, dtype=np.float32, ndmin=2, comments=None)
    except ValueError:
        raise _bad_line(path, lines) from None
    if not np.isfinite(values).all():
        raise _bad_line(path, lines)
    return values


def _bad_line(path: Path, lines: list[str]) -> LockstepError:
    """Say which line of a table is at fault: numpy's own message counts rows from a start of its own."""
    width = len(lines[0].split())
    for number, line in enumerate(lines, 1):
        where, words = f"{path}:{number}", line.split()
        if words and len(words) != width:
            return LockstepError(f"{len(words)} numbers, the first line has {width}", where=where)
        for word in words:
            try:
                finite = np.isfinite(float(word))
            except ValueError:
                return LockstepError(f"not a number: {word!r}", where=where)
            if not finite:
                return LockstepError("a value is NaN or infinite", where=where, todo="fill in missing values first")
    return LockstepError("not a table of numbers", where=str(path))


def _column(path: Path) -> np.ndarray:
    """One whole number per line -> (lines,) int64."""
    values = _table(path)
    if values.shape[1] != 1 or (values != values.round()).any():
        raise LockstepError("expected one whole number per line", where=str(path))
    return values[:, 0].astype(np.int64)


def _load_npy(path: Path) -> np.ndarray:
    try:
        return np.load(path, allow_pickle=False)
    except OSError as error:
        raise LockstepError(f"cannot read: {error.strerror or error}", where=str(path)) from None
    except (ValueError, EOFError) as error:
        raise LockstepError(f"not a plain .npy array: {_short(error)}", where=str(path)) from None


def _load_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        archive = np.load(path, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise ValueError("it is a single array")
        with archive:
            return {name: archive[name] for name in archive.files}
    except OSError as error:
        raise LockstepError(f"cannot read: {error.strerror or error}", where=str(path)) from None
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise LockstepError(f"not a plain .npz archive: {_short(error)}", where=str(path)) from None


def _short(error: Exception) -> str:
    return str(error).splitlines()[0][:100] if str(error) else type(error).__name__


# ---------------------------------------------------------------------------------------------------- splitting


def split(
    recordings: Recordings,
    val_subjects: Sequence[str] = (),
    val_share: float = 0.2,
    seed: int = 0,
    given: bool = True,
) -> np.ndarray:
    """(R,) bool: which recordings are for validation. No group is ever on both sides.

    The subjects named in `val_subjects` if any; else the split that the data come with if `given`; else a random
    `val_share` of the subjects drawn from `seed`, or, where no subject is known, of the recordings of each class.
    """
    if val_subjects:
        val = _named(recordings, val_subjects)
    elif given and recordings.val is not None:
        val = recordings.val
    elif recordings.subjects:
        val = np.isin(recordings.groups, _draw(np.arange(len(recordings.subjects)), val_share, seed))
    else:
        per_class = [np.flatnonzero(recordings.labels == c) for c in range(len(recordings.classes))]
        chosen = [_draw(members, val_share, seed + c) for c, members in enumerate(per_class) if len(members)]
        val = np.isin(np.arange(len(recordings)), np.concatenate(chosen))
    _check_split(recordings, val)
    return val


def _named(recordings: Recordings, val_subjects: Sequence[str]) -> np.ndarray:
    if not recordings.subjects:
        raise LockstepError(
            "val_subjects given, but the data name no subjects", where=recordings.where, todo="use dataset.val_share"
        )
    unknown = [name for name in val_subjects if name not in recordings.subjects]
    if unknown:
        raise LockstepError(
            f"no subject {', '.join(unknown)}",
            where=recordings.where,
            todo=f"dataset.val_subjects may name {', '.join(recordings.subjects)}",
        )
    return np.isin(recordings.groups, [recordings.subjects.index(name) for name in val_subjects])


def _draw(members: np.ndarray, share: float, seed: int) -> np.ndarray:
    """A random share of some groups: at least one, and never all (a lone one stays for training)."""
    count = min(max(1, round(share * len(members))), len(members) - 1)
    return np.random.default_rng(seed).permutation(members)[:count]


def _check_split(recordings: Recordings, val: np.ndarray) -> None:
    both = np.intersect1d(recordings.groups[val], recordings.groups[~val])
    if len(both):
        names = ", ".join(recordings.subjects[g] for g in both[:5])
        raise LockstepError(
            f"subject {names} is in both train and test", where=recordings.where, todo="set dataset.split to random"
        )
    if val.all() or not val.any():
        raise LockstepError(
            f"{(~val).sum()} recordings to train on and {val.sum()} to validate on",
            where=recordings.where,
            todo="change dataset.val_subjects or dataset.val_share",
        )
