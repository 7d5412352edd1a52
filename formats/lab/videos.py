"""Videos as gray squares, cut into trials: what preparing clips and predicting videos share.

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
"""Suffixes of the videos in a folder. A file that is given by its own name may have any."""


class BrokenVideo(LockstepError):
    """A video that cannot be read; a caller with others may leave it out."""


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
    """Open a video: yields its frames, decoded as they are consumed, and its average frames per
    second, 0 if unknown. Raises BrokenVideo, also while frames are read."""
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
    except (av.error.FFmpegError, OSError) as error:  # FileNotFoundError is both
        what = f"cannot read the video: {error.strerror or error}"
        raise BrokenVideo(what, where=str(path), todo="fix it or remove it") from None


def gray_square(
    frame: Any, crop: tuple[int, int, int, int] | None, size: int, path: Path
) -> np.ndarray:
    """A decoded frame -> (size, size) uint8, 0 black to 255 white, whatever range the video is
    coded in. Raises LockstepError if the crop (x, y, width, height) is not inside the frame."""
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
    """How a trial is cut out of a video: `frames` pictures, `every` frames of the video apart.

    crop  (x, y, width, height) in pixels of the video, or None for all of it
    size  height and width of the pictures
    fps   the frame rate at which a video of any other rate is taken; 0: its own
    """

    frames: int
    every: int
    crop: tuple[int, int, int, int] | None
    size: int
    fps: float = 0.0

    def offsets(self, fps: float) -> np.ndarray:
        """Return (T,) the frames of a video of `fps` frames/s from a trial's first to each of its
        own."""
        return np.rint(
            self.every * np.arange(self.frames) * (fps / self.fps if self.fps else 1.0)
        ).astype(np.int64)

    @property
    def span(self) -> int:
        """Frames of the video from a trial's first to its last one, both included."""
        return (self.frames - 1) * self.every + 1


def resampled(pictures: Iterable[np.ndarray], ratio: float) -> Iterator[np.ndarray]:
    """Yield the pictures number round(n * ratio), n = 0, 1, ..., of a stream; some twice if ratio <
    1."""
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
    """A stream of a video's frames -> (N, C), each frame's mean probabilities over the trials that
    contain it.

    A trial starts every `stride` frames, and the last one ends with the video. Empty if there are
    too few frames. A video of `fps` frames/s is taken at `cutting.fps`, if it is given, and each
    frame gets what the nearest one has.
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
    """Yield (the number of its first frame, (T, H, W)) of each trial; no more frames are held than
    one spans."""
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
    """Return the side {"trained on", "held out": names} of a run's own videos that has this one;
    "new" if none has it, and nothing if an older checkpoint does not know.

    It is known by its name without the ending and by as much of the path as both give. Where a
    folder differs the side has a question mark, because a copy lies elsewhere; but the video is new
    where those of the run differ by folders alone.
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
    """a/b.mp4 -> (a, b)"""
    stem, ending = os.path.splitext(os.path.normpath(name))
    return tuple((stem if ending.lower() in SUFFIXES else stem + ending).split(os.sep))
