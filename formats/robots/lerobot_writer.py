"""Record demonstrations as a LeRobot dataset of version 3.0.

LeRobot and `formats.robots.lerobot` read the dataset.

    with Recorder("data/reach", fps=10, features={
        "observation.state": ("float32", (2,)),
        "observation.images.top": ("image", (3, 32, 32)),
        "action": ("float32", (2,)),
    }, names={"action": ["x", "y"]}) as recorder:
        # arrays (T, ...)
        recorder.add_episode({"observation.state": states, ...}, task="move to the red disc")

The dataset gets its name at the end of the block. A finished episode survives a kill or an error.
`resume=True` continues after the last finished episode, or adds to a complete dataset. See
formats/robots/recording.py.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.contract import LockstepError
from formats.arrays import is_file_name
from formats.robots import assembly, encoders, lerobot, recording
from formats.robots import lerobot_files as files
from formats.robots.depth import CODES, Depth
from formats.robots.lerobot import BOOKKEEPING, Stats, measure, need
from formats.robots.lerobot_files import NUMBERS, OWN, PICTURES


class Recorder:
    """Writes episodes one after another; the end of the `with` block completes the dataset.

    root      the folder to create
    fps       frames per second
    features  {name: (dtype, shape of one frame)}. A dtype is one of NUMBERS. With the shape (3, H,
              W), a dtype may be "image" (PNG, lossless) or "video" (lossy: AV1, or H.264 or MPEG-4
              if the AV1 encoder is missing). With the shape (1, H, W), a dtype may be "depth":
              uint16 millimetres, stored as 4096 distances up to 10 m, 1.5 mm apart at 1 m.
    names     {feature: names of the numbers}, a list or {"motors": [...]}; LeRobot's replay and
              rollout use these names
    file_mb   size in MiB at which the next episode starts a new file
    resume    continue a killed recording, or add to the dataset `root`; start a new recording if
              neither exists
    keep      finished episodes survive a kill or an error until `resume`. Without `keep`, the next
              recording removes such episodes

    Raises LockstepError if `root` or finished episodes exist without `resume`, and for frames that
    do not match `features`.
    """

    def __init__(
        self,
        root: str | Path,
        fps: float,
        features: Mapping[str, tuple[str, Sequence[int]]],
        robot_type: str = "",
        file_mb: float = 100.0,
        *,
        names: Mapping[str, Any] | None = None,
        resume: bool = False,
        keep: bool = True,
    ):
        self.root, self.fps, self.robot_type, self.file_mb = Path(root), fps, robot_type, file_mb
        try:
            self.features = {
                name: (dtype, tuple(shape)) for name, (dtype, shape) in features.items()
            }
            is_rate = bool(fps > 0) and math.isfinite(fps)
        except (TypeError, ValueError):
            what, todo = (
                "a feature is no pair of a dtype and a shape, or fps no number",
                'give ("float32", (6,)) and 30',
            )
            raise LockstepError(what, str(root), todo) from None
        if not is_rate or not self.features:
            what = "no features" if is_rate else f"fps {fps} is no rate"
            raise LockstepError(what, str(root), "give features, and the frames per second")
        self.names, self._resume = dict(names or {}), resume
        self._check_declaration()
        need("pyarrow.parquet")
        if self.root.exists() and resume:
            self.root = self.root.resolve()  # keep a link at the original path
        elif self.root.exists() or self.root.is_symlink():
            todo = "remove it, choose a new one, or add to it with resume=True"
            raise LockstepError("the folder exists already", str(root), todo)
        self._recording = recording.Recording(self.root, keep)
        self._frames: list[dict[str, np.ndarray]] = []
        self._task: str | None = None

    @classmethod
    def resume(cls, root: str | Path, file_mb: float = 100.0) -> Recorder:
        """Continue a killed recording, or add to a dataset, with the stored declaration."""
        path = Path(root)
        about = recording.Recording(path.resolve(), True).path / "about.json"
        if about.exists():
            given = json.loads(about.read_text(encoding="utf-8"))
        else:
            given = assembly.read_base(path).declared()
        how = {name: given[name] for name in ("fps", "features", "robot_type", "names")}
        return cls(path, file_mb=file_mb, resume=True, **how)

    def _of(self, *dtypes: str) -> list[str]:
        return [name for name, (dtype, _) in self.features.items() if dtype in dtypes]

    def _check_declaration(self) -> None:
        where = str(self.root)
        for name, (dtype, shape) in self.features.items():
            channels = 1 if dtype == "depth" else 3
            if dtype not in PICTURES + NUMBERS:
                what, todo = (
                    f"{name} has dtype {dtype!r}",
                    f"choose of {', '.join(PICTURES + NUMBERS)}",
                )
            elif name in BOOKKEEPING or not is_file_name(name):
                what, todo = (
                    f"a feature cannot have the name {name!r}",
                    "choose a different one, without /",
                )
            elif (
                not shape
                or min(shape) < 1
                or (dtype in PICTURES and (len(shape) != 3 or shape[0] != channels))
            ):
                what, todo = (
                    f"{name} has shape {shape}",
                    "a picture has (3, H, W), a depth (1, H, W), a number (1,)",
                )
            elif dtype in ("video", "depth") and (shape[1] % 2 or shape[2] % 2):
                what, todo = f"{name} has shape {shape}", "a video needs an even height and width"
            else:
                continue
            raise LockstepError(what, where, todo)
        for name, given in self.names.items():
            dtype, shape = self.features.get(name, ("", ()))
            if dtype not in NUMBERS:
                what, todo = (
                    f"names of {name}, which is no feature of numbers",
                    f"give {', '.join(self._of(*NUMBERS))}",
                )
                raise LockstepError(what, where, todo)
            if (count := len(lerobot._flat_names(given))) not in (shape[0], math.prod(shape)):
                raise LockstepError(
                    f"{name} has {count} names and the shape {shape}", where, "give a name to each"
                )

    # ---- start

    def __enter__(self) -> Recorder:
        try:
            self._begin()
        except OSError as error:
            raise _cannot_write(self.root, error) from None
        return self

    def _begin(self) -> None:
        staged = self._recording
        going_on = staged.begin()
        try:
            if going_on and not self._resume:
                if staged.keep:
                    todo = "resume=True goes on with it; remove the folder to begin again"
                    raise LockstepError(
                        f"a recording was interrupted: {staged.summary()}", str(self.root), todo
                    )
                staged.clear()
                going_on = False
            self._base = assembly.read_base(self.root) if self.root.exists() else None
            if self._base:
                self._take(self._base.declared(), "the dataset")
            if going_on:
                self._take(staged.about(), "the interrupted recording")
            self._before = recording.digest(self.root)
            about = {
                "fps": self.fps,
                "features": self.features,
                "names": self.names,
                "robot_type": self.robot_type,
            }
            staged.set_about(about)
        except BaseException:
            staged.end()
            raise
        base = self._base
        self._first = base.counts[0] if base else 0
        every = self.features | OWN
        columns = {name: every[name] for name in (base.info["features"] if base else every)}
        depths = base.depths if base else {name: Depth() for name in self._of("depth")}
        self._given = assembly.Declaration(self.fps, columns, self.names, self.robot_type, depths)

    def _take(self, there: Mapping[str, Any], who: str) -> None:
        """Adopt the declaration of `who`.

        Raises LockstepError if the recorder's declaration differs.
        """
        features = {
            name: (dtype, tuple(shape)) for name, (dtype, shape) in there["features"].items()
        }
        odd: dict[str, tuple[Any, Any]] = {
            n: (features.get(n), self.features.get(n)) for n in features | self.features
        }
        odd |= {"fps": (there["fps"], self.fps)}
        odd |= {f"names of {n}": (there["names"].get(n), given) for n, given in self.names.items()}
        odd |= {"robot_type": (there["robot_type"], self.robot_type or there["robot_type"])}
        for name, (theirs, ours) in odd.items():
            if theirs != ours:
                what = f"{who} has {name} {_shown(theirs)}, this recorder {_shown(ours)}"
                raise LockstepError(
                    what, str(self.root), "give the same, or use Recorder.resume(root)"
                )
        self.features, self.names, self.robot_type = (
            features,
            dict(there["names"]),
            there["robot_type"],
        )

    @property
    def num_episodes(self) -> int:
        """Return the number of episodes of the dataset, including the base dataset."""
        return self._first + len(self._recording.episodes)

    # ---- add episodes

    def add_frame(self, frame: Mapping[str, Any], task: str) -> None:
        """Add a frame, {name: array of the feature's shape}, to the current episode.

        `end_episode` writes the episode.
        """
        self._check_task(task)
        if self._task not in (None, task):
            what = f"a frame of {task!r} in an episode of {self._task!r}"
            raise LockstepError(what, self._here(), "call end_episode() first")
        batch = {
            name: value[None] if isinstance(value, np.ndarray) else [value]
            for name, value in frame.items()
        }
        self._frames.append(
            {name: values[0] for name, values in self._check(batch, len(self._frames)).items()}
        )
        self._task = task

    def end_episode(self) -> None:
        """Write the frames added since the last call as an episode."""
        if self._task is None:
            raise LockstepError("an episode without frames", self._here(), "call add_frame() first")
        frames, task = self._frames, self._task
        self.drop_episode()
        self.add_episode(
            {name: np.stack([frame[name] for frame in frames]) for name in self.features}, task
        )

    def drop_episode(self) -> None:
        """Discard the frames added since the last `end_episode`."""
        self._frames, self._task = [], None

    def add_episode(self, arrays: Mapping[str, Any], task: str) -> None:
        """Write a complete episode: {name: (T, ...)} for each feature, and the task as text."""
        if self._frames:
            raise LockstepError(
                "an episode inside an episode", self._here(), "call end_episode() first"
            )
        self._check_task(task)
        episode = self._check(arrays, 0)
        length = len(next(iter(episode.values()), ()))
        if length == 0:
            raise LockstepError("an episode without frames", self._here(), "give at least one")
        try:
            self._write_episode(episode, length, task)
        except OSError as error:
            raise _cannot_write(self.root, error) from None

    def _check_task(self, task: Any) -> None:
        """Raise LockstepError unless the task is a text that can be written.

        Without the check, the error would appear at the end of the recording.
        """
        try:
            is_text = isinstance(task, str) and bool(task.strip()) and bool(task.encode())
        except UnicodeEncodeError:  # a lone surrogate, as in undecodable arguments
            is_text = False
        if not is_text:
            raise LockstepError(
                f"the task {ascii(task)[:80]} is no text", self._here(), "say what is to be done"
            )

    def _here(self) -> str:
        return f"{self.root}: episode {self.num_episodes}"

    def _check(self, arrays: Mapping[str, Any], first: int) -> dict[str, np.ndarray]:
        """Convert the arrays to the declared types; messages count frames from `first`."""
        where = self._here()
        if set(arrays) != set(self.features):
            odd = sorted(set(arrays) ^ set(self.features))
            what = f"{odd[0]} is {'not declared' if odd[0] in arrays else 'missing'}"
            raise LockstepError(what, where, f"give {', '.join(self.features)}")
        try:
            found = {name: np.asarray(arrays[name]) for name in self.features}
        except ValueError as error:
            raise LockstepError(
                f"no array: {error}", where, "give arrays, or lists of equal lengths"
            ) from None
        shortest = min(len(array) if array.ndim else 0 for array in found.values())
        for name, array in found.items():
            found[name] = self._cast(name, array, shortest, first)
        return found

    def _cast(self, name: str, array: np.ndarray, shortest: int, first: int) -> np.ndarray:
        """Convert an array to the declared type.

        shortest  number of frames of the shortest array
        first     number of the first frame, for messages
        """
        where = self._here()
        dtype, shape = self.features[name]
        kind = _stored_dtype(dtype)
        if array.shape[1:] != shape or not array.ndim:
            raise LockstepError(
                f"{name} has frames of {array.shape[1:]}",
                where,
                f"give (T, {', '.join(map(str, shape))})",
            )
        if len(array) != shortest:
            what = f"{name} has {len(array)} frames, others {shortest}"
            raise LockstepError(what, where, "give all the same")
        if not np.can_cast(array.dtype, kind, "safe" if dtype in PICTURES else "same_kind"):
            todo = f"give {kind}"
            if dtype == "depth":
                todo += ", in millimetres"
            raise LockstepError(f"{name} is {array.dtype}", where, todo)
        is_finite = np.isfinite(array)
        if not is_finite.all():
            bad = int(np.flatnonzero(~is_finite.reshape(len(array), -1).all(1))[0])
            what = f"{name} is not finite (NaN or infinity) at frame {first + bad}"
            raise LockstepError(what, where, "leave it out")
        with np.errstate(over="ignore"):
            cast = array.astype(kind, copy=False)
        is_held = np.isfinite(cast) if kind.kind == "f" else cast == array
        if not is_held.all():
            what = f"{name} has numbers that {kind} does not hold"
            raise LockstepError(what, where, "declare a wider dtype")
        return cast

    def _write_episode(self, episode: Mapping[str, np.ndarray], length: int, task: str) -> None:
        frame = np.arange(length)
        own: dict[str, np.ndarray] = {
            "timestamp": (frame / self.fps).astype(np.float32),
            "frame_index": frame,
        }
        stats: Stats = {name: measure(column[:, None]) for name, column in own.items()}
        counts, codecs = dict[str, Any](), dict[str, str]()
        with self._recording.adding() as (folder, about):
            for name, array in episode.items():
                dtype, shape = self.features[name]
                if dtype not in PICTURES:
                    stats[name] = measure(array)
                    continue
                if dtype == "depth":
                    array = self._given.depths[name].codes(array)
                found = files.levels(array, CODES if dtype == "depth" else 256)
                counts[name], stats[name] = (
                    found.tolist(),
                    files.picture_stats(found, self._given.values(name), length),
                )
                if dtype != "image":
                    kinds = encoders.DEPTH if dtype == "depth" else encoders.COLOUR
                    first = self._base.codec(name) if self._base else ""
                    encoder = encoders.Encoder(
                        folder / f"{name}.mp4", self.fps, shape[1:], kinds, first
                    )
                    try:
                        encoder.add(array)
                    finally:
                        encoder.close()
                    codecs[name] = encoder.codec
            rows = files.table(
                dict(episode) | own, self.features | {name: OWN[name] for name in own}
            )
            need("pyarrow.parquet").write_table(rows, folder / "data.parquet", compression="snappy")
            about |= {
                "length": length,
                "task": task,
                "stats": files.flat(stats),
                "levels": counts,
                "codecs": codecs,
            }

    # ---- complete the dataset

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        except OSError as error:
            raise _cannot_write(self.root, error) from None
        finally:
            recorded = self._recording.summary()
            if self._recording.end():
                print(f"kept: {recorded}; resume=True goes on after them", file=sys.stderr)

    def _finish(self) -> None:
        if self._frames:
            raise LockstepError(
                "the last episode was not ended", self._here(), "call end_episode()"
            )
        if not self.num_episodes:
            raise LockstepError("no episode was written", str(self.root), "give at least one")
        if self._recording.episodes:
            new = self._recording.path / "dataset"
            assembly.assemble(new, self._recording, self._given, self._base, self.file_mb)
            self._recording.publish(new, self._before)


def _stored_dtype(dtype: str) -> np.dtype[Any]:
    """Return the type of the arrays of a feature."""
    if dtype == "depth":
        return np.dtype("uint16")
    if dtype in PICTURES:
        return np.dtype("uint8")
    return np.dtype(dtype)


def _shown(value: Any) -> str:
    if isinstance(value, tuple) and len(value) == 2:  # a feature
        return f"({value[0]}, {value[1]})"
    return "none of it" if value is None else repr(value)


def _cannot_write(folder: Path, error: OSError) -> LockstepError:
    return LockstepError(
        f"cannot write: {error.strerror or error}",
        str(folder),
        "choose a different folder or make room",
    )
