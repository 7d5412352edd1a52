"""Read robot demonstrations in LeRobot's format, versions 2.0, 2.1 and 3.0.

No conversion and no `lerobot` package is needed.

    meta/info.json                 fps, features {name: dtype, shape, names}, paths of the files
    meta/episodes*, meta/tasks*    one row per episode, one per task; .jsonl before version 3,
                                   .parquet since
    data/**.parquet                a row per frame: observation.*, action*, timestamp, frame_index,
                                   episode_index, ...
    videos/**.mp4                  pictures of features of dtype "video"; pictures of dtype "image"
                                   are PNG in data/

The numbers of all chosen episodes are kept in memory, as arrays in the order of episode_index, then
frame. A batch is one gather per feature. Pictures come from `formats.robots.frames`.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.contract import Batch, LockstepError
from engine.errors import console
from formats.arrays import is_file_name, stays_below
from formats.robots import stored_stats, timestamps, unlisted
from formats.robots.depth import Depth, depth_of
from formats.weights import hub

VERSIONS = ("v2.0", "v2.1", "v3.0")
VISUAL, STATE, ENV, ACTION = "VISUAL", "STATE", "ENV", "ACTION"
BOOKKEEPING = ("timestamp", "frame_index", "episode_index", "index", "task_index")
TEXTS = ("string", "language")
"""Types of ignored columns."""
QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
FILES = {
    "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
}
OLD_FILES = {  # before version 3
    "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
}
MEASURED = (
    "the measured ones are used; write the file again, or delete it, and they are always measured"
)
UNFINISHED = "the recording did not finish, or files are missing: record or copy it again"

T = TypeVar("T")
Stats = dict[str, dict[str, np.ndarray]]


@dataclass(frozen=True)
class Feature:
    """One feature of info.json.

    shape  of one frame; pictures are (C, H, W), whatever the order on disk
    names  of its numbers, flat; may be empty
    kind   VISUAL, STATE, ENV, ACTION, or None: not for a policy
    depth  coding of the distances of a depth camera
    """

    dtype: str
    shape: tuple[int, ...]
    names: list[str]
    kind: str | None
    is_picture: bool
    depth: Depth | None = None


@dataclass(frozen=True)
class Place:
    """The position of an episode's pictures.

    The pictures are from `start_s` to `end_s` of a video, in seconds, or begin at `first_row` of a
    table's `column`. The end is None if the dataset has none.
    """

    path: Path
    start_s: float = 0.0
    end_s: float | None = None
    first_row: int = 0
    column: str = ""


@dataclass(frozen=True)
class Demonstrations:
    """E episodes with N frames in total.

    columns   {name: (N, ...)} float32 or int64; the five of BOOKKEEPING are (N,), the rest
              (N, *shape)
    episodes  (E,) int64, episode_index of each, ascending
    start, end  (E,) int64, row range of each episode in `columns`
    stats     {feature: {mean, std, min, max, q01 ... q99}} float64: (D,) or the feature's shape,
              pictures (C, 1, 1). stats.json gives the statistics of the whole dataset. Without the
              file, the statistics of the chosen episodes are aggregated, and measured from the
              columns where an episode has none. Pictures may have none.
    tasks     texts by task_index
    lengths   {episode_index: frames} of the whole dataset, including episodes that are not chosen
    places    {camera: Place of each of the E episodes, None if the dataset names no file}; also of
              texts
    """

    root: Path
    version: str
    fps: float
    features: dict[str, Feature]
    tasks: list[str]
    columns: dict[str, np.ndarray]
    episodes: np.ndarray
    start: np.ndarray
    end: np.ndarray
    stats: Stats
    lengths: dict[int, int]
    places: dict[str, list[Place | None]]
    tolerance_s: float

    @property
    def cameras(self) -> list[str]:
        return [name for name, feature in self.features.items() if feature.is_picture]

    def name_of(self, row: int) -> str:
        """Return a text such as 'episode 3 frame 17' for a row of `columns`, for messages."""
        e = int(np.searchsorted(self.end, row, "right"))
        return f"episode {self.episodes[e]} frame {row - self.start[e]}"


def need(module: str, where: str = "dataset") -> Any:
    """Import an optional package at its first use.

    Raises LockstepError with the command that installs the package.
    """
    package = module.split(".")[0].replace("PIL", "pillow")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        what = f"robot data need the package {package}, which cannot be imported: {error}"
        raise LockstepError(what, where, f"pip install {package}") from None


# ---- find a dataset ------------------------------------------------------------------------------


def find(root: str, repo_id: str, revision: str = "", download: bool = False) -> Path:
    """Find the folder of a dataset on this machine.

    The search order is dataset.root, root/repo_id, LeRobot's cache, the hub's cache. With
    `download`, a `repo_id` that is in no cache is fetched. Raises LockstepError with every place of
    the search.
    """
    tried = (
        [Path(root).expanduser() / inside for inside in dict.fromkeys(["", repo_id])]
        if root
        else []
    )
    if repo_id:
        homes = (os.environ.get("HF_LEROBOT_HOME"), hub.home() / "lerobot")
        tried += [Path(home).expanduser() / repo_id for home in homes if home]
        cached = hub.repository("datasets", repo_id)
        # first; then, unless a revision is asked for, the newest
        wanted = hub.commit(cached, revision)
        found = [cached / "snapshots" / wanted] if revision else [*cached.glob("snapshots/*")]
        found = [folder for folder in found if folder.is_dir()]
        tried += sorted(found, key=lambda it: (it.name == wanted, it.stat().st_mtime), reverse=True)
        tried += [] if found else [cached / "snapshots" / (wanted if revision else "*")]
    for place in tried:
        if (place / "meta" / "info.json").is_file():
            return place
    if download and repo_id:
        hub.download("datasets", repo_id, revision)
        return find(root, repo_id, revision)
    raise LockstepError(
        "no dataset: "
        + (f"no meta/info.json in {', '.join(map(str, tried))}" if tried else "no place is named"),
        f"dataset.root={root or '(empty)'}, dataset.repo_id={repo_id or '(empty)'}",
        "copy the dataset to one of these places, or give dataset.root=FOLDER"
        + (", or --download, which fetches it from the hub" if repo_id else ""),
    )


# ---- reading
# --------------------------------------------------------------------------------------------------


class _Episode(NamedTuple):
    """A row of the episodes' table."""

    length: int
    data: Path
    videos: dict[str, Place]


