"""Read tracks of body parts from DeepLabCut and SLEAP, and convert tracks to network inputs.

The readers of the files are in `formats/lab/poses/`. A folder may have several files of one video:
the CSV beside the .h5, the filtered tracks beside the raw ones, tracks of two snapshots.
"""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.contract import LockstepError
from formats.arrays import text_lines
from formats.clock import Clock
from formats.lab import behaviour
from formats.lab.events.pairing import Folders, Named, fit_of, stem_of
from formats.lab.poses import deeplabcut, sleap
from formats.lab.poses.track import Track
from formats.tables import csv_rows

READ = "a CSV or .h5 of DeepLabCut, an analysis .h5 or CSV of SLEAP, or a folder of them"
KINDS = (".csv", ".h5", ".slp")
NO_TRACKS = ("_skeleton.csv", "_skeleton.h5")  # DeepLabCut's lengths of bones
RAW, FILTERED = "raw", "filtered"
BY_FOLDER = "--by-folder"
"""The option for files of one name in several folders."""
CENTRE = "body_?cent|centre|center|centroid|thorax|torso|spine_?mid|mid_?spine|middle|spine|back"
FRONT = "nose|snout|head"
TAIL = "tail_?base|base_?tail|tail_?root|tail_?start|tail_?0|hip|tti"


def read(path: Path) -> list[Track]:
    """Return the track of each animal of a file. Raises LockstepError with file and line."""
    kind = path.suffix.lower()
    if kind == ".csv":
        if sleap.is_csv(_header(path)):
            return sleap.read_csv(path)
        return deeplabcut.read_csv(path)
    if kind == ".h5":
        with _opened_h5(path) as file:
            frame = deeplabcut.frame_in(file)
            return sleap.read_h5(path, file) if frame is None else deeplabcut.read_h5(path, frame)
    todo = {
        ".slp": "in SLEAP: File, Export Analysis HDF5",
        ".pickle": "of DeepLabCut give the .h5 or the CSV beside it",
    }.get(kind, f"give {READ}")
    raise LockstepError(f"cannot read tracks of kind {kind!r}", str(path), todo)


def video_of(path: Path) -> str:
    """Return the name of the video that a file tracks; only the beginning of the file is read."""
    if path.suffix.lower() == ".csv":
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            first = file.readline()
        scorer = deeplabcut.scorer_of_csv(first)
        return deeplabcut.video_of(path, scorer) if scorer else sleap.video_of(path)
    if path.suffix.lower() == ".h5":
        with _opened_h5(path) as file:
            frame = deeplabcut.frame_in(file)
            if frame is None:
                return sleap.video_of_h5(path, file)
            return deeplabcut.video_of(path, deeplabcut.columns_of_h5(path, frame).scorer)
    return sleap.video_of(path)


@contextlib.contextmanager
def _opened_h5(path: Path) -> Iterator[Any]:
    """Open an .h5 of DeepLabCut or SLEAP. Raises LockstepError for another file."""
    try:
        import h5py
    except ImportError as error:
        raise LockstepError(
            f"h5py is needed to read an .h5: {error}", str(path), "pip install h5py"
        ) from None
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise LockstepError(
            f"no HDF5 file: {str(error)[:120]}", str(path), "export it again"
        ) from None
    with file:
        is_sleap = isinstance(file.get("tracks"), h5py.Dataset) and "node_names" in file
        if not is_sleap and deeplabcut.frame_in(file) is None:
            todo = "of DeepLabCut export the CSV (save_as_csv), of SLEAP the analysis .h5"
            raise LockstepError(
                f"holds {', '.join(file) or 'nothing'}, not SLEAP's tracks", str(path), todo
            )
        yield file


def _header(path: Path) -> list[str]:
    """Return the columns of SLEAP's CSV; of DeepLabCut's the names of the scorer."""
    lines = text_lines(path)[:1]
    if not lines or lines[0].startswith("scorer"):
        return []
    return csv_rows(path, lines)[0]


def with_parts(track: Track, names: Sequence[str]) -> Track:
    """Select the parts that fit a name or a pattern; without names, all parts.

    Raises LockstepError for a name of no part.
    """
    for name in names:
        if not fnmatch.filter(track.parts, name):
            there = ", ".join(track.parts)
            raise LockstepError(f"no part {name}", str(track.path), f"the file has {there}")
    kept = [
        p
        for p, part in enumerate(track.parts)
        if not names or any(fnmatch.fnmatchcase(part, name) for name in names)
    ]
    parts = [track.parts[p] for p in kept]
    return replace(track, parts=parts, xy=track.xy[:, kept], likelihood=track.likelihood[:, kept])


# ---- the files of a folder
# --------------------------------------------------------------------------------------------------


