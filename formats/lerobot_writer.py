"""Record demonstrations as a LeRobot dataset of version 3.0, which LeRobot and `formats.lerobot` read.

    with Recorder("data/reach", fps=10, features={
        "observation.state": ("float32", (2,)),
        "observation.images.top": ("image", (3, 32, 32)),
        "action": ("float32", (2,)),
    }) as recorder:
        recorder.add_episode({"observation.state": states, ...}, task="move to the red disc")  # arrays (T, ...)

The dataset gets its name when it is complete: a killed recording leaves only a hidden folder next to it, which the next
recording of that name removes.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from engine.contract import LockstepError
from formats.arrays import is_file_name
from formats.lerobot import BOOKKEEPING, FILES, QUANTILES, Stats, aggregate, measure, need
from formats.partial import Partial

NUMBERS = ("float32", "float64", "int32", "int64", "bool")
OWN = {name: ("float32" if name == "timestamp" else "int64", (1,)) for name in BOOKKEEPING}
FILES_PER_CHUNK = 1000
# (encoder, its options). g=2: reaching any frame decodes at most two. No B-frames: pictures are encoded in order.
ENCODERS = (
    ("libsvtav1", {"g": "2", "crf": "30", "preset": "8"}),
    ("libx264", {"g": "2", "crf": "20", "bf": "0"}),
    ("mpeg4", {"g": "2", "bf": "0", "qmin": "2", "qmax": "4"}),
)


class Recorder:
    """Writes episodes one after the other; the end of its `with` block completes the dataset.

    root      the folder to make
    fps       frames per second
    features  {name: (dtype, shape of one frame)}; a dtype is one of NUMBERS, or, with the shape (3, H, W), "image"
              (PNG, lossless) or "video" (lossy: AV1, or H.264 or MPEG-4 where there is no encoder)
    file_mb   size in MiB from which the next episode goes into a new file

    Raises LockstepError if `root` exists, and for frames that do not match `features`.
    """

    def __init__(
        self,
        root: str | Path,
        fps: float,
        features: Mapping[str, tuple[str, Sequence[int]]],
        robot_type: str = "",
        file_mb: float = 100.0,
    ):
        self.root, self.fps, self.robot_type, self.file_mb = Path(root), fps, robot_type, file_mb
        self.features = {name: (dtype, tuple(shape)) for name, (dtype, shape) in features.items()}
        self._check_declaration()
        if os.path.lexists(self.root):
            raise LockstepError("the folder exists already", str(root), "remove it or choose a new one")
        need("pyarrow.parquet")
        self._partial = Partial(self.root)
        self.num_frames = 0
        self._tasks: dict[str, int] = {}
        self._episodes: list[dict[str, Any]] = []
        self._stats: list[Stats] = []
        self._numbers: dict[str, list[np.ndarray]] = {name: [] for name in self._of(*NUMBERS)}
        self._counts = {name: np.zeros((3, 256), np.int64) for name in self._of("image", "video")}  # of each level
        self._data: Any = None
        self._file = -1
        self._videos: dict[str, _Video] = {}
        self._frames: list[dict[str, np.ndarray]] = []
        self._task: str | None = None

    def _of(self, *dtypes: str) -> list[str]:
        return [name for name, (dtype, _) in self.features.items() if dtype in dtypes]

    def _check_declaration(self) -> None:
        if not self.fps > 0 or not math.isfinite(self.fps):
            raise LockstepError(f"fps {self.fps} is no rate", str(self.root), "give frames per second")
        for name, (dtype, shape) in self.features.items():
            picture = dtype in ("image", "video")
            if not picture and dtype not in NUMBERS:
                what, todo = f"{name} has dtype {dtype!r}", f"choose of image, video, {', '.join(NUMBERS)}"
            elif name in BOOKKEEPING or not is_file_name(name):
                what, todo = f"a feature cannot have the name {name!r}", "choose a different one, without /"
            elif not shape or min(shape) < 1 or (picture and (len(shape) != 3 or shape[0] != 3)):
                what, todo = f"{name} has shape {shape}", "a picture has (3, H, W), a number (1,)"
            elif dtype == "video" and (shape[1] % 2 or shape[2] % 2):
                what, todo = f"{name} has shape {shape}", "a video needs an even height and width"
            else:
                continue
            raise LockstepError(what, str(self.root), todo)

    def __enter__(self) -> Recorder:
        try:
            self._partial.begin()
            (self._partial.path / "meta" / "episodes" / "chunk-000").mkdir(parents=True)
        except OSError as error:
            raise _cannot_write(self.root, error) from None
        return self

    def add_frame(self, frame: Mapping[str, Any], task: str) -> None:
        """Add one frame, {name: array of the feature's shape}, to the episode that `end_episode` writes."""
        if self._task not in (None, task):
            what = f"a frame of {task!r} in an episode of {self._task!r}"
            raise LockstepError(what, self._here(), "call end_episode() first")
        batch = {name: np.asarray(value)[None] for name, value in frame.items()}
        self._frames.append({name: values[0] for name, values in self._check(batch, len(self._frames)).items()})
        self._task = task

    def end_episode(self) -> None:
        """Write the frames that were added since the last call."""
        if self._task is None:
            raise LockstepError("an episode without frames", self._here(), "call add_frame() first")
        frames, task, self._frames, self._task = self._frames, self._task, [], None
        self.add_episode({name: np.stack([frame[name] for frame in frames]) for name in self.features}, task)

    def add_episode(self, arrays: Mapping[str, Any], task: str) -> None:
        """Write a whole episode: {name: (T, ...)} for each feature, and its task as text."""
        if self._frames:
            raise LockstepError("an episode inside an episode", self._here(), "call end_episode() first")
        episode = self._check(arrays, 0)
        length = len(next(iter(episode.values()), ()))
        if length == 0:
            raise LockstepError("an episode without frames", self._here(), "give at least one")
        try:
            self._write_episode(episode, length, task)
        except OSError as error:
            raise _cannot_write(self.root, error) from None

    def _here(self) -> str:
        return f"{self.root}: episode {len(self._episodes)}"

    def _check(self, arrays: Mapping[str, Any], first: int) -> dict[str, np.ndarray]:
        """Return the arrays in their declared types; messages count frames from `first`."""
        where = self._here()
        if set(arrays) != set(self.features):
            odd = sorted(set(arrays) ^ set(self.features))
            what = f"{odd[0]} is {'not declared' if odd[0] in arrays else 'missing'}"
            raise LockstepError(what, where, f"give {', '.join(self.features)}")
        found = {name: np.asarray(arrays[name]) for name in self.features}
        lengths = {name: len(array) if array.ndim else 0 for name, array in found.items()}
        for name, array in found.items():
            dtype, shape = self.features[name]
            kind = np.dtype(np.uint8 if dtype in ("image", "video") else dtype)
            if array.shape[1:] != shape or not array.ndim:
                what, todo = f"{name} has frames of {array.shape[1:]}", f"give (T, {', '.join(map(str, shape))})"
            elif lengths[name] != min(lengths.values()):
                what, todo = f"{name} has {lengths[name]} frames, others {min(lengths.values())}", "give all the same"
            elif not np.can_cast(array.dtype, kind, "safe" if kind == np.uint8 else "same_kind"):
                what, todo = f"{name} is {array.dtype}", f"give {kind}"
            elif not np.isfinite(array).all():
                bad = int(np.flatnonzero(~np.isfinite(array).reshape(len(array), -1).all(1))[0])
                what, todo = f"{name} is not finite (NaN or infinity) at frame {first + bad}", "leave it out"
            else:
                found[name] = array.astype(kind, copy=False)
                continue
            raise LockstepError(what, where, todo)
        return found

    def _write_episode(self, episode: Mapping[str, np.ndarray], length: int, task: str) -> None:
        e = len(self._episodes)
        self._roll()
        stats: Stats = {}
        for name, array in episode.items():
            if name in self._counts:
                counts = _histogram(array)
                self._counts[name] += counts
                stats[name] = _picture_stats(counts, length)
            else:
                self._numbers[name].append(array)
                stats[name] = measure(array)
        at = self._tasks.setdefault(task, len(self._tasks))
        own: dict[str, np.ndarray] = {
            "timestamp": (np.arange(length) / self.fps).astype(np.float32),
            "frame_index": np.arange(length),
            "episode_index": np.full(length, e),
            "index": np.arange(self.num_frames, self.num_frames + length),
            "task_index": np.full(length, at),
        }
        stats |= {name: measure(column[:, None]) for name, column in own.items()}
        self._write_rows({name: array for name, array in episode.items() if name not in self._of("video")} | own)
        row: dict[str, Any] = {"episode_index": e, "tasks": [task], "length": length}
        row |= {f"data/{key}": n for key, n in _place(self._file).items()}
        row |= {"dataset_from_index": self.num_frames, "dataset_to_index": self.num_frames + length}
        for name in self._of("video"):
            begin = self._videos[name].add(episode[name])
            span = {"from_timestamp": begin / self.fps, "to_timestamp": (begin + length) / self.fps}
            row |= {f"videos/{name}/{key}": n for key, n in (_place(self._videos[name].file) | span).items()}
        row |= {f"stats/{name}/{key}": v.tolist() for name, one in stats.items() for key, v in one.items()}
        self._episodes.append(row | {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0})
        self._stats.append(stats)
        self.num_frames += length

    # ---- files

    def _roll(self) -> None:
        """Open the first files, and new ones where `file_mb` is reached."""
        limit = self.file_mb * 2**20
        if self._data is None or _size(self._path("data_path", self._file)) >= limit:
            if self._data is not None:
                self._data.close()
            self._file += 1
            self._data = self._open_table(self._path("data_path", self._file))
        for name in self._of("video"):
            video = self._videos.get(name)
            if video is None or _size(video.path) >= limit:
                if video is not None:
                    video.close()
                number = video.file + 1 if video else 0
                path = self._path("video_path", number, video_key=name)
                self._videos[name] = _Video(path, number, self.fps, self.features[name][1][1:])

    def _path(self, template: str, number: int, **names: str) -> Path:
        path = self._partial.path / FILES[template].format(**names, **_place(number))
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _open_table(self, path: Path) -> Any:
        pa, pq = need("pyarrow"), need("pyarrow.parquet")
        fields: dict[str, Any] = {}
        known: dict[str, Any] = {}
        for name, (dtype, shape) in (self.features | OWN).items():
            if dtype == "video":
                continue
            if dtype == "image":
                known[name] = {"_type": "Image"}
                fields[name] = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
                continue
            known[name] = {"dtype": dtype, "_type": "Value"}
            fields[name] = pa.type_for_alias(dtype)
            if len(shape) > 1:
                known[name] = {"shape": list(shape), "dtype": dtype, "_type": f"Array{len(shape)}D"}
                for _ in shape:
                    fields[name] = pa.list_(fields[name])
            elif shape != (1,):
                known[name] = {"feature": known[name], "length": shape[0], "_type": "Sequence"}
                fields[name] = pa.list_(fields[name], shape[0])
        metadata = {"huggingface": json.dumps({"info": {"features": known}})}
        return pq.ParquetWriter(path, pa.schema(fields.items(), metadata=metadata), compression="snappy")

    def _write_rows(self, columns: Mapping[str, np.ndarray]) -> None:
        """Write an episode as one row group, so that its pictures can be read without others."""
        pa = need("pyarrow")
        arrays = []
        for field in self._data.schema:
            values = columns[field.name]
            if pa.types.is_struct(field.type):
                pngs = [{"bytes": _png(picture), "path": f"frame-{n:06d}.png"} for n, picture in enumerate(values)]
                arrays.append(pa.array(pngs, type=field.type))
            elif pa.types.is_fixed_size_list(field.type):
                arrays.append(pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1]))
            elif pa.types.is_list(field.type):
                arrays.append(pa.array(values.tolist(), type=field.type))
            else:
                arrays.append(pa.array(values.reshape(-1), type=field.type))
        self._data.write_table(pa.Table.from_arrays(arrays, schema=self._data.schema))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        except OSError as error:
            raise _cannot_write(self.root, error) from None
        finally:
            with contextlib.suppress(OSError):  # on a full disk, closing fails once more
                self._close()
            self._partial.end()

    def _close(self) -> None:
        for video in self._videos.values():
            video.close()
        if self._data is not None:
            self._data.close()
            self._data = None

    def _finish(self) -> None:
        if self._frames:
            raise LockstepError("the last episode was not ended", self._here(), "call end_episode()")
        if not self._episodes:
            raise LockstepError("no episode was written", str(self.root), "give at least one")
        self._close()
        meta = self._partial.path / "meta"
        _write_table(meta / "episodes" / "chunk-000" / "file-000.parquet", self._episodes)
        self._write_tasks(meta / "tasks.parquet")
        stats = {name: {key: value.tolist() for key, value in one.items()} for name, one in self._all_stats().items()}
        (meta / "stats.json").write_text(json.dumps(stats, indent=4), encoding="utf-8")
        (meta / "info.json").write_text(json.dumps(self._info(), indent=4), encoding="utf-8")
        for path in self._partial.path.rglob("*"):
            if path.is_file():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())  # a rename may reach the disk before the contents do
        os.rename(self._partial.path, self.root)

    def _all_stats(self) -> Stats:
        """Return exact statistics of the whole dataset: episodes' quantiles cannot be combined."""
        stats = {name: aggregate([episode[name] for episode in self._stats]) for name in self._stats[0]}
        for name, arrays in self._numbers.items():
            stats[name] = measure(np.concatenate(arrays))
        for name, counts in self._counts.items():
            stats[name] = _picture_stats(counts, self.num_frames)
        for name in BOOKKEEPING:  # not kept: weighted means of the episodes' quantiles, as in LeRobot
            weight = np.array([row["length"] for row in self._episodes]) / self.num_frames
            stats[name] |= {q: np.stack([one[name][q] for one in self._stats]).T @ weight for q in QUANTILES}
        return stats

    def _write_tasks(self, path: Path) -> None:
        """Write the table as pandas would, because LeRobot takes the texts from its index."""
        pa, pq = need("pyarrow"), need("pyarrow.parquet")
        index = "__index_level_0__"
        table = pa.table({"task_index": pa.array(self._tasks.values(), pa.int64()), index: pa.array(list(self._tasks))})
        columns: list[dict[str, Any]] = [
            {"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64"},
            {"name": None, "field_name": index, "pandas_type": "unicode", "numpy_type": "object"},
        ]
        none: dict[str, Any] = {"name": None, "field_name": None, "pandas_type": "unicode", "numpy_type": "object"}
        metadata = {
            "index_columns": [index],
            "column_indexes": [none | {"metadata": {"encoding": "UTF-8"}}],
            "columns": [column | {"metadata": None} for column in columns],
            "creator": {"library": "pyarrow", "version": pa.__version__},
            "pandas_version": "2.2.0",
        }
        pq.write_table(table.replace_schema_metadata({"pandas": json.dumps(metadata)}), path)

    def _info(self) -> dict[str, Any]:
        features: dict[str, Any] = {}
        for name, (dtype, shape) in (self.features | OWN).items():
            features[name] = {"dtype": dtype, "shape": list(shape), "names": None}
            if name in self._counts:
                features[name] |= {"shape": [*shape[1:], 3], "names": ["height", "width", "channels"]}
            if dtype == "video":
                video = {"height": shape[1], "width": shape[2], "codec": self._videos[name].codec, "fps": self.fps}
                video |= {"pix_fmt": "yuv420p", "is_depth_map": False, "channels": 3}
                features[name]["info"] = {f"video.{key}": value for key, value in video.items()} | {"has_audio": False}
        return {
            "codebase_version": "v3.0",
            "robot_type": self.robot_type,
            "total_episodes": len(self._episodes),
            "total_frames": self.num_frames,
            "total_tasks": len(self._tasks),
            "chunks_size": FILES_PER_CHUNK,
            "data_files_size_in_mb": 100,
            "video_files_size_in_mb": 200,
            "fps": int(self.fps) if self.fps == int(self.fps) else self.fps,
            "splits": {"train": f"0:{len(self._episodes)}"},
            "data_path": FILES["data_path"],
            "video_path": FILES["video_path"] if self._of("video") else None,
            "features": features,
        }