def read(
    root: str | Path,
    episodes: Sequence[int] = (),
    exclude: Sequence[int] = (),
    tolerance_s: float = 1e-4,
) -> Demonstrations:
    """Read the numbers of a dataset.

    episodes, exclude  episode_index of the episodes to take (empty: all) and to leave out
    tolerance_s  largest distance of a timestamp from frame_index / fps, in seconds
    Raises LockstepError with file, episode and frame if the dataset is incomplete or inconsistent.
    """
    root = Path(root)
    info_path = root / "meta" / "info.json"
    info = _read_info(info_path)
    is_old, features = info["codebase_version"] != "v3.0", _features(info, info_path)
    table = _episodes(root, info, features, is_old)
    _check_counts(info, table, info_path)
    chosen = {e: table[e] for e in _choose(sorted(table), episodes, exclude, info_path)}
    columns, first_rows, numbers = _read_columns(features, chosen, exclude)
    _warn_of_unlisted(root, table, numbers)
    lengths = np.array([episode.length for episode in chosen.values()], dtype=np.int64)
    end = np.cumsum(lengths)
    places: dict[str, list[Place | None]] = {}
    for name, feature in features.items():
        if feature.dtype in ("image", "language"):
            places[name] = [
                Place(episode.data, first_row=first_rows[e], column=name)
                for e, episode in chosen.items()
            ]
        elif feature.is_picture:
            places[name] = [episode.videos.get(name) for episode in chosen.values()]
    demos = Demonstrations(
        root=root,
        version=info["codebase_version"],
        fps=info["fps"],
        features=features,
        tasks=_read_tasks(root / "meta" / ("tasks.jsonl" if is_old else "tasks.parquet")),
        columns=columns,
        episodes=np.array(list(chosen), dtype=np.int64),
        start=end - lengths,
        end=end,
        stats={},
        lengths={e: table[e].length for e in sorted(table)},
        places=places,
        tolerance_s=tolerance_s,
    )
    _check_rows(demos, exclude)
    of_whole = (root / "meta" / "stats.json").is_file()
    share = int(lengths.sum()) / sum(demos.lengths.values()) if of_whole else 1.0
    demos.stats.update(_stats(demos, _stored_stats(root, list(chosen)), share))
    return demos


def _read_info(path: Path) -> dict[str, Any]:
    info = _json(
        _text(path, "this is no LeRobot dataset, or only a part of one: give its root folder"), path
    )
    if (version := info.get("codebase_version")) not in VERSIONS:
        todo = f"{', '.join(VERSIONS)} are read; convert it with the LeRobot that wrote it"
        raise LockstepError(f"codebase_version {version!r} is not known", str(path), todo)
    fps = info.get("fps")
    if not isinstance(fps, (int, float)) or isinstance(fps, bool) or not fps > 0:
        raise LockstepError(f"fps {fps!r} is no rate", str(path), "give the frames per second")
    return info


def _features(info: Mapping[str, Any], path: Path) -> dict[str, Feature]:
    found = info.get("features")
    if not isinstance(found, dict) or not found:
        raise LockstepError("no features", str(path), UNFINISHED)
    if missing := [name for name in BOOKKEEPING if name not in found]:
        raise LockstepError(f"no feature {', '.join(missing)}", str(path), UNFINISHED)
    return {
        name: _feature(name, raw if isinstance(raw, dict) else {}, path)
        for name, raw in found.items()
    }


def _feature(name: str, raw: Mapping[str, Any], path: Path) -> Feature:
    dtype, shape = raw.get("dtype", ""), raw.get("shape", "")
    is_right = (
        isinstance(dtype, str)
        and isinstance(shape, list)
        and all(type(n) is int and n > 0 for n in shape)
    )
    is_picture = dtype in ("image", "video")
    if not is_right or (is_picture and len(shape) != 3):
        what = f"feature {name} has dtype {dtype!r} and shape {shape!r}"
        raise LockstepError(
            what, str(path), "give a dtype and a shape of whole numbers, pictures three"
        )
    if is_picture and not is_file_name(name):  # paths contain the name
        what = f"{name[:120]!r} cannot be a camera's name"
        raise LockstepError(
            what, str(path), "rename the feature: a name without /, of at most 200 bytes"
        )
    names, size = _flat_names(raw.get("names")), tuple(shape) or (1,)
    kind, depth = VISUAL if is_picture else _kind(name), None
    if is_picture:
        try:
            depth = depth_of(raw)
        except (TypeError, ValueError) as error:
            raise LockstepError(
                f"{name} is a depth camera with {error}", str(path), "fix its info"
            ) from None
        channels_last = size[2] in (1, 3, 4) and size[0] not in (1, 3, 4)
        if len(names) == 3:
            channels_last = names[2] in ("channel", "channels")
        if channels_last:
            size = (size[2], size[0], size[1])
    if depth and size[0] != 1:
        what = f"{name} is a depth camera of {size[0]} channels"
        raise LockstepError(what, str(path), "give it one, or drop is_depth_map from its info")
    return Feature(dtype, size, names, kind, is_picture, depth)


