"""Videos as gray squares: the conversion of frames to clips that training and prediction share.

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
"""Suffixes of the videos in a folder. A file that is given by its own name may have any."""


class BrokenVideo(LockstepError):
    """A video that cannot be read; a caller with others may leave it out."""


def import_av() -> Any:
    """Return the module `av`. Raises LockstepError if it cannot be imported."""
    try:
        import av
    except ImportError as error:
        raise LockstepError(f"PyAV is needed to read videos: {error}", todo="pip install av") from None
    return av


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[Iterator[Any], float]]:
    """Open a video: yields its frames, decoded as they are consumed, and its average frames per second, 0 if unknown.
    Raises BrokenVideo, also while frames are read."""
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
        raise BrokenVideo(what, where=str(path), todo="fix it or remove it") from None


def gray_square(frame: Any, crop: tuple[int, int, int, int] | None, size: int, path: Path) -> np.ndarray:
    """A decoded frame -> (size, size) uint8, 0 black to 255 white, whatever range the video is coded in. Raises
    LockstepError if the crop (x, y, width, height) is not inside the frame."""
    from PIL import Image  # comes with tensorboard

    picture = frame.to_ndarray(format="gray")
    if crop is not None:
        x, y, width, height = crop
        if x + width > picture.shape[1] or y + height > picture.shape[0]:
            raise LockstepError(
                f"--crop {x} {y} {width} {height} reaches out of its {picture.shape[1]} x {picture.shape[0]} pixels",
                str(path),
                "give a box inside the video",
            )
        picture = picture[y : y + height, x : x + width]
    if picture.shape == (size, size):
        return picture
    return np.asarray(Image.fromarray(np.ascontiguousarray(picture)).resize((size, size), Image.Resampling.BOX))
