"""Read videos as gray squares and cut trials, for the preparation of clips and for prediction.

Needs PyAV: pip install av
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.contract import LockstepError

SUFFIXES = tuple(".avi .flv .m4v .mkv .mov .mp4 .mpeg .mpg .ogv .webm .wmv".split())
"""Suffixes of the videos in a folder. A file given by name may have any suffix."""


class BrokenVideo(LockstepError):
    """A video that cannot be read. A caller with several videos may skip the video."""


def import_av() -> Any:
    """Return the module `av`. Raises LockstepError if it cannot be imported."""
    try:
        import av
    except ImportError as error:
        raise LockstepError(
            f"PyAV is needed to read videos: {error}", todo="pip install av"
        ) from None
    return av


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[Iterator[Any], float]]:
    """Open a video and yield (frames, average frames per second); 0 if the rate is unknown.

    Frames are decoded on demand. Raises BrokenVideo, also during the reading of frames.
    """
    av = import_av()
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise BrokenVideo(
                    "no pictures in the file", where=str(path), todo="give a video, or leave it out"
                )
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            yield container.decode(stream), float(stream.average_rate or stream.guessed_rate or 0)
    except (av.error.FFmpegError, OSError) as error:  # FileNotFoundError belongs to both types
        what = f"cannot read the video: {error.strerror or error}"
        raise BrokenVideo(what, where=str(path), todo="fix it or remove it") from None


def gray_square(
    frame: Any, crop: tuple[int, int, int, int] | None, size: int, path: Path
) -> np.ndarray:
    """Convert a decoded frame to (size, size) uint8, 0 black to 255 white.

    The result does not depend on the video's coded range. Raises LockstepError if the crop (x, y,
    width, height) is not inside the frame.
    """
    from PIL import Image  # comes with tensorboard

    picture = frame.to_ndarray(format="gray")
    if crop is not None:
        x, y, width, height = crop
        if x + width > picture.shape[1] or y + height > picture.shape[0]:
            what = (
                f"--crop {x} {y} {width} {height} reaches out of its {picture.shape[1]} x "
                f"{picture.shape[0]} pixels"
            )
            raise LockstepError(what, str(path), "give a box inside the video")
        picture = picture[y : y + height, x : x + width]
    if picture.shape == (size, size):
        return picture
    return np.asarray(
        Image.fromarray(np.ascontiguousarray(picture)).resize((size, size), Image.Resampling.BOX)
    )


@dataclass(frozen=True)
class Cutting:
    """Settings for cutting a trial: `frames` pictures, `every` frames of the video apart.

    crop  (x, y, width, height) in pixels of the video, or None for the full picture
    size  height and width of the pictures
    fps   frame rate to which a video of any other rate is resampled; 0: no resampling
    """

    frames: int
    every: int
    crop: tuple[int, int, int, int] | None
    size: int
    fps: float = 0.0

    def offsets(self, fps: float) -> np.ndarray:
        """Return (T,) offsets of a trial's frames from its first frame, in frames of the video."""
        return np.rint(
            self.every * np.arange(self.frames) * (fps / self.fps if self.fps else 1.0)
        ).astype(np.int64)

    @property
    def span(self) -> int:
        """Return the frames of the video from a trial's first frame to its last, both included."""
        return (self.frames - 1) * self.every + 1


def resampled(pictures: Iterable[np.ndarray], ratio: float) -> Iterator[np.ndarray]:
    """Yield picture round(n * ratio) of a stream for n = 0, 1, ...; ratio < 1 repeats pictures."""
    n = 0
    for number, picture in enumerate(pictures):
        while round(n * ratio) == number:
            yield picture
            n += 1


def slide(
    pictures: Iterable[np.ndarray],
    cutting: Cutting,
    stride: int,
    classify: Callable[[Tensor], np.ndarray],
    batch_size: int,
    fps: float = 0.0,
) -> np.ndarray:
    """Return (N, C): each frame's mean probabilities over the trials that contain the frame.

    A trial starts every `stride` frames, and the last trial ends with the video. The result is
    empty for too few frames. A video of `fps` frames/s is resampled to `cutting.fps`, if set, and
    each frame gets the probabilities of the nearest resampled frame.
    """
    if fps and cutting.fps not in (0, fps):
        number, ratio = itertools.count(), fps / cutting.fps
        counted = (picture for picture, _ in zip(pictures, number, strict=False))
        found = slide(resampled(counted, ratio), cutting, stride, classify, batch_size)
        nearest = np.rint(np.arange(next(number)) / ratio).astype(np.int64)
        return found[np.minimum(nearest, len(found) - 1)] if len(found) else found
    trials = _trials(pictures, cutting, stride)
    starts: list[int] = []
    answers: list[np.ndarray] = []
    while batch := [*itertools.islice(trials, batch_size)]:
        starts += [first for first, _ in batch]
        answers.append(classify(torch.from_numpy(np.stack([clip for _, clip in batch]))))
    if not starts:
        return np.empty((0, 0))
    probabilities, count = np.concatenate(answers), starts[-1] + cutting.span
    total, seen = np.zeros((count, probabilities.shape[1])), np.zeros((count, 1))
    for first, probability in zip(starts, probabilities, strict=True):
        total[first : first + cutting.span] += probability
        seen[first : first + cutting.span] += 1
    return total / seen


def _trials(
    pictures: Iterable[np.ndarray], cutting: Cutting, stride: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (number of the first frame, (T, H, W)) of each trial.

    Memory holds at most the frames of one trial's span.
    """
    recent: deque[np.ndarray] = deque(maxlen=cutting.span)
    first = -cutting.span
    for picture in pictures:
        recent.append(picture)
        first += 1
        if first >= 0 and first % stride == 0:
            yield first, np.stack([*recent][:: cutting.every])
    if first > 0 and first % stride:
        yield first, np.stack([*recent][:: cutting.every])


def side_of(name: str, sides: dict[str, list[str]]) -> str:
    """Return the side of a run on which a video was used: "trained on", "held out" or "new".

    sides  {side: names} of the run's own videos; empty for an older checkpoint, which gives ""

    A name matches without suffix, by the common length of both paths. If only a folder differs, the
    side has a question mark, because the video may be a copy. If several videos of the run have the
    name in different folders, the video is new.
    """
    mine = _steps(name)
    own = [(side, _steps(known)) for side, names in sides.items() for known in names]
    namesakes = [(side, known) for side, known in own if known[-1] == mine[-1]]
    for side, known in namesakes:
        if all(a == b for a, b in zip(reversed(mine), reversed(known), strict=False)):
            return side
    one = len({known for _, known in namesakes}) == 1
    return "" if not sides else f"{namesakes[0][0]}?" if one else "new"


def _steps(name: str) -> tuple[str, ...]:
    """Split a path without suffix: a/b.mp4 -> (a, b)"""
    stem, ending = os.path.splitext(os.path.normpath(name))
    return tuple((stem if ending.lower() in SUFFIXES else stem + ending).split(os.sep))