def _kind(name: str) -> str | None:
    """Return the policy's kind for a feature of numbers with this name, or None."""
    if name == "observation.environment_state":
        return ENV
    return (
        STATE if name.startswith("observation") else ACTION if name.startswith("action") else None
    )


def _flat_names(names: Any) -> list[str]:
    """Flatten names. Datasets use lists, lists of lists and {"motors": [...]}."""
    if isinstance(names, dict):
        names = [value for value in names.values() if isinstance(value, list)] or list(names)
    if isinstance(names, list):
        return [flat for name in names for flat in _flat_names(name)]
    return [] if names is None else [str(names)]


def _episodes(
    root: Path, info: Mapping[str, Any], features: Mapping[str, Feature], is_old: bool
) -> dict[int, _Episode]:
    """Read the table of episodes.

    Before version 3, each episode had its own file, whose name follows from the episode's number.
    """
    meta = root / "meta"
    tables = [meta / "episodes.jsonl"] if is_old else sorted(meta.glob("episodes/*/*.parquet"))
    if not tables:
        raise LockstepError("no table of episodes", str(meta / "episodes"), UNFINISHED)
    path = meta / "info.json"
    data, video = (
        info.get(key) or usual for key, usual in (OLD_FILES if is_old else FILES).items()
    )
    per_chunk = info.get("chunks_size") or 1000
    videos = [name for name, feature in features.items() if feature.dtype == "video"]
    table = {}
    for where, row in (pair for part in tables for pair in _rows(part)):
        e, length = _whole(row, "episode_index", where), _whole(row, "length", where)
        own = {"episode_chunk": e // per_chunk, "episode_index": e}
        places = {}
        for name in videos:
            inside = f"videos/{name}"
            if is_old or row.get(f"{inside}/file_index") is not None:
                file = _fill(
                    video, path, video_key=name, **(own if is_old else _numbers(row, inside, where))
                )
                start_s = _seconds(row, f"{inside}/from_timestamp", where) or 0.0
                end_s = _seconds(row, f"{inside}/to_timestamp", where)
                places[name] = Place(root / file, start_s, end_s)
        file = _fill(data, path, **(own if is_old else _numbers(row, "data", where)))
        table[e] = _Episode(length, root / file, places)
    return table


def _numbers(row: Mapping[str, Any], prefix: str, where: str) -> dict[str, int]:
    return {name: _whole(row, f"{prefix}/{name}", where) for name in ("chunk_index", "file_index")}


def _check_counts(info: Mapping[str, Any], table: Mapping[int, _Episode], path: Path) -> None:
    counts = {
        "total_episodes": len(table),
        "total_frames": sum(episode.length for episode in table.values()),
    }
    for name, count in counts.items():
        if info.get(name, count) != count:
            what = f"{name} is {info[name]}, but the table of episodes has {count}"
            raise LockstepError(what, str(path), UNFINISHED)
    if not table:
        raise LockstepError("no episodes", str(path), UNFINISHED)
    if empty := [e for e, episode in table.items() if episode.length < 1]:
        raise LockstepError(f"episode {empty[0]} has no frames", str(path), UNFINISHED)


def _choose(
    known: list[int], episodes: Sequence[int], exclude: Sequence[int], path: Path
) -> list[int]:
    for name, asked in (("episodes", episodes), ("exclude_episodes", exclude)):
        if unknown := sorted(set(asked) - set(known)):
            what = (
                f"dataset.{name} asks for episode {', '.join(map(str, unknown[:8]))}, which "
                "is not there"
            )
            todo = f"there are {len(known)} episodes from {known[0]} to {known[-1]}"
            raise LockstepError(what, str(path), todo)
    chosen = sorted(set(episodes or known) - set(exclude))
    if not chosen:
        raise LockstepError("every episode is excluded", str(path), "leave some in")
    return chosen


def _warn_of_unlisted(
    root: Path, table: Mapping[int, _Episode], found: Mapping[Path, list[int]]
) -> None:
    """Print a warning about rows in data/ that the table does not name.

    found  {file: episodes of its rows} of the files that were read
    """

    def read_numbers(path: Path) -> list[int]:
        try:
            column = _table(path, ["episode_index"]).column("episode_index")
        except (LockstepError, KeyError):
            return []
        return sorted({*column.to_pylist()} - {None})

    files = {e: episode.data for e, episode in table.items()}
    if text := unlisted.describe(root, files, found, read_numbers):
        console.warning(f"{root}: {text}\n")


class _Columns(NamedTuple):
    """The rows of the chosen episodes.

    values      {feature: (N, ...)}, the episodes one after the other
    first_rows  {episode: first row in its file}
    numbers     {file: episodes of all its rows, also of those that are not chosen}
    """

    values: dict[str, np.ndarray]
    first_rows: dict[int, int]
    numbers: dict[Path, list[int]]


def _read_columns(
    features: Mapping[str, Feature], chosen: Mapping[int, _Episode], exclude: Sequence[int]
) -> _Columns:
    wanted = {
        name: features[name] for name in ("episode_index", "frame_index")
    }  # read first: errors in later columns name episodes
    wanted |= {n: f for n, f in features.items() if not f.is_picture and f.dtype not in TEXTS}
    members: dict[Path, list[int]] = {}
    for e, episode in chosen.items():
        members.setdefault(episode.data, []).append(e)
    parts: dict[int, dict[str, np.ndarray]] = {}
    first_rows: dict[int, int] = {}
    numbers: dict[Path, list[int]] = {}
    for path, inside in members.items():
        table = _table_with(path, wanted, f"episode {inside[0]}: ")
        owner = _owner(table, features["episode_index"], path)
        numbers[path] = np.unique(owner).tolist()
        runs = _runs(owner, {e: chosen[e].length for e in inside}, path)
        first_rows |= {e: run.begin for e, run in runs.items()}
        # Faults in rows of episodes that are not chosen do not matter.
        chosen_rows = _rows_among(table, np.isin(owner, inside))
        columns = _to_columns(chosen_rows, wanted, path, exclude)
        for e, run in _runs_of(columns["episode_index"]).items():
            end = run.begin + run.length
            parts[e] = {name: column[run.begin : end] for name, column in columns.items()}
    values = {name: np.concatenate([parts[e][name] for e in chosen]) for name in wanted}
    return _Columns(values, first_rows, numbers)


class _Run(NamedTuple):
    """The rows of an episode in a table."""

    begin: int
    length: int


def _runs_of(owner: np.ndarray) -> dict[int, _Run]:
    """Return {episode: its first row and the number of its rows} of (N,) episode numbers."""
    indices, firsts, counts = np.unique(owner, return_index=True, return_counts=True)
    each = zip(indices.tolist(), firsts.tolist(), counts.tolist(), strict=True)
    return {e: _Run(begin, length) for e, begin, length in each}


def _runs(owner: np.ndarray, lengths: Mapping[int, int], path: Path) -> dict[int, _Run]:
    """Return the runs of the episodes of `lengths`, {episode: frames}.

    Raises LockstepError if an episode is in several pieces or has another number of rows.
    """
    there = _runs_of(owner)
    found = {}
    for e, length in lengths.items():
        begin, count = there.get(e, _Run(0, 0))
        if (owner[begin : begin + count] != e).any():
            what = f"episode {e} lies in several pieces, the first at row {begin}"
            todo = "write the frames of an episode one after the other"
            raise LockstepError(what, str(path), todo)
        if count != length:
            what = f"episode {e} has {count} rows, its table has {length}"
            raise LockstepError(what, str(path), UNFINISHED)
        found[e] = _Run(begin, count)
    return found


def _table_with(path: Path, wanted: Mapping[str, Feature], prefix: str) -> Any:
    """Read the `wanted` columns of a file."""
    table = _table(path, list(wanted), prefix)
    if missing := [name for name in wanted if name not in table.column_names]:
        raise LockstepError(
            f"no column {', '.join(missing)}, which info.json lists", str(path), UNFINISHED
        )
    return table


def _owner(table: Any, feature: Feature, path: Path) -> np.ndarray:
    """Return (N,) the episode of each row."""
    name = "episode_index"
    return _to_numpy(table.column(name), name, feature, _Rows(path, {}))


class _Rows(NamedTuple):
    """Rows of a file, for messages.

    columns  columns that were read already
    exclude  episodes that are left out already
    """

    path: Path
    columns: dict[str, np.ndarray]
    exclude: Sequence[int] = ()

    def refuse(self, row: int, what: str) -> NoReturn:
        """Raise LockstepError for a row, with the setting that leaves out its episode."""
        if len(self.columns) < 2:
            raise LockstepError(f"row {row}: {what}", str(self.path), UNFINISHED)
        episode = int(self.columns["episode_index"][row])
        name = f"episode {episode} frame {self.columns['frame_index'][row]}"
        todo = f"fix it, or leave the episode out: {_excluding([episode], self.exclude)}"
        raise LockstepError(f"{name}: {what}", str(self.path), todo)


def _excluding(episodes: Iterable[int], exclude: Sequence[int]) -> str:
    """Return the setting that leaves out some episodes, and those that are left out already."""
    numbers = sorted({*episodes, *exclude})
    return f"dataset.exclude_episodes={','.join(map(str, numbers))}"


def _rows_among(table: Any, kept: np.ndarray) -> Any:
    """Return the rows of an arrow table where (N,) `kept` is True, without a copy."""
    if kept.all():
        return table
    edges = np.flatnonzero(np.diff(kept, prepend=False, append=False))
    pieces = [table.slice(begin, end - begin) for begin, end in edges.reshape(-1, 2).tolist()]
    return need("pyarrow").concat_tables(pieces)


def _to_columns(
    table: Any, wanted: Mapping[str, Feature], path: Path, exclude: Sequence[int]
) -> dict[str, np.ndarray]:
    rows = _Rows(path, {}, exclude)
    for name, feature in wanted.items():
        rows.columns[name] = _to_numpy(table.column(name), name, feature, rows)
    return rows.columns


def _to_numpy(column: Any, name: str, feature: Feature, rows: _Rows) -> np.ndarray:
    """Convert an arrow column of numbers or of equally long lists to (N, *shape).

    A column of BOOKKEEPING becomes (N,).
    """
    pa, compute = need("pyarrow"), need("pyarrow.compute")
    array = column.combine_chunks()
    count, per_row = len(array), 1
    while True:
        array = array.storage if isinstance(array.type, pa.BaseExtensionType) else array
        if array.null_count:
            at = int(np.asarray(array.is_null()).argmax())
            rows.refuse(at // per_row, f"{name} has no value")
        if not isinstance(array, (pa.ListArray, pa.LargeListArray, pa.FixedSizeListArray)):
            break
        widths = np.asarray(compute.list_value_length(array))
        if (odd := widths != widths[:1]).any():
            at = int(odd.argmax())
            what = f"{name} has {widths[at]} numbers, {widths[0]} before"
            rows.refuse(at // per_row, what)
        array, per_row = array.flatten(), per_row * int(widths[0] if count else 0)
    is_float = pa.types.is_floating(array.type)
    if not (is_float or pa.types.is_integer(array.type) or pa.types.is_boolean(array.type)):
        what = f"{name} is of type {array.type}, not numbers"
        raise LockstepError(what, str(rows.path), _without(name))
    if count and per_row != math.prod(feature.shape):
        what = f"{name} has {per_row} numbers per frame, info.json has {feature.shape}"
        raise LockstepError(what, str(rows.path), "fix info.json or write the dataset again")
    flat = array.to_numpy(zero_copy_only=False)
    dtype = np.dtype(np.float32 if is_float else np.int64)
    if (wrong := _beyond(flat, dtype)).any():
        at = int(wrong.argmax())
        rows.refuse(at // per_row, f"{name} is {flat[at]:.6g}, too large for {dtype}")
    flat = flat.astype(dtype)
    return flat if name in BOOKKEEPING else flat.reshape(count, *feature.shape)


def _beyond(values: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Return (N,) bool: the finite values that are too large for the type."""
    if dtype.kind == "f":
        return np.isfinite(values) & (np.abs(values) > np.finfo(dtype).max)
    if values.dtype.kind == "b":
        return np.zeros(len(values), dtype=bool)
    return values > np.iinfo(dtype).max


def _without(name: str) -> str:
    """Return how a dataset is used whose column holds no numbers."""
    if name in BOOKKEEPING or _kind(name) == ACTION:
        return f"write numbers: {name} cannot be left out"
    return (
        f'write numbers, or give {name} the dtype "string" in meta/info.json: then it is not read'
    )


def _check_rows(demos: Demonstrations, exclude: Sequence[int]) -> None:
    columns = demos.columns
    # (N,)
    frame = np.arange(len(columns["index"])) - np.repeat(demos.start, demos.end - demos.start)

    def refuse(wrong: np.ndarray, what: str, todo: str) -> None:
        if not wrong.any():
            return
        episodes = np.unique(columns["episode_index"][wrong])
        if len(episodes) < len(demos.episodes):
            todo += f", or leave out what is wrong: {_excluding(episodes.tolist(), exclude)}"
        raise LockstepError(f"{demos.name_of(int(wrong.argmax()))}: {what}", str(demos.root), todo)

    for name, column in columns.items():
        if column.dtype == np.float32:
            wrong = ~np.isfinite(column).reshape(len(column), -1).all(1)
            refuse(
                wrong,
                f"{name} is not finite (NaN or infinity)",
                "fix it",
            )
    what = "frame_index does not count 0, 1, 2 ... from there"
    refuse(columns["frame_index"] != frame, what, "fix it")
    wrong = _check_timestamps(demos, frame)
    what = (
        f"its timestamp is off frame_index / fps ({demos.fps:g}) by more than "
        f"{demos.tolerance_s:g} s"
    )
    refuse(wrong, what, f"fix it, or give dataset.tolerance_s={_tolerance(demos, frame)}")
    task, count = columns["task_index"], len(demos.tasks)
    what = f"its task_index is none of the {count} tasks"
    refuse((task < 0) | (task >= count), what, "fix meta/tasks or the column")


def _tolerance(demos: Demonstrations, frame: np.ndarray) -> str:
    """Return the smallest tolerance with two digits that takes all timestamps."""
    off = np.abs(demos.columns["timestamp"].astype(np.float64) - frame / demos.fps).max()
    if off == 0:  # such as episodes of one frame
        return "0"
    step = 10.0 ** (math.floor(math.log10(off)) - 1)
    return f"{math.ceil(off / step) * step:.2g}"


def _check_timestamps(demos: Demonstrations, frame: np.ndarray) -> np.ndarray:
    """Return (N,) bool: the timestamps that are off `frame` / fps by more than the tolerance.

    Raises LockstepError if one cause, such as another rate, explains all of them. With a larger
    tolerance than the usual, the cause is a warning.
    """
    stamps = demos.columns["timestamp"]
    off = np.abs(stamps.astype(np.float64) - frame / demos.fps)
    # Timestamps are stored as float32. After half an hour their spacing exceeds the usual
    # tolerance.
    rounding = np.spacing(stamps.astype(np.float32))
    wrong = off > demos.tolerance_s + rounding
    if not (off > timestamps.USUAL_S + rounding).any():
        return wrong
    cause = timestamps.find_cause(stamps, frame, demos.columns["episode_index"], demos.fps)
    if cause and wrong.any():
        raise LockstepError(cause.what, str(demos.root), cause.todo)
    if cause:
        allowed = f"dataset.tolerance_s={demos.tolerance_s:g} allows this"
        console.warning(f"{demos.root}: {cause.what}; {allowed}, and the rate of info.json holds\n")
    return wrong


def _read_tasks(path: Path) -> list[str]:
    """Return the texts by task_index.

    The name of the text column varies. The function takes the column that is not task_index.
    """
    texts: dict[int, str] = {}
    for where, row in _rows(path):
        words = [
            value for name, value in row.items() if name != "task_index" and isinstance(value, str)
        ]
        if not words:
            raise LockstepError("a task without its text", where, UNFINISHED)
        texts[_whole(row, "task_index", where)] = words[0]
    return [texts.get(index, "") for index in range(max(texts, default=-1) + 1)]


def renamed(demos: Demonstrations, names: Mapping[str, str]) -> Demonstrations:
    """Return the demonstrations with renamed observations, {old: new}."""

    def new(of: Mapping[str, T]) -> dict[str, T]:
        return {names.get(name, name): value for name, value in of.items()}

    features = {
        name: feature
        if feature.is_picture or name not in names.values()
        else replace(feature, kind=_kind(name))
        for name, feature in new(demos.features).items()
    }
    stats, places = new(demos.stats), new(demos.places)
    return replace(demos, features=features, columns=new(demos.columns), stats=stats, places=places)


# ---- statistics
# --------------------------------------------------------------------------------------------------


def aggregate(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Combine the {mean, std, min, max, count} of one feature over several episodes.

    The mean weights each episode by its count. The variance is the variance within episodes plus
    the variance of the episode means: sum n_i (s_i^2 + (m_i - m)^2) / sum n_i.
    """
    count = np.array([float(np.asarray(part["count"]).reshape(-1)[0]) for part in parts])
    mean, std, low, high = (
        np.stack([part[name] for part in parts]) for name in ("mean", "std", "min", "max")
    )
    share = (count / count.sum()).reshape(-1, *[1] * (mean.ndim - 1))
    middle = (share * mean).sum(0)
    spread = np.sqrt((share * (std**2 + (mean - middle) ** 2)).sum(0))
    return {
        "mean": middle,
        "std": spread,
        "min": low.min(0),
        "max": high.max(0),
        "count": np.array([count.sum()]),
    }


def measure(column: np.ndarray) -> dict[str, np.ndarray]:
    """Measure (N, ...) numbers: {mean, std, min, max, q01 ... q99}, each float64 (...).

    The result also has count (1,).
    """
    wide = column.astype(np.float64)
    quantiles = np.quantile(wide, list(QUANTILES.values()), axis=0)
    return _moments(wide) | dict(zip(QUANTILES, quantiles, strict=True))


def _moments(column: np.ndarray) -> dict[str, np.ndarray]:
    """Measure (N, ...) numbers without the quantiles, which take longest."""
    wide = column.astype(np.float64)
    stats = {"mean": wide.mean(0), "std": wide.std(0), "min": wide.min(0), "max": wide.max(0)}
    return stats | {"count": np.array([len(wide)])}


def _stored_stats(root: Path, chosen: Sequence[int]) -> Stats:
    """Return the stored statistics of the dataset.

    Quantiles of episodes are omitted, because quantiles cannot be combined.
    """
    whole, each = root / "meta" / "stats.json", root / "meta" / "episodes_stats.jsonl"
    if whole.is_file():
        return {name: _arrays(stats) for name, stats in _json(_text(whole), whole).items()}
    if not each.is_file():
        return {}
    parts: dict[str, list[dict[str, np.ndarray]]] = {}
    wanted = set(chosen)
    for where, row in _rows(each):
        if _whole(row, "episode_index", where) in wanted:
            for name, stats in row.get("stats", {}).items():
                parts.setdefault(name, []).append(_arrays(stats))
    basic = {"mean", "std", "min", "max", "count"}
    # A feature that an episode lacks is measured: statistics of a part of the frames would be
    # wrong.
    return {
        name: aggregate(part)
        for name, part in parts.items()
        if len(part) == len(wanted) and all(basic <= set(stats) for stats in part)
    }


def _arrays(stats: Any) -> dict[str, np.ndarray]:
    try:
        return {name: np.array(value, dtype=np.float64) for name, value in stats.items()}
    except (AttributeError, TypeError, ValueError):
        return {}


def _stats(demos: Demonstrations, stored: Stats, share: float = 1.0) -> Stats:
    """Return `stored` statistics with the feature's shape; measure the rest.

    Statistics that the frames contradict are measured, too, and a warning names them.

    share  frames in `columns`, as a share of the frames that `stored` describes
    """
    names = ("mean", "std", "min", "max", *QUANTILES)
    stats: Stats = {}
    for name, feature in demos.features.items():
        shape = (feature.shape[0], 1, 1) if feature.is_picture else feature.shape
        scale = feature.depth.factor if feature.depth else 1  # millimetres per stored unit of depth
        fits = {
            key: scale * value.reshape(shape)
            for key, value in stored.get(name, {}).items()
            if key in names and value.size == math.prod(shape) and np.isfinite(value).all()
        }
        if feature.is_picture and not feature.depth:
            fits, note = stored_stats.of_pixels(fits)
            _warn_of_stats(demos, name, note)
        if name in demos.columns and name not in BOOKKEEPING:
            if fits:
                counted = {"count": stored[name].get("count", np.zeros(1))}
                moments = _moments(demos.columns[name])
                note = stored_stats.find_difference(fits | counted, moments, feature.names, share)
                _warn_of_stats(demos, name, note and f"are of other frames ({note}): {MEASURED}")
                fits = {} if note else fits
            if len(fits) < len(names):
                measured = measure(demos.columns[name])
                fits = {key: measured[key].reshape(shape) for key in names} | fits
        if fits:
            stats[name] = fits
    return stats


def _warn_of_stats(demos: Demonstrations, name: str, note: str) -> None:
    """Print a warning about the stored statistics of a feature; nothing if `note` is empty."""
    if note:
        console.warning(f"{demos.root}: the statistics of {name} in meta/ {note}\n")


def measured_again(demos: Demonstrations, rows: np.ndarray) -> Demonstrations:
    """Return the demonstrations with statistics of these rows of `columns` only, (N,) bool.

    Pictures have no statistics in the result.
    """
    some = replace(demos, columns={name: column[rows] for name, column in demos.columns.items()})
    return replace(demos, stats=_stats(some, {}))


# ---- names and rate
# --------------------------------------------------------------------------------------------------


def recorded_facts(sets: Sequence[Demonstrations]) -> dict[str, list[str]]:
    """Return {fact: its text in each set}: the rate, and the names of each feature's numbers.

    A feature without names in all sets is left out.
    """
    facts = {"fps": [f"{demos.fps:g}" for demos in sets]}
    for name, feature in sets[0].features.items():
        if feature.kind and not feature.is_picture:
            names = [", ".join(demos.features[name].names) for demos in sets]
            if any(names):
                facts[f"names of {name}"] = names
    return facts


# ---- batches
# --------------------------------------------------------------------------------------------------


class Chunks:
    """Windows over time around each frame of some episodes.

    episodes  (e,) episode_index of the chosen episodes; each frame is a sample
    deltas    {feature: frames relative to the sample's frame}, e.g. {"action": [0, 1, ..., 49],
              "observation.state": [-1, 0]}
    pictures  `formats.robots.frames.Frames` with the cameras' pictures; None: batches have none
    skipped   frames at the end of each episode that are not samples
    labels    (len,) int64: each sample's task_index
    sources   (len,) str: each sample's episode_index
    weights   (len,) float64: number of a sample's action steps inside its episode (1 if `deltas`
              has no "action")
    """

    def __init__(
        self,
        demos: Demonstrations,
        episodes: Iterable[int],
        deltas: Mapping[str, Sequence[int]],
        pictures: Any = None,
        skipped: int = 0,
    ):
        chosen = np.array(list(episodes), dtype=np.int64)
        if unknown := sorted(set(chosen.tolist()) - set(demos.episodes.tolist())):
            raise LockstepError(
                f"episode {unknown[0]} was not read", str(demos.root), "read it first"
            )
        for name in deltas:
            kind = demos.features[name].kind if name in demos.features else None
            if kind is None or not len(deltas[name]) or (kind == VISUAL and pictures is None):
                known = [
                    n
                    for n, f in demos.features.items()
                    if f.kind and (pictures or not f.is_picture)
                ]
                what = (
                    f"no frames of {name} can be given"
                    if name in demos.features
                    else f"no feature {name}"
                )
                raise LockstepError(what, str(demos.root), f"there are {', '.join(known)}")
        e = np.searchsorted(demos.episodes, chosen)
        first, end = demos.start[e], demos.end[e]
        counts = np.maximum(end - first - skipped, 0)
        rows = [np.arange(a, a + count) for a, count in zip(first, counts, strict=True)]
        # (len,) of `demos.columns`
        self.rows = torch.from_numpy(np.concatenate([np.arange(0), *rows]))
        self.first = torch.from_numpy(
            np.repeat(first, counts)
        )  # (len,) first row of the sample's episode
        self.last = torch.from_numpy(np.repeat(end - 1, counts))
        self.deltas = {
            name: torch.tensor(list(steps), dtype=torch.int64) for name, steps in deltas.items()
        }
        self.pictures = pictures
        self.tasks = demos.tasks
        self.facts = recorded_facts([demos])
        self.cameras = demos.cameras if pictures else []
        numbers = [
            name
            for name, feature in demos.features.items()
            if feature.kind and name in demos.columns
        ]
        self.columns = {name: torch.from_numpy(demos.columns[name]) for name in numbers}
        columns = {
            name: demos.columns[name] for name in ("task_index", "episode_index", "frame_index")
        }
        self.indices = {
            name: torch.from_numpy(array)
            for name, array in (columns | {"row": demos.columns["index"]}).items()
        }
        inside = torch.zeros(len(self.rows), dtype=torch.float64)
        for step in self.deltas.get("action", torch.zeros(1, dtype=torch.int64)):
            at = self.rows + step
            inside += (at >= self.first) & (at <= self.last)
        self.weights = inside.numpy()
        self.labels = demos.columns["task_index"][self.rows.numpy()]
        self.sources = demos.columns["episode_index"][self.rows.numpy()].astype(str)

    def __len__(self) -> int:
        return len(self.rows)

    def repeats(self) -> np.ndarray:
        """Return (len,) float64: how often an epoch has each sample, on average."""
        return np.ones(len(self))

    @property
    def held(self) -> dict[str, Any]:
        """Return the arrays in memory, for the data's fingerprint. The pictures are in files."""
        places = {"rows": self.rows, "first rows": self.first, "last rows": self.last}
        texts = {"tasks": np.array(self.tasks)}
        texts |= {name: np.array(values) for name, values in self.facts.items()}
        return self.columns | self.indices | places | texts

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return the batch of B indices. For each feature of a policy the batch holds

            <name>         (B, T, ...) if `deltas` has T steps for the feature, else (B, ...);
                           pictures are uint8 (..., C, H, W)
            <name>_is_pad  (B, T) bool, with `deltas` only: True outside the episode, where the
                           first or the last frame is repeated

        The batch also has `task_index`, `episode_index`, `frame_index` and `row` (the dataset's own
        `index`), (B,) int64.
        """
        chosen = torch.as_tensor(indices)
        rows = self.rows[chosen]
        batch: Batch = {key: column[rows] for key, column in self.indices.items()}
        windows = {}
        for name in self.deltas:
            windows[name], batch[f"{name}_is_pad"] = self._window(name, chosen)
        for name, column in self.columns.items():
            at = windows.get(name, rows)
            batch[name] = column.index_select(0, at.view(-1)).view(*at.shape, *column.shape[1:])
        for name in self.cameras:
            at = windows.get(name, rows)
            pixels = torch.from_numpy(self.pictures.get(name, at.view(-1).numpy()))
            batch[name] = pixels.view(*at.shape, *pixels.shape[1:])
        return batch

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[0] for name, values in self.__getitems__([index]).items()}

    def prefetch(self, indices: Sequence[int]) -> None:
        """Start to read the pictures of these samples from the disk; return at once."""
        chosen = torch.as_tensor(indices)
        for name in self.cameras:
            at = self._window(name, chosen)[0] if name in self.deltas else self.rows[chosen]
            self.pictures.prefetch(name, at.view(-1).numpy())

    def _window(self, name: str, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (B, T) rows of a feature around the `chosen` samples, and a mask.

        The mask is True for rows outside the episode.
        """
        at = self.rows[chosen, None] + self.deltas[name]
        inside = at.clamp(self.first[chosen, None], self.last[chosen, None])
        return inside, inside != at


def split(episodes: np.ndarray, val_share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (train, val) episodes, both ascending.

    Episodes are never divided, because frames of an episode are near copies. With two or more
    episodes and a `val_share` above 0, each side has at least one. The same arguments give the same
    split.
    """
    episodes = np.asarray(episodes, dtype=np.int64)
    if not 0.0 <= val_share < 1.0:
        raise LockstepError(
            f"val_share {val_share} is not a share", "dataset", "give one from 0 to below 1"
        )
    count = 0
    if val_share and len(episodes) > 1:
        count = min(max(round(len(episodes) * val_share), 1), len(episodes) - 1)
    order = np.random.default_rng(seed).permutation(len(episodes))
    return np.sort(episodes[order[count:]]), np.sort(episodes[order[:count]])


# ---- files
# --------------------------------------------------------------------------------------------------


def _text(path: Path, todo: str = UNFINISHED) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise LockstepError(f"cannot read {path.name}: {error.strerror}", str(path), todo) from None
    except UnicodeDecodeError:
        raise LockstepError("no text in UTF-8", str(path), UNFINISHED) from None


def _json(text: str, where: str | Path) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise LockstepError("no JSON, or cut short", str(where), UNFINISHED) from None
    if not isinstance(found, dict):
        raise LockstepError("a JSON object is expected", str(where), UNFINISHED)
    return found


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location for messages, row) of a .jsonl or .parquet file."""
    if path.suffix == ".parquet":
        for number, row in enumerate(_table(path).to_pylist()):
            yield f"{path}:{number}", row
    else:
        for number, text in enumerate(_text(path).splitlines(), 1):
            if text.strip():
                yield f"{path}:{number}", _json(text, f"{path}:{number}")


def _whole(row: Mapping[str, Any], name: str, where: str) -> int:
    value = row.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise LockstepError(f"{name} is {value!r}, no whole number", where, UNFINISHED)
    return value


def _seconds(row: Mapping[str, Any], name: str, where: str) -> float | None:
    """Return a time of a row; None if the row has none."""
    value = row.get(name)
    if value is None:
        return None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        raise LockstepError(f"{name} is {value!r}, no time in seconds", where, UNFINISHED)
    return float(value)


_FIELD = re.compile(r"\{(\w+)(?::\d{0,2}d?)?\}")
"""A template's field: a name and optionally a width of up to two digits. Python's format() would
accept any width and attributes."""


def _fill(template: Any, path: Path, **names: Any) -> str:
    try:
        rest = _FIELD.sub("", template)
        if {*"{}"} & {*rest} or not stays_below(found := template.format(**names)):
            raise ValueError
        return str(found)
    except (TypeError, KeyError, ValueError):
        known = ", ".join(f"{{{name}}}" for name in names)
        what = f"info.json names its files by {repr(template)[:120]}"
        raise LockstepError(what, str(path), f"use {known} in it, and stay in the folder") from None


def value_at(place: Place) -> Any:
    """Return the value of a table's column at the first row of an episode."""
    pa, pq = need("pyarrow"), need("pyarrow.parquet")
    try:
        file, row = pq.ParquetFile(place.path), place.first_row
        for group in range(file.num_row_groups):
            if row < (count := file.metadata.row_group(group).num_rows):
                return (
                    file.read_row_group(group, columns=[place.column])
                    .column(place.column)[row]
                    .as_py()
                )
            row -= count
    except (OSError, pa.ArrowException, KeyError) as error:
        what = f"no {place.column} can be read: {str(error).splitlines()[0]}"
        raise LockstepError(what, str(place.path), UNFINISHED) from None
    return None


def _table(path: Path, columns: Sequence[str] = (), prefix: str = "") -> Any:
    """Read columns of a parquet file.

    Without `columns`, read all columns except the statistics of episodes, which are most of the
    bytes.
    """
    pa, pq = need("pyarrow"), need("pyarrow.parquet")
    try:
        file = pq.ParquetFile(path)
        names = columns or [
            name for name in file.schema_arrow.names if not name.startswith("stats/")
        ]
        return file.read(columns=names, use_threads=False)
    except FileNotFoundError:
        raise LockstepError(f"{prefix}no file {path.name}", str(path), UNFINISHED) from None
    except (OSError, pa.ArrowException) as error:
        what = f"{prefix}no parquet file, or cut short: {str(error).splitlines()[0]}"
        raise LockstepError(what, str(path), UNFINISHED) from None
