"""Assemble recorded episodes into a LeRobot dataset of version 3.0, new or extended."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.contract import LockstepError
from formats.robots import encoders, lerobot, recording
from formats.robots import lerobot_files as files
from formats.robots.depth import Depth
from formats.robots.lerobot import BOOKKEEPING, FILES, Demonstrations, Stats, measure, need
from formats.robots.lerobot_files import NUMBERS, OWN, Declared

EPISODES = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
SUMMED = ("meta/info.json", "meta/stats.json", "meta/tasks.parquet")
"""The files that every addition rewrites."""


@dataclass(frozen=True)
class Base:
    """A dataset to extend.

    rows    of the table of episodes, without statistics
    schema  of the table's last file
    stats   of stats.json
    """

    info: dict[str, Any]
    demos: Demonstrations
    rows: list[dict[str, Any]]
    schema: Any
    stats: Stats

    @property
    def counts(self) -> tuple[int, int]:
        """Return the numbers of episodes and frames."""
        return len(self.demos.lengths), sum(self.demos.lengths.values())

    @property
    def per_chunk(self) -> int:
        return int(self.info.get("chunks_size") or files.FILES_PER_CHUNK)

    @property
    def depths(self) -> dict[str, Depth]:
        return {
            name: feature.depth for name, feature in self.demos.features.items() if feature.depth
        }

    def next_file(self, prefix: str) -> int:
        """Return the number of the first free file under data, videos/NAME or meta/episodes."""
        used = [
            row[f"{prefix}/chunk_index"] * self.per_chunk + row[f"{prefix}/file_index"]
            for row in self.rows
        ]
        return 1 + max(used)

    def codec(self, name: str) -> str:
        return str((self.info["features"][name].get("info") or {}).get("video.codec", ""))

    def declared(self) -> dict[str, Any]:
        """Return the arguments of a Recorder for the dataset.

        Raises LockstepError for a property that a Recorder cannot write.
        """
        features, names, path = Declared(), dict[str, Any](), self.demos.root / "meta" / "info.json"
        for name, feature in self.demos.features.items():
            dtype = "depth" if feature.depth and feature.dtype == "video" else feature.dtype
            channels = {"image": 3, "video": 3, "depth": 1}.get(dtype, feature.shape[0])
            if dtype not in (*NUMBERS, *files.PICTURES) or feature.shape[0] != channels:
                what = (
                    f"{name} has dtype {dtype!r} and shape {feature.shape}, which is not "
                    "recorded here"
                )
                raise LockstepError(
                    what, str(path), "add to it with LeRobot, or record into another folder"
                )
            if name not in BOOKKEEPING:
                features[name] = dtype, feature.shape
            if dtype in NUMBERS and self.info["features"][name].get("names"):
                names[name] = self.info["features"][name]["names"]
        given = {"fps": self.demos.fps, "features": features, "names": names}
        return given | {"robot_type": self.info.get("robot_type") or ""}


def read_base(root: Path) -> Base:
    """Read a dataset. Raises LockstepError if the dataset cannot be extended."""
    demos, path = lerobot.read(root), root / "meta" / "info.json"
    info, todo = (
        lerobot._json(lerobot._text(path), path),
        "convert it with LeRobot, or record into another folder",
    )
    if demos.version != "v3.0":
        raise LockstepError(
            f"it is {demos.version}, and episodes are added to v3.0 only", str(path), todo
        )
    if any(info.get(key) not in (usual, None) for key, usual in FILES.items()):
        raise LockstepError("its files have names of their own", str(path), todo)
    tables = sorted(root.glob("meta/episodes/*/*.parquet"))
    rows = [_placed(table) | row for table in tables for _, row in lerobot._rows(table)]
    schema = need("pyarrow.parquet").read_schema(tables[-1]).remove_metadata()
    whole = root / "meta" / "stats.json"
    stored = lerobot._json(lerobot._text(whole), whole) if whole.is_file() else {}
    return Base(
        info, demos, rows, schema, {name: lerobot._arrays(stats) for name, stats in stored.items()}
    )


def _placed(table: Path) -> dict[str, int]:
    """Return the numbers in chunk-000/file-000.parquet, for the columns of a row."""
    chunk, file = (int(name.partition("-")[2]) for name in (table.parent.name, table.stem))
    return {"meta/episodes/chunk_index": chunk, "meta/episodes/file_index": file}


@dataclass(frozen=True)
class Declaration:
    """The arguments of a Recorder, and their form in a dataset.

    columns  all features including BOOKKEEPING, in the order of their columns
    """

    fps: float
    columns: Declared
    names: dict[str, Any]
    robot_type: str
    depths: dict[str, Depth]

    def values(self, name: str) -> np.ndarray:
        """Return the values of a picture's levels in statistics: 0 to 1, or distances.

        Distances are in the dataset's unit.
        """
        if name in self.depths:
            return self.depths[name].millimetres() / self.depths[name].factor
        return np.arange(256) / 255


def assemble(
    new: Path, staged: recording.Recording, given: Declaration, base: Base | None, file_mb: float
) -> None:
    """Create the dataset folder `new`: the episodes of `base`, then the episodes of `staged`."""
    from tqdm import tqdm

    if base:
        recording.linked(staged.root, new, *SUMMED)
    (new / "meta").mkdir(parents=True, exist_ok=True)
    episodes, (number, frames) = staged.episodes, base.counts if base else (0, 0)
    tasks = list(
        dict.fromkeys([*(base.demos.tasks if base else ()), *(it["task"] for it in episodes)])
    )
    rows, own = list[dict[str, Any]](), list[dict[str, np.ndarray]]()
    for it in episodes:
        begin, frames = frames, frames + it["length"]
        row = {"episode_index": number + len(rows), "tasks": [it["task"]], "length": it["length"]}
        same = {"episode_index": row["episode_index"], "task_index": tasks.index(it["task"])}
        own.append({name: np.full(it["length"], value) for name, value in same.items()})
        own[-1]["index"] = np.arange(begin, frames)
        it["stats"] |= files.flat(
            {name: measure(column[:, None]) for name, column in own[-1].items()}
        )
        rows.append(row | {"dataset_from_index": begin, "dataset_to_index": frames})
    videos = [name for name, (dtype, _) in given.columns.items() if dtype in ("video", "depth")]
    shown = tqdm(
        total=len(rows) * (1 + len(videos)),
        desc=f"Writing {staged.root.name}",
        delay=2,
        disable=None,
    )
    with shown:
        packer = _Packer(new, staged, base, int(file_mb * 2**20), shown)
        measured = _write_data(packer, rows, own, given, base)
        for name in videos:
            _write_videos(packer, rows, name, given.fps)
    file = files.place(base.next_file("meta/episodes"), base.per_chunk) if base else files.place(0)
    for row, it in zip(rows, episodes, strict=True):
        row |= {
            f"stats/{name}/{key}": n for name, one in it["stats"].items() for key, n in one.items()
        }
        row |= {f"meta/episodes/{key}": n for key, n in file.items()}
    files.write_episodes(new / EPISODES.format(**file), rows, base.schema if base else None)
    files.write_tasks(new / "meta/tasks.parquet", tasks)
    stats = (base.stats if base else {}) | measured | _aggregated(episodes, given, base)
    _write_json(
        new / "meta/stats.json", files.flat({name: one for name, one in stats.items() if one})
    )
    codecs = episodes[0]["codecs"]
    about = (
        base.info
        if base
        else files.info(given.fps, given.columns, given.names, given.robot_type, codecs)
    )
    total = {
        "total_episodes": number + len(rows),
        "total_frames": frames,
        "total_tasks": len(tasks),
    }
    _write_json(
        new / "meta/info.json", about | total | {"splits": {"train": f"0:{number + len(rows)}"}}
    )


class _Packer:
    """Joins the episodes' files of one kind into files of about `limit` bytes."""

    def __init__(
        self, new: Path, staged: recording.Recording, base: Base | None, limit: int, shown: Any
    ):
        self.new, self.staged, self.base, self.limit, self.shown = new, staged, base, limit, shown

    def groups(
        self, inside: str, prefix: str, template: str, rows: list[dict[str, Any]], **names: str
    ) -> Iterator[tuple[Path, dict[int, Path]]]:
        """Yield (target file, {episode of `rows`: the episode's file `inside` its folder}).

        The function writes the target's numbers into `rows` under `prefix`.
        """
        paths = [self.staged.folder_of(n) / inside for n in range(len(rows))]
        number, per_chunk = 0, files.FILES_PER_CHUNK
        if self.base:
            number, per_chunk = self.base.next_file(prefix), self.base.per_chunk
        group, size = dict[int, Path](), 0
        for n, path in enumerate(paths):
            group[n], size = path, size + path.stat().st_size
            last = n == len(paths) - 1
            if last or size >= self.limit or self._codec(inside, n) != self._codec(inside, n + 1):
                place = files.place(number, per_chunk)
                for member in group:
                    rows[member] |= {f"{prefix}/{key}": value for key, value in place.items()}
                target = self.new / template.format(**names, **place)
                target.parent.mkdir(parents=True, exist_ok=True)
                yield target, group
                self.shown.update(len(group))
                group, size, number = {}, 0, number + 1

    def _codec(self, inside: str, n: int) -> str | None:
        """Return the codec of the n-th episode's video.

        The codec may change on a resume, if an encoder is no longer installed.
        """
        return dict(self.staged.episodes[n]["codecs"]).get(inside.removesuffix(".mp4"))


