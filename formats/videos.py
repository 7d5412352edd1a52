"""Videos as gray squares: the one way from a film to the pictures of a clip, for training and for what comes after it.

Needs PyAV: pip install av
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from engine.contract import LockstepError

SUFFIXES = tuple(".avi .flv .m4v .mkv .mov .mp4 .mpeg .mpg .ogv .webm .wmv".split())
"""What is taken for a video in a folder. A file that is named itself may have any name."""


class BrokenVideo(LockstepError):
    """A video that cannot be read: what may be left out where there are others."""


def import_av() -> Any:
    try:
        import av
    except ImportError as error:
        raise LockstepError(f"PyAV is needed to read videos: {error}", todo="pip install av") from None
    return av


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[Iterator[Any], float]]:
    """The frames of a video from its start, decoded as they are asked for, and how many there are to a second on
    average, or 0 where it does not say. Raises BrokenVideo, while it is read as well."""
    av = import_av()
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise BrokenVideo("no pictures in the file", where=str(path), todo="give a video, or leave it out")
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            yield container.decode(stream), float(stream.average_rate or stream.guessed_rate or 0)
    except (av.error.FFmpegError, OSError) as error:  # FileNotFoundError is both
        what = f"cannot read the video: {error.strerror or error}"
        raise BrokenVideo(what, where=str(path), todo="mend it, or leave it out") from None


def gray_square(frame: Any, crop: tuple[int, int, int, int] | None, size: int, path: Path) -> np.ndarray:
    """A decoded frame -> (size, size) uint8: 0 black, 255 white whatever range the video is coded in."""
    from PIL import Image  # comes with tensorboard

    picture = frame.to_ndarray(format="gray")
    if crop is not None:
        x, y, width, height = crop
        if x + width > picture.shape[1] or y + height > picture.shape[0]:
            raise LockstepError(
                f"--crop {x} {y} {width} {height} reaches out of its {picture.shape[1]} x {picture.shape[0]} pixels",
                where=str(path),
                todo="give a box inside the video",
            )
        picture = picture[y : y + height, x : x + width]
    if picture.shape == (size, size):
        return picture
    return np.asarray(Image.fromarray(np.ascontiguousarray(picture)).resize((size, size), Image.Resampling.BOX))
