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
from formats.clock import SLACK, Clock
from formats.display import upright

SUFFIXES = tuple(
    ".3gp .asf .avi .flv .m2ts .m4v .mkv .mov .mp4 .mpeg .mpg .mts .ogv .ts .webm .wmv".split()
)
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
def opened(path: Path) -> Iterator[Iterator[Any]]:
    """Open a video and yield its frames in the order of display, decoded on demand.

    Raises BrokenVideo, also during the reading of frames.
    """
    with _container(path) as (container, stream):
        yield container.decode(stream)


@contextlib.contextmanager
def _container(path: Path) -> Iterator[tuple[Any, Any]]:
    """Open a video and yield (container, its first stream of pictures). Raises BrokenVideo."""
    av = import_av()
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise BrokenVideo(
                    "no pictures in the file", where=str(path), todo="give a video, or leave it out"
                )
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            yield container, stream
    except (av.error.FFmpegError, OSError) as error:  # FileNotFoundError belongs to both types
        what = f"cannot read the video: {error.strerror or error}"
        raise BrokenVideo(what, where=str(path), todo="fix it or remove it") from None


# ---- times of frames
# --------------------------------------------------------------------------------------------------

CHECKED = 32
"""Frames at the start of a video that are decoded to compare the packets with the pictures."""

OFF_S = 0.002
"""Seconds by which a picture may differ from its packet: containers round times to 1 ms."""


STAMP = "ffmpeg -r 25 -i IN -c copy OUT.mp4, with the camera's own rate in place of 25"
"""The cure for a file whose frames have no times."""

AGAIN = "write the video again: ffmpeg -i {} -fps_mode passthrough new.mp4"


def read_clock(path: Path) -> Clock:
    """Return the times of a video's frames, from its packets, without decoding the video.

    A file may start with packets that give no picture, as when a cut begins between key frames: the
    whole video is decoded for the times in this case. The rate is 0 where a file has no times.
    Raises BrokenVideo.
    """
    times, stated_fps, stamped = _packet_times(path)
    if stamped and not _agree(_picture_times(path, CHECKED), times):
        times = _picture_times(path)
    if not len(times):
        raise BrokenVideo("no pictures in the file", str(path), "give a video, or leave it out")
    if np.isnan(times).any():  # a bare stream of pictures: its rate is a guess of the library
        return Clock(len(times), 0.0)
    _check_rising(times, path)
    return Clock.of_times(times, stated_fps, stamped)


def _agree(shown: np.ndarray, times: np.ndarray) -> bool:
    """Return whether the first pictures have the first times; two unknown times agree."""
    if len(shown) > len(times):
        return False
    return np.allclose(shown, times[: len(shown)], rtol=0, atol=OFF_S, equal_nan=True)


def _check_rising(times: np.ndarray, path: Path) -> None:
    back = np.flatnonzero(np.diff(times) < 0)
    if len(back):
        number = int(back[0]) + 1
        raise BrokenVideo(
            f"picture {number} is at {times[number]:.3f} s, the one before at "
            f"{times[number - 1]:.3f} s",
            str(path),
            AGAIN.format(path.name),
        )


def _packet_times(path: Path) -> tuple[np.ndarray, float, bool]:
    """Return (seconds of the packets in order of display, stated rate, whether pictures have them).

    NaN stands for an unknown time.
    """
    with _container(path) as (container, stream):
        # The pictures of an AVI have no times; libraries make some up. Packets count the frames.
        stamped = container.format.name != "avi"
        ticks = []
        for packet in container.demux(stream):
            tick = packet.pts if stamped else packet.dts
            is_last = packet.size == 0 and tick is None
            if not packet.is_discard and not is_last:
                ticks.append(np.nan if tick is None else tick)
        seconds = np.sort(np.array(ticks, dtype=np.float64)) * float(stream.time_base)
        stated_fps = float(stream.average_rate or stream.guessed_rate or 0)
        return seconds - _origin(container, stream, seconds), stated_fps, stamped


def _picture_times(path: Path, most: int | None = None) -> np.ndarray:
    """Return the seconds of the first `most` decoded frames, or of all; NaN is unknown."""
    with _container(path) as (container, stream):
        frames = itertools.islice(container.decode(stream), most)
        ticks = [np.nan if frame.pts is None else frame.pts for frame in frames]
        seconds = np.array(ticks, dtype=np.float64) * float(stream.time_base)
        return seconds - _origin(container, stream, seconds)