def _write_data(
    packer: _Packer,
    rows: list[dict[str, Any]],
    own: list[dict[str, np.ndarray]],
    given: Declaration,
    base: Base | None,
) -> Stats:
    """Write data/ with each episode's columns `own`, and return measured statistics of the numbers.

    Each episode has its own row group, so its pictures can be read separately. Statistics are
    measured, because quantiles of episodes cannot be combined.
    """
    pa, pq, schema = need("pyarrow"), need("pyarrow.parquet"), files.schema(given.columns)
    wanted = {
        n: shape
        for n, (dtype, shape) in given.columns.items()
        if dtype in NUMBERS and n not in BOOKKEEPING
    }
    parts = {name: [base.demos.columns[name]] if base else [] for name in wanted}
    for target, group in packer.groups("data.parquet", "data", FILES["data_path"], rows):
        with pq.ParquetWriter(target, schema, compression="snappy") as writer:
            for n, path in group.items():
                table = pq.ParquetFile(path).read(use_threads=False)
                columns = [
                    pa.array(own[n][it]) if it in own[n] else table.column(it)
                    for it in schema.names
                ]
                writer.write_table(pa.Table.from_arrays(columns, schema=schema))
                for name, arrays in parts.items():
                    arrays.append(files.numbers(table.column(name), wanted[name]))
    return {name: measure(np.concatenate(arrays)) for name, arrays in parts.items()}


