"""A packed folder of labelled video clips, read by one gather from a memory map.

    frames.npy   uint8 (sum of num_frames, H, W): the gray frames of all trials, concatenated
    trials.csv   columns trial, video, label, first_frame, num_frames; optionally group, the animal
                 or the cage of each video, which a split never divides; other columns are ignored
    classes.txt  one class name a line; a class's number is its line
    cutting.json how the clips were cut from videos, if known: {"crop": [x, y, w, h] or null,
                 "stride": step between frames of the video, "size": height and width, "fps": each
                 frame rate of the videos, "resampled": true if videos of any rate were resampled
                 to this rate}
    labels.npy   int8 (trials, classes), for labels that overlap: 1 is on, 0 is off, -1 is not
                 annotated

The frames may be far larger than memory. A batch reads only the pages of its clips.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.contract import Batch, LockstepError
from formats.arrays import check_text, load_npy, map_npy, read_ahead, renumber
from formats.lab.bouts import columns_of, one_hot
from formats.partial import Partial
from formats.tables import csv_rows

FRAMES, TRIALS, CLASSES, CUTTING = "frames.npy", "trials.csv", "classes.txt", "cutting.json"
LABELS = "labels.npy"
COLUMNS = ("trial", "video", "label", "first_frame", "num_frames")
GROUP = "group"
AGAIN = "make the folder again with tools/prepare_clips.py"


class Clips:
    """Clips of equal length from a packed folder.

    folder    written by `ClipsWriter`
    frames    T: the middle T frames of each trial are taken; 0 = the length of the shortest trial
    labels    (N,) int64 class numbers
    videos    (N,) str: the recording of each trial; also called `sources`
    groups    (N,) str: the animal or cage of each trial, for `split_by_video`; the video if unknown
    classes   names of the C classes
    shape     (T, H, W) of one clip
    longest   frames of the longest trial
    cutting   content of cutting.json (see the module); empty if unknown

    Raises LockstepError with file and line if the folder is incomplete or inconsistent.
    """

    def __init__(self, folder: str | Path, frames: int = 0):
        self.folder = Path(folder)
        self.classes = read_classes(self.folder / CLASSES)
        self._pixels = _open_frames(self.folder / FRAMES)
        rows = _read_trials(self.folder / TRIALS, self.classes, len(self._pixels))
        counts = np.array([row["num_frames"] for row in rows], dtype=np.int64)
        length = frames or int(counts.min())
        short = int(counts.argmin())
        if counts[short] < length:
            what = (
                f"trial {rows[short]['trial']} has {counts[short]} frames, {length} are asked for"
            )
            todo = (
                f"dataset.frames={counts[short]} takes as many of each trial; or remove the trial"
            )
            raise LockstepError(what, f"{self.folder / TRIALS}:{rows[short]['line']}", todo)
        first = np.array([row["first_frame"] for row in rows], dtype=np.int64)
        self.first = first + (counts - length) // 2  # (N,)
        self.labels = np.array([row["label"] for row in rows], dtype=np.int64)
        self.videos = np.array([row["video"] for row in rows])
        self.groups = np.array([row[GROUP] for row in rows])
        self.shape, self.longest = (length, *self._pixels.shape[1:]), int(counts.max())
        self.cutting = _read_cutting(self.folder / CUTTING)
        self.trials = np.array([row["trial"] for row in rows])
        self.multi = _read_labels(self.folder / LABELS, len(rows), len(self.classes))
        self.targets = self.labels

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def held(self) -> dict[str, Any]:
        """Return the arrays in memory, for the data's fingerprint. The pixels are on the disk."""
        return {"first frames": self.first, "names of classes": np.array(self.classes)}

    @property
    def overlapping(self) -> bool:
        """Return whether a clip may have several labels."""
        return self.multi is not None

    def one_hot(self) -> None:
        """Switch `y` to (B, C) int8 labels: 1 is on, 0 is off, -1 is not annotated."""
        self.targets = one_hot(self.labels, len(self.classes)) if self.multi is None else self.multi

    @property
    def sources(self) -> np.ndarray:
        return self.videos

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return the batch of B indices: {"x": (B, T, H, W) uint8, "y": (B,) int64}."""
        chosen = np.asarray(indices, dtype=np.int64)
        rows = self.first[chosen][:, None] + np.arange(self.shape[0])  # (B, T)
        # Pinned if a GPU is in use; otherwise the loader would copy the clips once more.
        x = torch.empty(
            (len(chosen), *self.shape), dtype=torch.uint8, pin_memory=torch.cuda.is_initialized()
        )
        # The constructor has checked the rows; mode="raise" would copy everything once more.
        np.take(self._pixels, rows, axis=0, out=x.numpy(), mode="clip")
        return {"x": x, "y": torch.from_numpy(self.targets[chosen])}

    def prefetch(self, indices: Sequence[int]) -> None:
        """Start to read these clips from the disk; return at once."""
        read_ahead(self._pixels, self.first[np.asarray(indices, dtype=np.int64)], self.shape[0])

    def subset(self, indices: np.ndarray) -> Clips:
        """Return the clips at `indices`, from the same memory map."""
        part = object.__new__(Clips)
        part.__dict__ |= self.__dict__
        for name in ("first", "labels", "videos", "groups", "trials", "targets", "multi"):
            if getattr(self, name) is not None:
                setattr(part, name, getattr(self, name)[indices])
        return part

    def renumbered(self, classes: list[str]) -> Clips:
        """Return the clips with labels that index the `classes` of a model.

        Raises LockstepError if `classes` lacks a class of the clips.
        """
        same = self.subset(np.arange(len(self)))
        same.labels = same.targets = renumber(
            self.labels, self.classes, classes, str(self.folder / TRIALS)
        )
        if self.multi is not None:
            same.multi = columns_of(self.multi, self.classes, classes)
        same.classes = classes
        return same

    def __getstate__(self) -> dict[str, Any]:
        # Pickled to a loader process, a memory map would become a copy of the whole file.
        return {name: value for name, value in self.__dict__.items() if name != "_pixels"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._pixels = _open_frames(self.folder / FRAMES)


class ClipsWriter:
    """Writes a packed folder trial by trial, under a temporary name until complete.

        with ClipsWriter("data/mice", classes=["rest", "walk"]) as writer:
            writer.add(clip, video="cage1.mp4", label="walk")  # clip (T, H, W) uint8

    An exception in the `with` block removes the written files. Raises LockstepError if the folder
    exists already.
    """

    def __init__(
        self, folder: str | Path, classes: Sequence[str], extra_columns: Sequence[str] = ()
    ):
        self.folder, self.classes = Path(folder), list(classes)
        self._number = {name: c for c, name in enumerate(self.classes)}
        if len(self._number) < len(self.classes) or not self.classes:
            raise LockstepError(
                f"classes {self.classes}: each needs a name of its own", str(folder)
            )
        if self.folder.exists():
            raise LockstepError(
                "the folder exists already", str(folder), "remove it or choose another"
            )
        self._columns = (*COLUMNS, *extra_columns)
        self._beside = Partial(self.folder)
        self._partial = self._beside.path
        self.num_trials = self.num_frames = 0
        self._size: tuple[int, int] | None = None

    def __enter__(self) -> ClipsWriter:
        try:
            self._beside.begin()
            self._pixels = open(self._partial / FRAMES, "wb")
            self._pixels.write(_npy_header((0, 0, 0)))
            self._table = open(self._partial / TRIALS, "w", newline="", encoding="utf-8")
            (self._partial / CLASSES).write_text(
                "".join(f"{name}\n" for name in self.classes), encoding="utf-8"
            )
        except OSError as error:
            raise _cannot_write(self.folder, error) from None
        self._csv = csv.DictWriter(self._table, self._columns)
        self._csv.writeheader()
        return self

    def add(self, clip: np.ndarray, video: str, label: str, **extra: object) -> None:
        """Append a trial: clip (T, H, W) uint8, its recording, its class, and extra columns."""
        if clip.dtype != np.uint8 or clip.ndim != 3 or 0 in clip.shape:
            raise LockstepError(
                f"a clip of shape {clip.shape} and type {clip.dtype}", video, "give (T, H, W) uint8"
            )
        if label not in self._number:
            raise LockstepError(
                f"unknown class {label!r}", video, f"choose of {', '.join(self.classes)}"
            )
        self._size = self._size or clip.shape[1:]
        if clip.shape[1:] != self._size:
            what = f"a clip of {clip.shape[1:]} pixels among clips of {self._size}"
            raise LockstepError(what, video, "resize them alike")
        row = {"trial": self.num_trials, "video": video, "label": label}
        row |= {"first_frame": self.num_frames, "num_frames": len(clip)} | extra
        try:
            self._pixels.write(np.ascontiguousarray(clip).data)
            self._csv.writerow(row)
        except OSError as error:
            raise _cannot_write(self.folder, error) from None
        self.num_trials += 1
        self.num_frames += len(clip)

    def write_array(self, name: str, array: np.ndarray) -> None:
        """Add an array to the folder."""
        np.save(self._partial / name, array)

    def write_text(self, name: str, text: str) -> None:
        """Add a file to the folder, such as a note on where the clips came from."""
        (self._partial / name).write_text(text, encoding="utf-8")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        except OSError as error:
            raise _cannot_write(self.folder, error) from None
        finally:
            for file in (self._pixels, self._table):
                with contextlib.suppress(OSError):  # on a full disk, closing fails once more
                    file.close()
            self._beside.end()

    def _finish(self) -> None:
        if self._size is None:
            raise LockstepError("no trial was written", str(self.folder), "give at least one")
        self._pixels.seek(0)
        self._pixels.write(_npy_header((self.num_frames, *self._size)))
        for file in (self._pixels, self._table):
            file.flush()
            os.fsync(file.fileno())  # the rename may reach the disk before the contents
            file.close()
        os.rename(self._partial, self.folder)


def split_by_video(
    videos: np.ndarray,
    labels: np.ndarray,
    val_share: float,
    seed: int = 0,
    val_videos: Sequence[str] = (),
    groups: np.ndarray | None = None,
    val_groups: Sequence[str] = (),
    side: str = "val",
) -> tuple[np.ndarray, np.ndarray]:
    """Return (train, val) indices, both sorted int64, with similar class shares on both sides.

    groups  (N,) the animal or cage of each trial; without groups, each video is a group
    side    name of the second part in errors, val or test

    Each group is on one side. Trials of a group share cage, light and animal, so a split by trial
    would make the validation score meaningless.

    `val_videos` and `val_groups` name the validation part, if given. Otherwise groups are drawn
    from `seed`. A class that occurs in two or more groups is on both sides if possible. Subject to
    the classes, moves and swaps of single groups bring `val` as near as possible to `val_share` of
    all trials and of each class. The same arguments give the same split on any machine.

    Raises LockstepError if there are too few groups, or if `val_videos` divide a group.
    """
    videos, labels = np.asarray(videos), np.asarray(labels)
    groups = videos if groups is None else np.asarray(groups)
    names, group = np.unique(groups, return_inverse=True)
    if not 0.0 <= val_share < 1.0:
        raise LockstepError(
            f"val_share {val_share} is not a share", "dataset", "give one from 0 to below 1"
        )
    if len(val_videos) or len(val_groups):
        in_val = _named(videos, val_videos, "video", side) | _named(
            groups, val_groups, "group", side
        )
        _check_whole(videos, groups, in_val, side)
        return np.flatnonzero(~in_val), np.flatnonzero(in_val)
    if val_share == 0.0:
        return np.arange(len(labels)), np.arange(0)
    if len(names) < 2:
        unit = "video" if groups is videos or (groups == videos).all() else "group"
        what = f"{len(names)} {unit} cannot be split by {unit}"
        raise LockstepError(what, "dataset", f"give trials of at least two {unit}s")
    table = np.zeros((len(names), int(labels.max()) + 1))
    np.add.at(table, (group, labels), 1)
    in_val = _choose(table[:, table.sum(0) > 0], val_share, np.random.default_rng(seed))[group]
    return np.flatnonzero(~in_val), np.flatnonzero(in_val)


def _named(of: np.ndarray, chosen: Sequence[str], unit: str, side: str) -> np.ndarray:
    """Return an (N,) bool mask of the trials whose name in `of`, (N,) str, is `chosen`.

    unit  kind of the names, video or group
    """
    names = np.unique(of).tolist()
    chosen = [name if name in names else os.path.normpath(name) for name in chosen]
    where, known = (
        f"dataset.{side}_{unit}s",
        ", ".join(names[:20]) + (", ..." if len(names) > 20 else ""),
    )
    if unknown := [name for name in chosen if name not in names]:
        raise LockstepError(f"no {unit} {', '.join(unknown[:5])}", where, f"it may name {known}")
    return np.isin(of, chosen)


def _check_whole(videos: np.ndarray, groups: np.ndarray, in_val: np.ndarray, side: str) -> None:
    """Raise LockstepError if the chosen trials, (N,) bool, are all trials or divide a group."""
    if in_val.all():
        what = "every video is to validate on" if side == "val" else "every video is to test on"
        raise LockstepError(what, f"dataset.{side}_videos", "leave some to train on")
    if cut := sorted({*groups[in_val].tolist()} & {*groups[~in_val].tolist()}):
        left, there = (
            sorted({*videos[(groups == cut[0]) & part].tolist()}) for part in (~in_val, in_val)
        )
        what = f"{there[0]} is of group {cut[0]}, and so is {left[0]}, which is not named"
        raise LockstepError(
            what, f"dataset.{side}_videos", f"name both, or dataset.{side}_groups={cut[0]}"
        )


def _choose(table: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Choose the validation groups, (V,) bool, from the (V, C) trials per group and class.

    Local searches start from random choices until a result is good enough: every class that can be
    on both sides is on both sides, and the size of `val` is off by at most half a mean group. After
    a bounded number of searches, the best result is returned.
    """
    found: tuple[float, np.ndarray] | None = None
    for _ in range(max(8, min(64, 4000 // len(table)))):
        cost, inside = _search(table, share, rng.permutation(len(table)))
        found = min(found or (cost, inside), (cost, inside), key=lambda one: one[0])
        off = table[inside].sum() - table.sum() * share
        if cost < _MISSING and abs(off) <= 0.5 * table.sum() / len(table):
            return inside
    assert found
    return found[1]


_MISSING = 1e6
"""Cost of a class on one side only, above the cost of any surplus or lack of trials."""


def _search(table: np.ndarray, share: float, order: np.ndarray) -> tuple[float, np.ndarray]:
    """Take groups in `order` up to the share, then move and swap single groups.

    The search stops when the cost no longer falls. Returns (cost, (V,) bool).
    """
    everything = table.sum(0)
    target, size = everything * share, everything.sum() * share
    spread = (table > 0).sum(0) > 1  # classes that can be on both sides
    mean_size = everything.sum() / len(table)

    def cost(taken: np.ndarray) -> np.ndarray:
        """Return the cost (...) of (..., C) trials in val; 0 is a perfect split.

        The sum runs class by class. A NumPy sum over an axis rounds differently on other kinds of
        machines, and ranks on such machines would choose different splits.
        """
        size_off = 10 * (taken.sum(-1) - size) / mean_size
        total = size_off * size_off
        for c in range(len(target)):
            off = (taken[..., c] - target[c]) / max(target[c], 1.0)
            one_sided = (taken[..., c] == 0) | (taken[..., c] == everything[c])
            total = total + off * off + _MISSING * (one_sided & spread[c])
        return total

    inside = np.zeros(len(table), dtype=bool)
    most = len(table) - 1
    fitting = int((np.cumsum(table[order].sum(1)) <= size).sum())
    inside[order[: min(max(fitting, 1), most)]] = True
    taken = table[inside].sum(0)
    best, before = float(cost(taken)), np.inf
    while best < before:
        before = best
        sign = np.where(inside, -1.0, 1.0)[:, None]
        costs = cost(taken + sign * table)
        # Neither side may become empty.
        costs[inside & (inside.sum() == 1) | ~inside & (inside.sum() == most)] = np.inf
        pick = int(costs.argmin())
        if costs[pick] < best:
            best, taken = float(costs[pick]), taken + sign[pick] * table[pick]
            inside[pick] = not inside[pick]
        for out in order[inside[order]]:
            costs = np.where(inside, np.inf, cost(taken - table[out] + table))
            pick = int(costs.argmin())
            if costs[pick] < best:
                best, taken = float(costs[pick]), taken - table[out] + table[pick]
                inside[out], inside[pick] = False, True
    return best, inside


# ---- files
# --------------------------------------------------------------------------------------------------


def read_classes(path: Path) -> list[str]:
    """Return the class names, one a line, in the order of their numbers. Raises LockstepError."""
    names = [line.strip() for line in _read_text(path).splitlines()]
    while names and not names[-1]:
        names.pop()
    for c, name in enumerate(names):
        if not name or name in names[:c]:
            what = f"class {name!r} stands twice" if name else "an empty class name"
            raise LockstepError(what, f"{path}:{c + 1}", "write one class a line, each once")
    if not names:
        raise LockstepError("no classes", str(path), "write one class name a line")
    return names


def _read_cutting(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(_read_text(path))
        crop, stride, size = (found[name] for name in ("crop", "stride", "size"))
        numbers, rates = (
            [*(crop or [0, 0, 1, 1]), stride, size],
            [float(rate) for rate in found.get("fps", [])],
        )
        whole = (
            len(numbers) == 6
            and all(type(n) is int and n >= 0 for n in numbers)
            and all(numbers[2:])
        )
        if not whole or not all(0 < rate < math.inf for rate in rates):
            raise ValueError
    except (ValueError, TypeError, KeyError, RecursionError):
        raise LockstepError(
            f"{path.name} does not describe how clips were cut", str(path), AGAIN
        ) from None
    about = {"crop": crop, "stride": stride, "size": size, "fps": rates}
    return about | ({"resampled": True} if found.get("resampled") and len(rates) == 1 else {})


def lasting(frames: int, cutting: Mapping[str, Any]) -> str:
    """Return the duration of a clip, such as `0.68 s`, for each frame rate of the videos.

    Returns an empty text if the rates are unknown.
    """
    span = {
        f"{frames * cutting['stride'] / rate:.2f} s": rate
        for rate in sorted(cutting.get("fps", []))
    }
    rates = " and ".join(f"{rate:g}" for rate in span.values())
    return " or ".join(span) + (
        f" (videos of {rates} frames/s: give them one rate)" if len(span) > 1 else ""
    )


def _read_text(path: Path) -> str:
    try:
        return check_text(path.read_text(encoding="utf-8-sig"), path)
    except FileNotFoundError:
        todo = "make the folder with tools/prepare_clips.py"
        raise LockstepError(f"no {path.name}", str(path.parent), todo) from None
    except (OSError, UnicodeDecodeError) as error:
        what = f"cannot read {path.name}: {error}"
        raise LockstepError(what, str(path), "give a UTF-8 text file") from None


def _read_labels(path: Path, rows: int, classes: int) -> np.ndarray | None:
    """Return the checked (rows, classes) int8 labels that may overlap, or None without the file."""
    if not path.is_file():
        return None
    found = load_npy(path)
    if found.shape != (rows, classes) or not np.isin(found, (-1, 0, 1)).all():
        what = f"{found.dtype} of shape {found.shape}, or more than -1, 0 and 1"
        what += f"; there are {rows} trials and {classes} classes"
        raise LockstepError(what, str(path), AGAIN)
    return found.astype(np.int8)


def _read_trials(path: Path, classes: list[str], num_rows: int) -> list[dict[str, Any]]:
    """Return the checked rows of trials.csv.

    `label` becomes the class's number; `line` is the row's line.
    """
    number = {name: c for c, name in enumerate(classes)}
    rows, first = [], dict[str, dict[str, Any]]()
    for line, row in read_table(path, _read_text(path), COLUMNS):
        rows.append(_checked(row, number, num_rows, f"{path}:{line}") | {"line": line})
        check_group(rows[-1], first.setdefault(rows[-1]["video"], rows[-1]), path)
    if not rows:
        raise LockstepError("no trials", str(path), "make the folder again")
    return rows


def check_group(row: Mapping[str, Any], first: Mapping[str, Any], path: Path) -> None:
    """Raise LockstepError unless two rows of a video, with `line`, have the same group."""
    if row[GROUP] != first[GROUP]:
        what = (
            f"{row['video']} is of group {row[GROUP]!r} here and of {first[GROUP]!r} in line "
            f"{first['line']}"
        )
        raise LockstepError(
            what,
            f"{path}:{row['line']}",
            "a video has one group: the animal, or the cage of several",
        )


def rename(path: Path, header: Sequence[str], renamed: Mapping[str, str]) -> list[str]:
    """Return the names of columns, with {new name: name in the file}. Raises LockstepError."""
    for new, old in renamed.items():
        if old not in header:
            there = ", ".join(filter(None, header)) or "nothing"
            what = f"no column {old} for {new}"
            raise LockstepError(what, f"{path}:1", f"the header has {there}")
        if new in header and new not in renamed.values():
            what = f"a column {new}, and {old} is named {new}, too"
            raise LockstepError(what, f"{path}:1", f"name the other one: --columns x={new}")
    new_names = {old: new for new, old in renamed.items()}
    return [new_names.get(name, name) for name in header]


def read_table(
    path: Path, text: str, columns: Sequence[str], renamed: Mapping[str, str] | None = None
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield (line, row) of a table as `csv_rows` reads the file; a missing cell is empty.

    renamed  {name in a row: name in the file} of columns
    Raises LockstepError if the header lacks `columns`, and for a row without any cell.
    """
    header, rows = csv_rows(path, text.splitlines())
    header = rename(path, header, renamed or {})
    if missing := [name for name in columns if name not in header]:
        raise LockstepError(
            f"no column {', '.join(missing)}", f"{path}:1", f"the header needs {','.join(columns)}"
        )
    for line, cells in rows:
        if not any(cell.strip() for cell in cells):
            raise LockstepError("an empty row", f"{path}:{line}", "delete it")
        yield line, dict(itertools.zip_longest(header, cells[: len(header)], fillvalue=""))


def _checked(
    row: Mapping[str, Any], number: dict[str, int], num_rows: int, where: str
) -> dict[str, Any]:
    try:
        first, count = int(row["first_frame"]), int(row["num_frames"])
    except ValueError:
        what = f"first_frame={row['first_frame']}, num_frames={row['num_frames']}"
        raise LockstepError(what, where, "give whole numbers") from None
    if not row["video"]:
        raise LockstepError("an empty video", where, "name the recording that the trial comes from")
    if row["label"] not in number:
        raise LockstepError(
            f"unknown label {row['label']!r}",
            where,
            f"choose one of {', '.join(number)} ({CLASSES})",
        )
    if first < 0 or count < 1 or first + count > num_rows:
        what = (
            f"trial {row['trial']} takes the frames {first} to {first + count - 1} of "
            f"{num_rows} in {FRAMES}"
        )
        raise LockstepError(
            what, where, "the two files do not belong together: make the folder again"
        )
    video = os.path.normpath(row["video"])  # ./a.mp4 and a.mp4 are the same video
    label = number[row["label"]]
    found = {
        "trial": row["trial"],
        "video": video,
        "label": label,
        "first_frame": first,
        "num_frames": count,
    }
    return found | {GROUP: (row.get(GROUP) or "").strip() or video}


def _open_frames(path: Path) -> np.ndarray:
    """Return a read-only view (rows, H, W) uint8 of the file without reading pixels.

    Raises LockstepError.
    """
    if not path.exists():
        raise LockstepError(f"no {path.name}", str(path.parent), AGAIN)
    pixels = map_npy(path)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or not pixels.flags.c_contiguous:
        what = (
            f"{path.name} holds {pixels.dtype} of shape {pixels.shape}, not uint8 (frames, "
            "height, width)"
        )
        raise LockstepError(what, str(path), AGAIN)
    return np.asarray(pixels)  # plain ndarray: np.memmap's own indexing is slower


def _npy_header(shape: tuple[int, ...]) -> bytes:
    """Return the header (NPY 1.0). Its 128 bytes allow the shape to be filled in at the end."""
    text = repr({"descr": "|u1", "fortran_order": False, "shape": shape}).ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode("latin1")


def _cannot_write(folder: Path, error: OSError) -> LockstepError:
    if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
        return LockstepError(
            "the folder exists already", str(folder), "remove it or choose another"
        )
    what = f"cannot write the clips: {error.strerror or error}"
    return LockstepError(what, str(folder), "make room or choose another folder")
