"""Lossless videos whose frames can be told by their gray level, and packed clips."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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


TICK = Fraction(1, 1000)


@dataclass(frozen=True)
class Encoding:
    """How `film` writes a video.

    sound_s  start of a sound, or None without one
    """

    codec: str = "libx264"
    form: str | None = None
    b_frames: int = 2
    sound_s: float | None = None


def film(path: Path, times_ms: Sequence[int], pictures: Iterable[np.ndarray], how: Encoding = Encoding()) -> Path:
    """Write pictures (48, 64) uint8 at times in milliseconds."""
    av = pytest.importorskip("av")
    with av.open(str(path), "w", format=how.form) as container:
        stream = container.add_stream(how.codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.time_base = stream.codec_context.time_base = TICK
        stream.options = {"g": "10", "bf": str(how.b_frames)}
        if how.sound_s is not None:
            _write_sound(av, container, how.sound_s)
        for time_ms, picture in zip(times_ms, pictures, strict=True):
            frame = av.VideoFrame.from_ndarray(picture, format="gray").reformat(format="yuv420p")
            frame.pts, frame.time_base = time_ms, TICK
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def _write_sound(av, container, start_s: float) -> None:
    """Write a second of silence."""
    stream = container.add_stream("pcm_s16le", rate=8000)
    sound = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.int16), format="s16", layout="mono")
    sound.sample_rate, sound.pts, sound.time_base = 8000, int(8000 * start_s), Fraction(1, 8000)
    container.mux(stream.encode(sound))
    container.mux(stream.encode())


def flat(levels: Iterable[int]) -> Iterator[np.ndarray]:
    """Yield a picture of each gray level."""
    for level in levels:
        yield np.full((48, 64), level, np.uint8)


def turn(path: Path, matrix: tuple[int, int, int, int], new: Path) -> Path:
    """Copy an .mp4 with the display matrix (a, b, c, d) in its head, as phones write it."""
    content = bytearray(path.read_bytes())
    at = content.find(b"tkhd") + 44  # version 0: nine numbers of 16.16 and 2.30 bits
    a, b, c, d = (each << 16 for each in matrix)
    content[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    new.write_bytes(content)
    return new


def left(clips: Clips, trial: int) -> list[int]:
    """Return the gray levels of a trial's frames at its left edge."""
    return clips.__getitems__([trial])["x"][0, :, 0, 0].tolist()


def pack(folder: Path, trials, classes=("rest", "walk"), shape=(2, 8, 8)) -> Path:
    """A folder of black clips, (video, label) of each."""
    with ClipsWriter(folder, classes) as writer:
        for video, label in trials:
            writer.add(np.zeros(shape, np.uint8), video, label)
    return folder