class _Video:
    """One mp4 file with the pictures of several episodes."""

    def __init__(self, path: Path, number: int, fps: float, size: tuple[int, ...]):
        self.path, self.file, self.count = path, number, 0
        self._av = need("av")
        os.environ.setdefault("SVT_LOG", "1")  # or the encoder prints its settings for each file
        self._rate = Fraction(fps).limit_denominator(1001)
        for name, options in ENCODERS:
            try:
                self._begin(name, options, size)
                return
            except (self._av.error.FFmpegError, ValueError):  # not built in, or it does not take pictures this small
                self._container.close()
                path.unlink(missing_ok=True)
        known = ", ".join(name for name, _ in ENCODERS)
        raise LockstepError(f"no encoder of {known} takes {size} pixels", str(path), "use dtype image")

    def _begin(self, name: str, options: dict[str, str], size: tuple[int, ...]) -> None:
        self._container = self._av.open(str(self.path), "w")
        self._stream = self._container.add_stream(name, rate=self._rate, options=dict(options))
        self._stream.pix_fmt = "yuv420p"
        self._stream.height, self._stream.width = size
        with _usual_priority():
            self._stream.codec_context.open()
        self.codec = {"libsvtav1": "av1", "libx264": "h264"}.get(name, name)

    def add(self, pictures: np.ndarray) -> int:
        """Append (T, 3, H, W) uint8; returns the number of pictures before them."""
        first = self.count
        for picture in pictures:
            frame = self._av.VideoFrame.from_ndarray(np.ascontiguousarray(picture.transpose(1, 2, 0)), format="rgb24")
            frame.pts, frame.time_base = self.count, 1 / self._rate
            with self._as_os_error():
                self._container.mux(self._stream.encode(frame))
            self.count += 1
        return first

    def close(self) -> None:
        container, self._container = self._container, None
        if container is not None:
            with self._as_os_error(), container:
                container.mux(self._stream.encode() if self.count else [])

    @contextlib.contextmanager
    def _as_os_error(self) -> Iterator[None]:
        try:
            yield
        except self._av.error.FFmpegError as error:
            raise OSError(error.errno, error.strerror) from None


