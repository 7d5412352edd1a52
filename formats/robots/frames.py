"""Pictures of demonstrations by row.

Pictures come from a memory map that is built once per machine, or are decoded at each use.

    frames = Frames(demos, size=(96, 96), cache="memmap", where=Path("cache"))
    frames.get("observation.images.top", rows)  # (n,) rows of demos.columns -> (n, C, 96, 96) uint8

The cache is a folder in `where`. The folder's name has a digest of the dataset and the size:

    <camera>.u8     uint8 (frames of the whole dataset, C, H, W), a sparse file with the chosen
                    episodes; .u16 for a depth camera
    episodes.jsonl  a line per decoded episode: camera, episode, size and times of the source file,
                    also of pictures in files of their own, and CRC-32 of the bytes. The line is
                    written after the bytes are on the disk. An episode without a line or with a
                    changed source file is decoded.
    checked.json    size and time of these files at the last successful check of all checksums. If
                    size or time differ, all bytes are checked again.
    lock            lock of the process that builds the cache
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import math
import os
import shutil
import sys
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from engine.contract import LockstepError
from formats.arrays import read_ahead, stays_below
from formats.display import upright
from formats.robots import picture_files
from formats.robots.depth import CODES
from formats.robots.lerobot import Demonstrations, Place, need

VERSION = 2  # 1 kept the pictures of turned films as they are coded
OPEN_VIDEOS = 8  # per process; a decoder of 480p takes about 15 MB
PNG_BYTES = 256 * 2**20  # per process
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
WIDE = (
    "8-bit pictures are read, and depth cameras, which info.json calls is_depth_map: convert them"
)
LEAVE_OUT = "copy the file again, or leave the episode out with dataset.exclude_episodes"


class Frames:
    """Pictures of `demos`, all cameras.

    sizes  {camera: (H, W)} to resize to; other cameras keep the recorded size
    cache  "memmap": decode every chosen episode now, unless already cached; "none": decode on
           demand
    where  folder of the caches; unused with "none"

    A video gives the frame nearest to the row's time, upright as players show it. Pillow's bilinear
    filter resizes both kinds of source and of cache, so the bytes are equal. A depth camera gives
    whole millimetres, uint16, as LeRobot does with depth_output_unit=mm. Depth is resized by the
    nearest pixel: a value between two distances may not exist, and 0 often means "unknown". Raises
    LockstepError with file, episode and frame.
    """

    def __init__(
        self,
        demos: Demonstrations,
        sizes: Mapping[str, tuple[int, int]],
        cache: str,
        where: str | Path,
    ):
        if cache not in ("memmap", "none"):
            raise LockstepError(
                f"no cache of kind {cache!r}", "dataset.cache", "choose memmap or none"
            )
        for size in sizes.values():
            if len(size) != 2 or min(size) < 1:
                what = f"size {size} is not (height, width)"
                raise LockstepError(what, "dataset.resize", "give two numbers")
        need("PIL.Image")
        self.demos = demos
        self.shapes = {
            name: (demos.features[name].shape[0], *sizes.get(name, demos.features[name].shape[1:]))
            for name in demos.cameras
        }
        # of each chosen episode
        self.places: dict[str, list[Place]] = {name: [] for name in self.shapes}
        for name, shape in self.shapes.items():
            if shape[0] not in MODES:
                raise LockstepError(
                    f"{name} has {shape[0]} channels", str(demos.root), "1, 3 or 4 are read"
                )
        picture_files.check({"": demos})
        for name in self.shapes:
            self.places[name] = [place for place in demos.places[name] if place is not None]
        self.depths = {name: depth for name in self.shapes if (depth := demos.features[name].depth)}
        self.dtypes = {
            name: np.dtype(np.uint16 if name in self.depths else np.uint8) for name in self.shapes
        }
        self._millimetres = {name: depth.millimetres() for name, depth in self.depths.items()}
        self._resized = set(sizes)
        self.own_files: dict[str, list[int]] | None = None
        """{file of one picture, within the dataset: its `file_state`} of the pictures that are
        decoded from now on; None: not collected."""
        self._reset()
        self._cache = _Cache(self, Path(where)) if cache == "memmap" and self.shapes else None
        self._maps: dict[str, np.ndarray] = {}

    def _reset(self) -> None:
        self._process = os.getpid()
        self._videos, self._tables = _LRU(OPEN_VIDEOS), _LRU(PNG_BYTES)

    def get(self, camera: str, rows: np.ndarray) -> np.ndarray:
        """Return the pictures of (n,) rows of `demos.columns`.

        The result is (n, C, H, W) uint8, or uint16 for depths.
        """
        out = np.empty((len(rows), *self.shapes[camera]), dtype=self.dtypes[camera])
        if self._cache:
            # Rows come from an index of the dataset; mode="raise" would make one more copy.
            return np.take(self._map(camera), self._cache.rows(rows), axis=0, out=out, mode="clip")
        if self._process != os.getpid():
            # A forked loader process would share file positions with its parent. Keep the inherited
            # files open: closing a decoder would wait for threads that exist only in the parent.
            _inherited.append((self._videos, self._tables))
            self._reset()
        unique, back = np.unique(rows, return_inverse=True)
        owner = np.searchsorted(self.demos.end, unique, "right")
        firsts = np.flatnonzero(np.diff(owner, prepend=-1))  # where each episode's part begins
        found = np.empty((len(unique), *self.shapes[camera]), dtype=self.dtypes[camera])
        for a, b in pairwise([*firsts, len(unique)]):
            for n, picture in zip(
                range(a, b), self.decode(camera, int(owner[a]), unique[a:b]), strict=True
            ):
                found[n] = picture
        return np.take(found, back, axis=0, out=out)

    def prefetch(self, camera: str, rows: np.ndarray) -> None:
        """Start to read these rows from a cache on disk, if any; return at once."""
        if self._cache:
            read_ahead(self._map(camera), self._cache.rows(np.unique(rows)), 1)

    def _map(self, camera: str) -> np.ndarray:
        assert self._cache
        if camera not in self._maps:
            self._maps[camera] = self._cache.open(camera)
        return self._maps[camera]

    def decode(
        self, camera: str, e: int, rows: np.ndarray, threads: int = 1
    ) -> Iterator[np.ndarray]:
        """Yield the pictures (C, H, W) of ascending rows of the e-th chosen episode.

        threads  of the decoder; 0 is one per core
        """
        place = self.places[camera][e]
        if self.demos.features[camera].dtype == "image":
            pictures: Iterator[Any] = self._pngs(camera, place, rows - self.demos.start[e], rows)
        else:
            names = [self.demos.name_of(int(row)) for row in rows]
            video = self._videos.get(place.path, lambda: (_Video(place.path, names[0], threads), 1))
            times = place.start_s + self.demos.columns["timestamp"][rows].astype(np.float64)
            # float32 timestamps are coarser than the usual tolerance after half an hour
            slack = self.demos.tolerance_s + np.spacing(self.demos.columns["timestamp"][rows])
            pictures = video.nearest(times, slack, names, camera in self.depths)
        fit = self._fit_depth if camera in self.depths else self._fit
        for row, image in zip(rows, pictures, strict=True):
            yield fit(image, camera, int(row), place.path)

    def _fit_depth(self, image: Any, camera: str, row: int, path: Path) -> np.ndarray:
        """Convert codes of a video, or a Pillow image of distances, to (1, H, W) millimetres.

        The distances of an image are in the camera's unit.
        """
        _, height, width = self.shapes[camera]
        if isinstance(image, np.ndarray):
            depths = self._millimetres[camera][np.minimum(image, CODES - 1)]
        elif image.mode.startswith(("I", "F")):
            depths = np.rint(np.asarray(image, np.float64) * self.depths[camera].factor).clip(
                0, 65535
            )
        else:
            what = f"{self.demos.name_of(row)}: {camera} is a depth camera with 8 bits per distance"
            raise LockstepError(
                what, str(path), "16 bits are read; leave the camera out with dataset.cameras"
            )
        self._check_size(depths.shape[0], depths.shape[1], camera, row, path)
        rows, columns = (
            (np.arange(n) + 0.5) * old // n
            for n, old in zip((height, width), depths.shape, strict=True)
        )
        return depths.astype(np.uint16)[None, rows.astype(int)[:, None], columns.astype(int)]

    def _fit(self, image: Any, camera: str, row: int, path: Path) -> np.ndarray:
        channels, height, width = self.shapes[camera]
        if image.mode.startswith(("I", "F")):
            what = f"{self.demos.name_of(row)}: {camera} has more than 8 bits per channel"
            raise LockstepError(what, str(path), WIDE)
        if image.size != (width, height):
            self._check_size(image.size[1], image.size[0], camera, row, path)
            image = image.resize((width, height), need("PIL.Image").Resampling.BILINEAR)
        pixels = np.asarray(image.convert(MODES[channels]))  # (H, W, C) or (H, W)
        return pixels.reshape(height, width, channels).transpose(2, 0, 1)

    def _check_size(self, height: int, width: int, camera: str, row: int, path: Path) -> None:
        _, *expected = self.shapes[camera]
        if [height, width] != expected and camera not in self._resized:
            what = f"{self.demos.name_of(row)}: {camera} has {height}x{width} pixels, not "
            todo = f"fix info.json, or give dataset.resize=[{expected[0]}, {expected[1]}]"
            raise LockstepError(
                what + f"{expected[0]}x{expected[1]} as in info.json", str(path), todo
            )

    def _pngs(
        self, camera: str, place: Place, frames: np.ndarray, rows: np.ndarray
    ) -> Iterator[Any]:
        for frame, row in zip(frames, rows, strict=True):
            # Look up at each use, so that the table stays the most recently used. A table counts as
            # 1 MiB, which bounds the open files.
            table = self._tables.get(place.path, lambda: (_Table(place.path), 2**20))
            group, n = table.find(place.first_row + int(frame))
            name = place.column
            column = self._tables.get((place.path, name, group), partial(table.read, group, name))
            stored = column[n].as_py()
            if self.own_files is not None and (own := _own_file(stored)):
                self.own_files[own] = file_state(self.demos.root / own)
            yield _open_png(stored, self.demos, int(row), place.path)

    def close(self) -> None:
        """Close every file; the next use opens the file again."""
        self._videos.close()
        self._tables.close()

    def __getstate__(self) -> dict[str, Any]:
        # Pickled to a loader process, a memory map would become a copy of the file. Decoders cannot
        # be pickled.
        return self.__dict__ | {"_maps": {}, "_videos": None, "_tables": None, "_process": -1}


_inherited: list[Any] = []


class _LRU:
    """The most recently used values up to a total cost of `limit`.

    The newest value always stays.
    """

    def __init__(self, limit: int):
        self.limit, self.cost = limit, 0
        self._kept: OrderedDict[Any, tuple[Any, int]] = OrderedDict()

    def get(self, key: Any, make: Callable[[], tuple[Any, int]]) -> Any:
        if key not in self._kept:
            self._kept[key] = make()
            self.cost += self._kept[key][1]
        self._kept.move_to_end(key)
        while self.cost > self.limit and len(self._kept) > 1:
            self._drop_oldest()
        return self._kept[key][0]

    def _drop_oldest(self) -> None:
        value, cost = self._kept.popitem(last=False)[1]
        self.cost -= cost
        if hasattr(value, "close"):
            value.close()

    def close(self) -> None:
        while self._kept:
            self._drop_oldest()


class _Video:
    """An open video. `nearest` gives the frame nearest to a time."""

    def __init__(self, path: Path, name: str, threads: int = 1):
        self._av, self.path = need("av"), path
        with self._wrap_errors(name):
            self._container = self._av.open(str(path))
        self._stream: Any = next(iter(self._container.streams.video), None)
        if self._stream is None or self._stream.codec_context is None:
            raise LockstepError(f"{name}: no video that can be decoded", str(path), LEAVE_OUT)
        self._stream.codec_context.thread_count = threads  # 0: one per core
        self._stream.codec_context.thread_type = "AUTO"
        self._between_keys = 0.0  # longest seen time from a key frame, in seconds

    def nearest(
        self, times: np.ndarray, slack: np.ndarray, names: Sequence[str], depth: bool = False
    ) -> Iterator[Any]:
        """Yield the frames nearest to ascending times (n,).

        A frame is a Pillow image, or (H, W) uint16 codes for `depth`. A frame is at most `slack`
        (n,) seconds away. `names` are for messages.
        """
        n, before, key, sought = 0, None, np.inf, 0
        frames = self._from(float(times[0]), names[0])
        while n < len(times):
            with self._wrap_errors(names[n]):
                frame = next(frames, None)
            if before is None and frame is None:
                raise LockstepError(
                    f"{names[n]}: the video has no pictures", str(self.path), LEAVE_OUT
                )
            while n < len(times) and (frame is None or frame.time >= times[n]):
                near = min((f for f in (before, frame) if f), key=lambda f: abs(f.time - times[n]))
                if abs(near.time - times[n]) > slack[n]:
                    what = f"{names[n]} is at {times[n]:.4f} s; "
                    what += f"the nearest picture is at {near.time:.4f} s" + (
                        "" if frame else ", the last one"
                    )
                    todo = f"{LEAVE_OUT}, or raise dataset.tolerance_s"
                    raise LockstepError(what, str(self.path), todo)
                yield self._codes(near, names[n]) if depth else self._picture(near, names[n])
                n += 1
            if frame:
                key = frame.time if frame.key_frame else key
                self._between_keys = max(self._between_keys, frame.time - key)
            # A seek is cheaper for a distant time, but only once per time: the key frame may be
            # equally far back.
            if (
                n > sought
                and n < len(times)
                and frame
                and times[n] - frame.time > self._between_keys + 0.1
            ):
                frames, frame, sought = self._from(float(times[n]), names[n]), None, n
            before = frame

    def _picture(self, frame: Any, name: str) -> Any:
        layout = frame.format.name
        if layout.startswith("gray") and layout != "gray":
            what = f"{name}: more than 8 bits per channel ({layout})"
            raise LockstepError(what, str(self.path), WIDE)
        if frame.is_corrupt:
            raise LockstepError(f"{name}: a damaged picture", str(self.path), LEAVE_OUT)
        pixels = frame.to_ndarray(format="gray" if layout == "gray" else "rgb24")
        shown = upright(pixels, frame, self.path)
        return need("PIL.Image").fromarray(np.ascontiguousarray(shown))

    def _codes(self, frame: Any, name: str) -> np.ndarray:
        if (bits := frame.format.components[0].bits) < 12:
            what = f"{name}: a depth camera with {bits} bits per distance ({frame.format.name})"
            raise LockstepError(
                what, str(self.path), "12 bits are read; leave the camera out with dataset.cameras"
            )
        if frame.is_corrupt:
            raise LockstepError(f"{name}: a damaged picture", str(self.path), LEAVE_OUT)
        gray = frame if frame.format.name == "gray12le" else frame.reformat(format="gray12le")
        # The line size may exceed a row of pixels.
        rows = np.frombuffer(gray.planes[0], np.uint16).reshape(gray.height, -1)
        return upright(rows[:, : gray.width], frame, self.path).copy()

    def _from(self, time: float, name: str) -> Iterator[Any]:
        """Return the frames from the last key frame at or before `time`, in seconds."""
        with self._wrap_errors(name):
            at = max(0.0, time) / self._stream.time_base
            self._container.seek(int(at), stream=self._stream, backward=True)
            return iter(self._container.decode(self._stream))

    def _wrap_errors(self, name: str) -> contextlib.AbstractContextManager[None]:
        return _wrap_errors(
            f"{name}: the video cannot be decoded", self.path, self._av.error.FFmpegError
        )

    def close(self) -> None:
        self._container.close()


class _Table:
    """A parquet file with pictures, read by row group."""

    def __init__(self, path: Path):
        self._path = path
        with self._wrap_errors():
            self._file = need("pyarrow.parquet").ParquetFile(path)
        meta = self._file.metadata
        self._ends = np.cumsum([meta.row_group(g).num_rows for g in range(meta.num_row_groups)])

    def find(self, row: int) -> tuple[int, int]:
        """Return (row group, row within the group)."""
        group = int(np.searchsorted(self._ends, row, "right"))
        return group, row - int(self._ends[group - 1] if group else 0)

    def read(self, group: int, camera: str) -> tuple[Any, int]:
        with self._wrap_errors():
            column = self._file.read_row_group(group, columns=[camera], use_threads=False).column(
                camera
            )
        array = column.combine_chunks()
        # With the package `datasets` imported, pictures have an extension type around the plain
        # type.
        return getattr(array, "storage", array), column.nbytes

    def _wrap_errors(self) -> contextlib.AbstractContextManager[None]:
        return _wrap_errors(
            "the pictures cannot be read", self._path, need("pyarrow").ArrowException
        )

    def close(self) -> None:
        self._file.close()


def file_state(path: Path) -> list[int]:
    """Return values that change with a file's content; [] without the file.

    The time of the last change of the inode, which no program sets, differs between files whose
    size and time of modification were kept.
    """
    try:
        stat = path.stat()
    except OSError:
        return []
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _own_file(stored: Any) -> str:
    """Return the file of {bytes, path} without bytes, within the dataset; else an empty text."""
    if not isinstance(stored, dict) or stored.get("bytes") is not None:
        return ""
    path = stored.get("path")
    return path if isinstance(path, str) and stays_below(path) else ""


def _open_png(stored: Any, demos: Demonstrations, row: int, path: Path) -> Any:
    """Decode {bytes, path} or bare bytes to a Pillow image."""
    content = stored.get("bytes") if isinstance(stored, dict) else stored
    path_inside = stored.get("path") if isinstance(stored, dict) else None
    # Pillow raises each of these errors for a damaged file.
    with _wrap_errors(
        f"{demos.name_of(row)}: the picture cannot be decoded", path, TypeError, SyntaxError
    ):
        if content is None and path_inside:
            if not stays_below(path_inside):
                raise ValueError(f"its file is outside of the dataset: {path_inside!r}"[:200])
            content = (demos.root / path_inside).read_bytes()
        image = need("PIL.Image").open(io.BytesIO(content or b""))
        image.load()
    return image


@contextlib.contextmanager
def _wrap_errors(what: str, path: Path, *kinds: type[Exception]) -> Iterator[None]:
    """Convert a library's error for a damaged file to a one-line LockstepError."""
    errors: tuple[type[Exception], ...] = (OSError, ValueError, *kinds)
    try:
        yield
    except errors as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].replace(
            str(path), path.name
        )
        raise LockstepError(f"{what}: {reason}"[:300], str(path), LEAVE_OUT) from None


