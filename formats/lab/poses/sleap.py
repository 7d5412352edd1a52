"""Read tracks of SLEAP: the analysis .h5, and the analysis CSV.

.h5    tracks (animals, 2, nodes, frames) or, with frames first, (frames, animals, nodes, 2);
       node_names, track_names, point_scores, video_path
CSV    track, frame_idx, NODE.x, NODE.y, NODE.score of each node; a row per animal and frame, no row
       for a frame without the animal
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from engine.contract import LockstepError
from formats.arrays import text_lines
from formats.cells import number_of
from formats.lab.events.pairing import stem_of
from formats.lab.poses.track import Track, make_track
from formats.tables import csv_rows

FRAME = "frame_idx"
ORDERS = {
    ("track", "xy", "node", "frame"): "animals first",
    ("frame", "track", "node", "xy"): "frames first",
}
MOST_FRAMES = 10**8


def video_of(path: Path, video_path: str = "") -> str:
    """Return the name of the video of a file, from its path in the file, else from the file's name.

    SLEAP names an export after the project, the number of the video and the video:
    labels.v001.000_mouse1.analysis.h5
    """
    if video_path:
        return stem_of(video_path)
    name = path.name[: -len(path.suffix)]
    if exported := re.fullmatch(r".+\.\d{3}_(.+)\.analysis", name):
        return exported[1]
    return stem_of(name.removesuffix(".analysis"))


# ---- .h5
# --------------------------------------------------------------------------------------------------


def video_of_h5(path: Path, file: Any) -> str:
    """Return the name of the video of an open file."""
    paths = _texts(file["video_path"][()]) if "video_path" in file else []
    return video_of(path, paths[0] if paths else "")


def read_h5(path: Path, file: Any) -> list[Track]:
    """Return the track of each animal of an open file. Raises LockstepError."""
    nodes = _texts(file["node_names"][()])
    animals = _texts(file["track_names"][()]) if "track_names" in file else []
    xy = np.asarray(file["tracks"][()], dtype=np.float64)
    scores = np.asarray(file["point_scores"][()] if "point_scores" in file else [], np.float64)
    order = _order(file["tracks"], len(nodes), len(animals))
    if order == "animals first":
        xy = xy.transpose(0, 3, 2, 1)
        scores = scores.transpose(0, 2, 1) if scores.ndim == 3 else scores
    elif order == "frames first":
        xy = xy.swapaxes(0, 1)
        scores = scores.swapaxes(0, 1) if scores.ndim == 3 else scores
    else:
        what = f"tracks have shape {xy.shape}, node_names {len(nodes)} names"
        raise LockstepError(what, str(path), "SLEAP's are (animals, 2, nodes, frames)")
    if scores.shape != xy.shape[:3]:
        scores = np.ones(xy.shape[:3])
    video = video_of_h5(path, file)
    names = animals or [f"track_{n}" for n in range(len(xy))]
    several = len(xy) > 1
    tracks = []
    for name, one, score in zip(names, xy, scores, strict=True):
        score[np.isnan(score)] = 1.0  # placed by hand
        tracks.append(make_track(path, video, name if several else "", nodes, one, score))
    return tracks


def _order(stored: Any, nodes: int, animals: int) -> str:
    """Return the order of the axes of `tracks`: animals first, frames first, or an empty text.

    (7, 2, 2, 2) of two nodes fits both orders: the names of the axes or the number of animals
    decide.
    """
    shape = stored.shape
    if len(shape) != 4:
        return ""
    named = stored.attrs.get("dims", "")
    if named:
        return ORDERS.get(tuple(json.loads(named)), "")
    is_first = shape[1:3] == (2, nodes)
    is_last = shape[2:] == (nodes, 2)
    if is_first and is_last and animals:
        return "animals first" if shape[0] == animals else "frames first"
    if is_first:
        return "animals first"
    return "frames first" if is_last else ""


def _texts(values: Any) -> list[str]:
    return [
        each.decode() if isinstance(each, bytes) else str(each) for each in np.atleast_1d(values)
    ]


# ---- CSV
# --------------------------------------------------------------------------------------------------


def is_csv(header: list[str]) -> bool:
    """Return whether the columns are those of SLEAP's analysis CSV."""
    return FRAME in header and any(name.endswith(".x") for name in header)


def read_csv(path: Path) -> list[Track]:
    """Return the track of each animal of an analysis CSV. Raises LockstepError with the line."""
    header, rows = csv_rows(path, text_lines(path))
    nodes = _nodes(path, header)
    animals: dict[str, dict[int, list[float]]] = {}
    videos: set[str] = set()
    for line, cells in rows:
        row = dict(zip(header, cells, strict=False))
        where = f"{path}:{line}"
        frame, values = _instance(row, nodes, where)
        videos.add(row.get("video", "") or row.get("video_path", ""))
        of_animal = animals.setdefault(row.get("track", "").strip(), {})
        if frame in of_animal or len(videos) > 1:
            what = "a second video" if len(videos) > 1 else f"a second animal in frame {frame}"
            todo = "track the animals in SLEAP, and export each video to a file of its own"
            raise LockstepError(what, where, todo)
        of_animal[frame] = values
    if not animals:
        raise LockstepError("no frames", str(path), "give the track of a video")
    count = 1 + max(frame for frames in animals.values() for frame in frames)
    video = video_of(path, next(iter(videos)))
    tracks = []
    for animal, frames in animals.items():
        points = np.full((count, len(nodes), 3), np.nan)
        points[[*frames]] = np.reshape([*frames.values()], (len(frames), len(nodes), 3))
        name = animal if len(animals) > 1 else ""
        scores = np.nan_to_num(points[:, :, 2], nan=1.0)  # placed by hand
        tracks.append(make_track(path, video, name, nodes, points[:, :, :2], scores))
    return tracks


def _nodes(path: Path, header: list[str]) -> list[str]:
    nodes = [name.removesuffix(".x") for name in header if name.endswith(".x")]
    for node in nodes:
        if f"{node}.y" not in header:
            raise LockstepError(f"{node} has no y", f"{path}:1", "export the analysis CSV again")
    if several := [name for name in header if name.endswith(".track")]:
        what = f"a column {several[0]}: all animals of a frame in one row"
        raise LockstepError(what, f"{path}:1", "export the analysis CSV, a row for each animal")
    return nodes


def _instance(row: dict[str, str], nodes: list[str], where: str) -> tuple[int, list[float]]:
    """Return the frame, and x, y and score of each node; NaN for an empty cell."""
    values = []
    try:
        frame = int(row[FRAME])
        if not 0 <= frame < MOST_FRAMES:
            raise ValueError
        for node in nodes:
            position = [row[f"{node}.x"], row[f"{node}.y"], row.get(f"{node}.score", "1")]
            values += [number_of(cell) for cell in position]
    except (KeyError, ValueError):
        what = "no frame, or not a number or nothing in each cell"
        raise LockstepError(what, where, "export the analysis CSV again") from None
    return frame, values