@contextlib.contextmanager
def _usual_priority() -> Iterator[None]:
    """Restore the scheduling policy afterwards: run by root, SVT-AV1 makes the calling thread real-time, and so every
    process that it starts later. Two of these that wait for each other starve a machine of two cores."""
    if not hasattr(os, "sched_getscheduler"):
        yield
        return
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        if os.sched_getscheduler(0) != before[0]:
            os.sched_setscheduler(0, *before)


def _place(number: int) -> dict[str, int]:
    return {"chunk_index": number // FILES_PER_CHUNK, "file_index": number % FILES_PER_CHUNK}


def _size(path: Path) -> int:
    """Return the size in bytes; 0 for an mp4 file whose encoder has not given its first packet yet."""
    return path.stat().st_size if path.exists() else 0


def _png(picture: np.ndarray) -> bytes:
    image, file = need("PIL.Image"), io.BytesIO()
    image.fromarray(np.ascontiguousarray(picture.transpose(1, 2, 0))).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _histogram(pictures: np.ndarray) -> np.ndarray:
    """(T, C, H, W) uint8 -> (C, 256) counts of the levels in about a hundred of the pictures."""
    some = pictures[:: -(-len(pictures) // 100)]
    return np.stack([np.bincount(some[:, c].reshape(-1), minlength=256) for c in range(pictures.shape[1])])


def _picture_stats(counts: np.ndarray, frames: int) -> dict[str, np.ndarray]:
    """(C, 256) counts of levels -> statistics (C, 1, 1) of values from 0 to 1."""
    levels, total = np.arange(256) / 255, counts.sum(1)
    mean = counts @ levels / total
    below = np.cumsum(counts, 1) / total[:, None]  # (C, 256)
    stats = {"mean": mean, "std": np.sqrt((counts * (levels - mean[:, None]) ** 2).sum(1) / total)}
    stats |= {"min": levels[(counts > 0).argmax(1)], "max": levels[255 - (counts[:, ::-1] > 0).argmax(1)]}
    stats |= {name: levels[(below >= share).argmax(1)] for name, share in QUANTILES.items()}
    return {name: value.reshape(-1, 1, 1) for name, value in stats.items()} | {"count": np.array([frames])}


def _write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    pa, pq = need("pyarrow"), need("pyarrow.parquet")
    pq.write_table(pa.Table.from_pylist(rows), path, compression="snappy")


def _cannot_write(folder: Path, error: OSError) -> LockstepError:
    return LockstepError(
        f"cannot write: {error.strerror or error}", str(folder), "choose a different folder or make room"
    )