# ---- the cache -----------------------------------------------------------------------------------


class _Cache:
    """The memory maps of a dataset at one size; the constructor builds missing parts."""

    def __init__(self, frames: Frames, where: Path):
        demos = frames.demos
        self._demos, self._shapes, self._places, self._dtypes = (
            demos,
            frames.shapes,
            frames.places,
            frames.dtypes,
        )
        self._sizes = {
            name: frames.dtypes[name].itemsize * math.prod(shape)
            for name, shape in frames.shapes.items()
        }
        lengths = np.array(list(demos.lengths.values()))
        end = np.cumsum(lengths)
        # rows of the maps
        self._spans = dict(zip(demos.lengths, zip(end - lengths, end, strict=True), strict=True))
        self.begin = np.array([self._spans[e][0] for e in demos.episodes.tolist()])  # (E,)
        self.total = int(lengths.sum())
        identity = [
            VERSION,
            str(demos.root.resolve()),
            demos.version,
            demos.fps,
            sorted(demos.lengths.items()),
        ]
        identity += [
            [name, *shape, demos.features[name].dtype]
            for name, shape in sorted(frames.shapes.items())
        ]
        identity += [[name, str(depth)] for name, depth in sorted(frames.depths.items())]
        digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:12]
        self.folder = where / f"{demos.root.resolve().name}-{digest}"
        self.journal, self.checked = self.folder / "episodes.jsonl", self.folder / "checked.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / "lock", "a") as lock:
                _wait_for(lock, self.folder)  # a killed process releases the lock, too
                self._build(frames)
        except OSError as error:
            todo = "make room, or give a different dataset.cache_dir, or dataset.cache=none"
            what = f"cannot write the cache of pictures: {error.strerror or error}"
            raise LockstepError(what, str(self.folder), todo) from None

    def path(self, camera: str) -> Path:
        return self.folder / f"{camera}.u{8 * self._dtypes[camera].itemsize}"

    def open(self, camera: str) -> np.ndarray:
        """Return the read-only map (frames of the whole dataset, C, H, W)."""
        return np.memmap(
            self.path(camera),
            self._dtypes[camera],
            mode="r",
            shape=(self.total, *self._shapes[camera]),
        )

    def rows(self, rows: np.ndarray) -> np.ndarray:
        """Convert (n,) rows of demos.columns to rows of the maps."""
        e = np.searchsorted(self._demos.end, rows, "right")
        return self.begin[e] + (rows - self._demos.start[e])

    def _build(self, frames: Frames) -> None:
        """Decode the chosen episodes that are missing or whose files have changed."""
        demos = self._demos
        lines = self._good_lines()
        keys = [(camera, e) for camera in self._shapes for e in range(len(demos.episodes))]
        stamps = {key: self._stamp(*key) for key in keys}
        missing = [
            key
            for key in keys
            if not self._is_cached(lines.get((key[0], int(demos.episodes[key[1]]))), stamps[key])
        ]
        if not missing:
            return
        sizes = self._sizes
        lengths = demos.end - demos.start
        needed, free = (
            sum(int(lengths[e]) * sizes[c] for c, e in missing),
            shutil.disk_usage(self.folder).free,
        )
        if needed > free:
            what = (
                f"the pictures take {needed / 1e9:.2f} GB at this size, {free / 1e9:.2f} GB "
                "are free"
            )
            todo = (
                "make room, or give a smaller dataset.resize, a different dataset.cache_dir, "
                "or dataset.cache=none"
            )
            raise LockstepError(what, str(self.folder), todo)
        count = int(sum(lengths[e] for _, e in missing))
        # Close decoders on failure, too: a process forked later would wait for missing threads.
        with contextlib.closing(frames), _bar(count) as bar, open(self.journal, "ab") as journal:
            # A video may hold many episodes: open once and read in order.
            for (camera, _), group in groupby(
                sorted(missing, key=self._order), key=lambda key: self._order(key)[:2]
            ):
                with open(
                    os.open(self.path(camera), os.O_RDWR | os.O_CREAT, 0o666), "r+b"
                ) as target:
                    target.truncate(self.total * sizes[camera])
                    for key in group:
                        crc = self._write_episode(frames, *key, target.fileno(), bar)
                        os.fsync(target.fileno())  # the bytes reach the disk before the line
                        line = {
                            "camera": camera,
                            "episode": int(demos.episodes[key[1]]),
                            "crc32": crc,
                            "stamp": stamps[key],
                            "files": frames.own_files,
                        }
                        journal.write(json.dumps(line).encode() + b"\n")
                        journal.flush()
                        os.fsync(journal.fileno())
                frames.close()
        self._note_checked()

    def _order(self, key: tuple[str, int]) -> tuple[str, str, int, float]:
        place = self._places[key[0]][key[1]]
        return key[0], str(place.path), place.first_row, place.start_s

    def _write_episode(self, frames: Frames, camera: str, e: int, target: int, bar: Any) -> int:
        """Decode an episode into the file and return the CRC-32.

        The function uses pwrite: on a full disk, a write to a memory map kills the process.
        """
        rows = np.arange(self._demos.start[e], self._demos.end[e])
        at, crc = int(self.begin[e]) * self._sizes[camera], 0
        frames.own_files = {}
        for picture in frames.decode(camera, e, rows, threads=0):
            content = picture.tobytes()
            crc = zlib.crc32(content, crc)
            _write_all(target, content, at)
            at += len(content)
            bar.update()
        return crc

    def _stamp(self, camera: str, e: int) -> list[Any]:
        """Return values that change with an episode's pictures."""
        place = self._places[camera][e]
        return [*file_state(place.path), place.start_s, place.first_row]

    def _is_cached(self, line: dict[str, Any] | None, stamp: list[Any]) -> bool:
        """Return whether a line of the journal is of the pictures as they are now."""
        if line is None or line.get("stamp") != stamp:
            return False
        root = self._demos.root
        return all(file_state(root / name) == state for name, state in line["files"].items())

    def _good_lines(self) -> dict[tuple[str, int], dict[str, Any]]:
        """Return the journal's last line of each (camera, episode).

        Lines whose bytes are not in the map are omitted.
        """
        lines: dict[tuple[str, int], dict[str, Any]] = {}
        for text in self.journal.read_bytes().splitlines() if self.journal.exists() else []:
            # A kill may have truncated a line.
            with contextlib.suppress(ValueError, KeyError, TypeError):
                line = json.loads(text)
                lines[line["camera"], line["episode"]] = line
        if self._is_checked():
            return lines
        good = {key: line for key, line in lines.items() if self._crc(*key) == line.get("crc32")}
        _replace(self.journal, "".join(json.dumps(line) + "\n" for line in good.values()))
        self._note_checked()
        return good

    def _crc(self, camera: str, episode: int) -> int:
        size = self._sizes[camera]
        at, end = (int(row) * size for row in self._spans[episode])
        crc = 0
        with contextlib.suppress(FileNotFoundError), open(self.path(camera), "rb") as file:
            file.seek(at)
            while at < end and (content := file.read(min(end - at, 1 << 24))):
                crc = zlib.crc32(content, crc)
                at += len(content)
        return crc if at == end else -1

    def _files(self) -> dict[str, list[int]]:
        stats = {
            path.name: path.stat()
            for path in (*map(self.path, self._shapes), self.journal)
            if path.exists()
        }
        return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}

    def _is_checked(self) -> bool:
        """Return whether the files are unchanged since the last successful check of checksums."""
        try:
            return bool(json.loads(self.checked.read_text()) == self._files())
        except (OSError, ValueError):
            return False

    def _note_checked(self) -> None:
        _replace(self.checked, json.dumps(self._files()))


def _replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def _wait_for(lock: Any, folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if sys.stderr.isatty():
            print(f"waiting for a process that decodes the pictures into {folder}", file=sys.stderr)
        fcntl.flock(lock, fcntl.LOCK_EX)


def _bar(total: int) -> Any:
    from tqdm import tqdm

    return tqdm(
        total=total,
        desc="decoding pictures",
        unit="frame",
        disable=None,
        file=sys.stderr,
        leave=False,
    )


def _write_all(target: int, content: bytes, at: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(target, view, at)
        view, at = view[written:], at + written