def files_of(folder: Path) -> list[Path]:
    """Return the files of tracks in a folder and its subfolders, without files of labels."""
    files = []
    for path in sorted(folder.rglob("*")):
        is_hidden = path.name.startswith(".")
        if path.suffix.lower() not in KINDS or is_hidden or path.name.endswith(NO_TRACKS):
            continue
        if not _is_labels(path):
            files.append(path)
    return files


def _is_labels(path: Path) -> bool:
    return (
        path.suffix.lower() == ".csv"
        and not path.read_bytes()[:6].startswith(b"scorer")
        and behaviour.is_labels(path)
    )


@dataclass(frozen=True)
class Source:
    """A file of tracks, and the name of its video: with the folder where two videos have one name.

    like_video  path that the video would have beside the file, without ending
    """

    path: Path
    video: str
    like_video: Path


def sources_of(path: Path) -> list[Source]:
    """Return the file of tracks, or all of them in a folder and its subfolders."""
    files = files_of(path) if path.is_dir() else [path]
    found = []
    for file in _without_copies(files):
        video = video_of(file)
        found.append(Source(file, video, file.parent / video))
    return found


def names_in_several_folders(sources: Sequence[Source]) -> set[str]:
    """Return the names of videos that have tracks in several folders."""
    folders: dict[str, set[Path]] = {}
    for source in sources:
        folders.setdefault(source.video, set()).add(source.path.parent)
    return {video for video, several in folders.items() if len(several) > 1}


def named_by_folder(sources: Sequence[Source], names: Sequence[Named], root: Path) -> set[str]:
    """Return the names of videos that labels name with the folder of the tracks."""
    found = set()
    for named, source in itertools.product(names, sources):
        if stem_of(named.name) == source.video:
            fit = fit_of(named, source.like_video, root, Folders.PREFER)
            if fit and (fit.folders or fit.beside):
                found.add(source.video)
    return found


def one_of_each_video(
    sources: Sequence[Source], folder: Path, prefer: Sequence[str], by_folder: Collection[str] = ()
) -> tuple[list[Source], list[str]]:
    """Return the file of each video, and lines on the choices.

    prefer     texts in the name of the file to take, such as `filtered` or the number of a
               snapshot; `raw` takes the file that is not filtered
    by_folder  names of videos that several folders have, each a video of its own
    Raises LockstepError for two files of a video that `prefer` does not distinguish.
    """
    by_video: dict[str, list[Source]] = {}
    for source in sources:
        if source.video in by_folder:
            below = source.like_video.relative_to(folder)
            source = replace(source, video=str(below))
        by_video.setdefault(source.video, []).append(source)
    chosen, lines = [], []
    for video, several in by_video.items():
        files = [source.path for source in several]
        best = _preferred(files, prefer)
        if len(best) > 1:
            raise _several_files(video, best, folder)
        chosen.append(several[files.index(best[0])])
        others = [path.name for path in files if path is not best[0]]
        if others:
            lines.append(f"{video}: {best[0].name}; not used: {', '.join(others)}")
        elif missing := [text for text in prefer if not _has(best[0], text)]:
            lines.append(f"{video} has no file {missing[0]}: {best[0].name} is used")
    return chosen, lines


def _without_copies(paths: Sequence[Path]) -> list[Path]:
    """Return the files without the second format of the same tracks.

    DeepLabCut writes the same numbers to the .h5 and the CSV: the CSV needs no package. SLEAP's CSV
    lacks the name of the video.
    """
    there = {*paths}
    return [path for path in paths if _twin_of(path) not in there]


def _twin_of(path: Path) -> Path | None:
    """Return the name of the file with the same tracks that is read in place of `path`."""
    is_sleap = ".analysis" in path.name
    if path.suffix.lower() == ".csv" and is_sleap:
        return path.with_suffix(".h5")
    if path.suffix.lower() == ".h5" and not is_sleap:
        return path.with_suffix(".csv")
    return None


def _preferred(files: list[Path], prefer: Sequence[str]) -> list[Path]:
    for text in prefer:
        files = [path for path in files if _has(path, text)] or files
    return files


def _has(path: Path, text: str) -> bool:
    """Return whether a text is in the name of a file; a number is there as a whole number."""
    if text == RAW:
        return FILTERED not in path.stem
    before = r"(?<!\d)" if text[:1].isdigit() else ""
    after = r"(?!\d)" if text[-1:].isdigit() else ""
    return re.search(before + re.escape(text) + after, path.stem) is not None


