"""Lossless videos whose frames can be told by their gray level, and packed clips."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from formats.lab.clips import Clips, ClipsWriter

NUM_FRAMES = 40


def gray_of(number: int, video: int = 0) -> int:
    """Return the gray level of a frame; frames of two videos differ by at least 2."""
    return 10 + 5 * number + 2 * video


def encode(path: Path, video: int = 0, rate: int | Fraction = 20) -> None:
    """Write a video of 64 x 48 pixels: the left half has the frame's gray level, the right half is white."""
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=rate)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.options = {"crf": "0", "g": "12", "bf": "2"}  # B frames and rare key frames, as in real videos
        for number in range(NUM_FRAMES):
            picture = np.full((48, 64, 3), 255, np.uint8)
            picture[:, :32] = gray_of(number, video)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def left(clips: Clips, trial: int) -> list[int]:
    """Return the gray levels of a trial's frames at its left edge."""
    return clips.__getitems__([trial])["x"][0, :, 0, 0].tolist()


def pack(folder: Path, trials, classes=("rest", "walk"), shape=(2, 8, 8)) -> Path:
    """A folder of black clips, (video, label) of each."""
    with ClipsWriter(folder, classes) as writer:
        for video, label in trials:
            writer.add(np.zeros(shape, np.uint8), video, label)
    return folder