def _origin(container: Any, stream: Any, seconds: np.ndarray) -> float:
    """Return the time at which players begin to count: the start of the first stream.

    Sound before 0 is the encoder's own start, and players drop it.
    """
    first_s = float(seconds[0]) if len(seconds) else 0.0
    if stream.start_time is not None:
        first_s = float(stream.start_time * stream.time_base)
    if len(container.streams) == 1 or container.start_time is None:
        return first_s
    start_s = max(container.start_time / 1e6, min(first_s, 0.0))
    return start_s if first_s - start_s > OFF_S else first_s


def in_time(frames: Iterator[Any], clock: Clock, path: Path) -> Iterator[Any]:
    """Yield the frames, and compare the time of each with the clock.

    Raises BrokenVideo at the first difference: a decoder leaves out damaged pictures, and each
    later frame would have another number.
    """
    begin: float | None = None
    for number, frame in enumerate(frames):
        if clock.stamped and clock.fps and frame.time is not None:
            begin = frame.time if begin is None else begin
            expected_s = float(clock.time_of(number)) - clock.first_s
            slack_s = OFF_S if clock.own_s is not None else OFF_S + SLACK / clock.fps
            if abs(frame.time - begin - expected_s) > slack_s:
                raise BrokenVideo(
                    f"picture {number} is at {frame.time - begin:.3f} s, its packet at "
                    f"{expected_s:.3f} s: pictures are damaged, or times go back",
                    str(path),
                    AGAIN.format(path.name),
                )
        yield frame


def gray_square(
    frame: Any, crop: tuple[int, int, int, int] | None, size: int, path: Path
) -> np.ndarray:
    """Convert a decoded frame to (size, size) uint8, 0 black to 255 white, upright as players do.

    The result does not depend on the video's coded range. Raises LockstepError if the crop (x, y,
    width, height) is not inside the frame as it is shown, and for a frame turned by no right angle.
    """
    from PIL import Image  # comes with tensorboard

    picture = upright(frame.to_ndarray(format="gray"), frame, path)
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

    def offsets_s(self) -> np.ndarray:
        """Return (T,) offsets of a trial's frames from its first frame, in seconds, with `fps`."""
        return self.every * np.arange(self.frames) / self.fps

    @property
    def span(self) -> int:
        """Return the frames of the video from a trial's first frame to its last, both included."""
        return (self.frames - 1) * self.every + 1


def resampled(pictures: Iterable[np.ndarray], numbers: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the pictures of a stream by (M,) rising numbers; equal numbers repeat a picture."""
    n = 0
    for number, picture in enumerate(pictures):
        while n < len(numbers) and numbers[n] == number:
            yield picture
            n += 1


def slide(
    pictures: Iterable[np.ndarray],
    cutting: Cutting,
    stride: int,
    classify: Callable[[Tensor], np.ndarray],
    batch_size: int,
    clock: Clock | None = None,
) -> np.ndarray:
    """Return (N, C): each frame's mean probabilities over the trials that contain the frame.

    A trial starts every `stride` frames, and the last trial ends with the video. The result is
    empty for too few frames. With `cutting.fps` and a clock, the frames nearest to even times are
    taken, and each frame gets the probabilities of the nearest even time.
    """
    if clock is None or not _resamples(cutting, clock):
        return _slide(pictures, cutting, stride, classify, batch_size)
    numbers = clock.samples(cutting.fps)
    found = _slide(resampled(pictures, numbers), cutting, stride, classify, batch_size)
    if not len(found):
        return found
    nearest = clock.nearest_samples(cutting.fps)
    return found[np.minimum(nearest, len(found) - 1)]


def _resamples(cutting: Cutting, clock: Clock) -> bool:
    """Return whether some frames of a video are left out or repeated for the rate of the clips."""
    is_at_rate = clock.own_s is None and clock.fps == cutting.fps
    return bool(cutting.fps and clock.fps) and not is_at_rate


def _slide(
    pictures: Iterable[np.ndarray],
    cutting: Cutting,
    stride: int,
    classify: Callable[[Tensor], np.ndarray],
    batch_size: int,
) -> np.ndarray:
    """Return (N, C) as `slide`, for all frames of a stream."""
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
