"""Read tracks of body parts from DeepLabCut and SLEAP, and convert tracks to network inputs.

DeepLabCut   CSV with header rows scorer, (individuals,) bodyparts, coords; then a row per frame: x,
             y, likelihood of each part
SLEAP        analysis .h5 with tracks (animals, 2, nodes, frames) or, with frames first, (frames,
             animals, nodes, 2); node_names, track_names, point_scores; needs h5py: pip install h5py
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.contract import LockstepError
from formats.arrays import text_lines
from formats.lab.behaviour import stem_of

READ = "a DeepLabCut CSV, a SLEAP analysis .h5, or a folder of them"
CENTRE = "body_?cent|centre|center|centroid|thorax|torso|spine_?mid|mid_?spine|middle|spine|back"
FRONT = "nose|snout|head"
TAIL = "tail_?base|base_?tail|tail_?root|tail_?start|tail_?0|hip|tti"


@dataclass(frozen=True)
class Track:
    """The body parts of one animal in one video.

    video       name of the video, without suffix
    animal      name in the file; empty if the file has only one animal
    parts       P names
    xy          (N, P, 2) float64 pixels, NaN for a missing part
    likelihood  (N, P) from 0 to 1, 0 for a missing part
    """

    path: Path
    video: str
    animal: str
    parts: list[str]
    xy: np.ndarray
    likelihood: np.ndarray


def read(path: Path) -> list[Track]:
    """Return the track of each animal of a file. Raises LockstepError with file and line."""
    kind = path.suffix.lower()
    if kind == ".csv":
        return _deeplabcut(path)
    if kind == ".h5":
        return _sleap(path)
    todo = {".slp": "in SLEAP: File, Export Analysis HDF5"}.get(kind, f"give {READ}")
    raise LockstepError(f"cannot read tracks of kind {kind!r}", str(path), todo)


# ---- files
# --------------------------------------------------------------------------------------------------


def _deeplabcut(path: Path) -> list[Track]:
    lines = text_lines(path)
    if lines[:1] and lines[0].startswith("version https://git-lfs"):
        raise LockstepError(
            "a git-lfs pointer, not the file itself", str(path), "git lfs pull in that repository"
        )
    rows = [*csv.reader(lines)]
    heads: dict[str, list[str]] = {}
    for row in rows[:4]:
        if row and row[0] in ("scorer", "individuals", "bodyparts", "coords"):
            heads[row[0]] = [cell.strip() for cell in row[1:]]
    if not {"bodyparts", "coords"} <= heads.keys():
        what = (
            "the first lines begin with "
            f"{', '.join(repr(row[0]) for row in rows[:3] if row) or 'nothing'}"
        )
        raise LockstepError(
            what, f"{path}:1", "DeepLabCut's begin with scorer, bodyparts and coords"
        )
    parts, coords = heads["bodyparts"], heads["coords"]
    animals = heads.get("individuals", [""] * len(parts))
    places = {
        (*key, coord): c
        for c, (*key, coord) in enumerate(zip(animals, parts, coords, strict=False))
    }
    of = {
        animal: [*dict.fromkeys(p for a, p in zip(animals, parts, strict=False) if a == animal)]
        for animal in animals
    }
    for animal, names in of.items():
        for part in names:
            if missing := [c for c in ("x", "y") if (animal, part, c) not in places]:
                raise LockstepError(
                    f"{part} has no {missing[0]}", f"{path}:{len(heads)}", "export the file again"
                )
    values = np.full((len(rows) - len(heads), len(parts)), np.nan)
    for n, row in enumerate(rows[len(heads) :]):
        where = f"{path}:{n + len(heads) + 1}"
        if len(row) != len(parts) + 1:
            raise LockstepError(
                f"{len(row)} cells, the header has {len(parts) + 1}", where, "export the file again"
            )
        try:
            if int(float(row[0])) != n:
                raise ValueError
            values[n] = [float(cell) if cell.strip() else np.nan for cell in row[1:]]
        except ValueError:
            what = f"not frame {n} with a number or nothing in each cell"
            raise LockstepError(
                what, where, "give the track of a whole video, as DeepLabCut writes it"
            ) from None
    stem, tracks = re.split("DLC_", path.stem)[0] or path.stem, []
    for animal, names in of.items():
        xy = np.stack([values[:, [places[animal, part, c] for part in names]] for c in "xy"], 2)
        sure = [places.get((animal, part, "likelihood")) for part in names]
        columns = [np.ones(len(values)) if c is None else values[:, c] for c in sure]
        tracks.append(
            _track(path, stem, animal if len(of) > 1 else "", names, xy, np.stack(columns, 1))
        )
    return tracks


def _sleap(path: Path) -> list[Track]:
    try:
        import h5py
    except ImportError as error:
        raise LockstepError(
            f"h5py is needed to read an .h5: {error}", str(path), "pip install h5py"
        ) from None
    try:
        with h5py.File(path, "r") as file:
            if "tracks" not in file or "node_names" not in file:
                todo = "of DeepLabCut export the CSV (save_as_csv), of SLEAP the analysis .h5"
                raise LockstepError(
                    f"holds {', '.join(file) or 'nothing'}, not SLEAP's tracks", str(path), todo
                )
            found: dict[str, Any] = {name: file[name][()] for name in file}
    except OSError as error:
        raise LockstepError(
            f"no HDF5 file: {str(error)[:120]}", str(path), "export it again"
        ) from None
    nodes, xy = _texts(found["node_names"]), np.asarray(found["tracks"], dtype=np.float64)
    scores = np.asarray(found.get("point_scores", []), dtype=np.float64)
    # SLEAP's own layout: (animals, 2, nodes, frames)
    if xy.ndim == 4 and xy.shape[1:3] == (2, len(nodes)):
        xy, scores = (
            xy.transpose(0, 3, 2, 1),
            scores.transpose(0, 2, 1) if scores.ndim == 3 else scores,
        )
    elif xy.ndim == 4 and xy.shape[2:] == (len(nodes), 2):
        xy, scores = xy.swapaxes(0, 1), scores.swapaxes(0, 1) if scores.ndim == 3 else scores
    else:
        what = f"tracks have shape {xy.shape}, node_names {len(nodes)} names"
        raise LockstepError(what, str(path), "SLEAP's are (animals, 2, nodes, frames)")
    scores = scores if scores.shape == xy.shape[:3] else np.ones(xy.shape[:3])
    animals = _texts(found.get("track_names", [])) or [f"track_{n}" for n in range(len(xy))]
    videos = _texts(found.get("video_path", []))
    stem = stem_of(
        videos[0]
        if videos and videos[0]
        else path.name.removesuffix(".h5").removesuffix(".analysis")
    )
    several = len(xy) > 1
    return [
        _track(path, stem, name if several else "", nodes, one, score)
        for name, one, score in zip(animals, xy, scores, strict=True)
    ]


def _texts(values: Any) -> list[str]:
    return [
        each.decode() if isinstance(each, bytes) else str(each) for each in np.atleast_1d(values)
    ]


def _track(
    path: Path, video: str, animal: str, parts: list[str], xy: np.ndarray, likelihood: np.ndarray
) -> Track:
    if not len(xy):
        raise LockstepError("no frames", str(path), "give the track of a video")
    lost = ~np.isfinite(xy).all(2)
    xy = np.where(lost[:, :, None], np.nan, xy)
    return Track(
        path, video, animal, parts, xy, np.where(lost | np.isnan(likelihood), 0.0, likelihood)
    )


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

    def speed(self, fps: float) -> np.ndarray:
        """Return (N,) speeds of the centre in pixels per second, from the adjacent frames.

        A frame beside a missing frame is NaN.
        """
        return (
            np.hypot(*np.gradient(self.centre, axis=0).T) * fps
            if len(self.centre) > 1
            else np.zeros(1)
        )


def frame_of(xy: np.ndarray, centre: Sequence[int], front: Sequence[int]) -> Frame:
    middle = xy[:, [*centre]].mean(1)
    axis = xy[:, [*front]].mean(1) - middle
    length = np.hypot(axis[:, 0], axis[:, 1])
    with np.errstate(invalid="ignore", divide="ignore"):
        return Frame(middle, np.where(length[:, None] > 0, axis / length[:, None], np.nan))