def _several_files(video: str, files: list[Path], folder: Path) -> LockstepError:
    first, second = files[:2]
    if first.name == second.name:
        names = [str(path.relative_to(folder)) for path in (first, second)]
        what = f"{names[0]} and {names[1]} are both tracks of {video}"
        todo = f"{BY_FOLDER} takes each folder's {video} as a video of its own; "
        return LockstepError(what, str(folder), todo + f"else move {names[1]} away")
    what = f"{first.name} and {second.name} are both tracks of {video}"
    if len(files) > 2:
        what += f" ({len(files)} files)"
    if (FILTERED in first.stem) != (FILTERED in second.stem):
        todo = f"--prefer {FILTERED} takes the filtered one of each video, --prefer {RAW} the other"
        return LockstepError(what, str(folder), todo)
    known = {*first.stem.split("_"), FILTERED}
    differs = [word for word in second.stem.split("_") if word not in known]
    todo = f"--prefer {differs[0]} takes the second one" if differs else "keep one"
    if first.parent != second.parent:
        todo += f"; {BY_FOLDER} takes each folder's {video} as a video of its own"
    return LockstepError(what, str(folder), todo)


# ---- from tracks to signals ----------------------------------------------------------------------


def filled(track: Track, least: float, gap: int) -> tuple[np.ndarray, int, int]:
    """Return ((N, P, 2) positions, number of filled positions, number of missing positions).

    Positions with a likelihood below `least` are missing. Gaps of up to `gap` frames are filled
    linearly. Longer gaps are NaN.
    """
    xy, lost = track.xy.copy(), np.isnan(track.xy[:, :, 0]) | (track.likelihood < least)
    xy[lost], count = np.nan, 0
    for p in range(xy.shape[1]):
        # begin, end, begin, ...
        edges = np.flatnonzero(np.diff(np.concatenate([[0], lost[:, p], [0]])))
        for begin, end in edges.reshape(-1, 2):
            if end - begin <= gap and begin > 0 and end < len(xy):
                share = (np.arange(begin, end) - begin + 1)[:, None] / (end - begin + 1)
                xy[begin:end, p] = xy[begin - 1, p] * (1 - share) + xy[end, p] * share
                count += int(end - begin)
    return xy, count, int(lost.sum()) - count


def axis(
    parts: Sequence[str], centre: Sequence[str], front: Sequence[str], path: Path
) -> tuple[list[int], list[int]]:
    """Return the indices of the parts for the body's centre, and of the parts for the front.

    Unnamed parts are guessed from the names. Raises LockstepError without a guess.
    """
    for name in (*centre, *front):
        if name not in parts:
            raise LockstepError(f"no part {name}", str(path), f"the file has {', '.join(parts)}")

    def like(pattern: str) -> list[str]:
        return [
            name
            for name in parts
            if re.search(pattern, name, re.I) and not re.search("^(l|r)_|left|right", name, re.I)
        ]

    front = front or like(FRONT)[:1]
    centre = centre or [name for name in like(CENTRE) if name not in front][:1]
    if not centre and front and (tail := like(TAIL)):
        centre = [*front, tail[0]]  # half way between them
    if not centre or not front or {*centre} == {*front}:
        what = f"no {'centre' if front else 'front'} of the body among {', '.join(parts)}"
        raise LockstepError(
            what, str(path), "name them: --centre PART,PART takes their mean, --front PART"
        )
    return [parts.index(name) for name in centre], [parts.index(name) for name in front]


@dataclass(frozen=True)
class Frame:
    """A coordinate frame attached to an animal: its centre and the unit vector to its front.

    Both are (N, 2).
    """

    centre: np.ndarray
    ahead: np.ndarray

    def of(self, xy: np.ndarray) -> np.ndarray:
        """Convert (N, P, 2) pixels to coordinates relative to the centre.

        x runs along the body to the front, y across the body.
        """
        away = xy - self.centre[:, None]
        u, v = self.ahead[:, None, 0], self.ahead[:, None, 1]
        return np.stack(
            [away[..., 0] * u + away[..., 1] * v, away[..., 1] * u - away[..., 0] * v], -1
        )

    def speed(self, clock: Clock) -> np.ndarray:
        """Return (N,) speeds of the centre in pixels per second, from the adjacent frames.

        A frame beside a missing frame is NaN.
        """
        if len(self.centre) < 2:
            return np.zeros(1)
        if clock.own_s is None:
            return np.hypot(*np.gradient(self.centre, axis=0).T) * clock.fps
        with np.errstate(divide="ignore", invalid="ignore"):  # frames at one time
            return np.hypot(*np.gradient(self.centre, clock.own_s, axis=0).T)


def frame_of(xy: np.ndarray, centre: Sequence[int], front: Sequence[int]) -> Frame:
    middle = xy[:, [*centre]].mean(1)
    axis = xy[:, [*front]].mean(1) - middle
    length = np.hypot(axis[:, 0], axis[:, 1])
    with np.errstate(invalid="ignore", divide="ignore"):
        return Frame(middle, np.where(length[:, None] > 0, axis / length[:, None], np.nan))