def _write_videos(packer: _Packer, rows: list[dict[str, Any]], name: str, fps: float) -> None:
    template = FILES["video_path"]
    for target, group in packer.groups(
        f"{name}.mp4", f"videos/{name}", template, rows, video_key=name
    ):
        counts, before = [rows[n]["length"] for n in group], 0
        for n, count in zip(group, counts, strict=True):
            span = {"from_timestamp": before / fps, "to_timestamp": (before + count) / fps}
            rows[n] |= {f"videos/{name}/{key}": value for key, value in span.items()}
            before += count
        if len(group) > 1:
            encoders.join(list(group.values()), counts, fps, target)
        else:
            shutil.copy2(next(iter(group.values())), target)


def _aggregated(episodes: list[dict[str, Any]], given: Declaration, base: Base | None) -> Stats:
    """Return the statistics of pictures and of BOOKKEEPING, which need no new measurement.

    Pictures use the counts of their levels. The statistics of `base` are combined by count.
    """
    parts: dict[str, list[Any]] = {
        name: [
            {key: np.array(value) for key, value in it["stats"][name].items()} for it in episodes
        ]
        for name in OWN
    }
    frames = sum(it["length"] for it in episodes)
    for name in episodes[0]["levels"]:
        counts = np.sum([it["levels"][name] for it in episodes], axis=0)
        parts[name] = [files.picture_stats(counts, given.values(name), frames)]
    stats: Stats = {}
    for name, own in parts.items():
        before = [base.stats.get(name, {})] if base else []
        known = all({"mean", "std", "min", "max", "count"} <= set(part) for part in before)
        # Statistics of a part would be wrong for the whole dataset: omit them.
        stats[name] = (
            (files.together([*before, *own]) if len(before) + len(own) > 1 else own[0])
            if known
            else {}
        )
    return stats


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=4), encoding="utf-8")
