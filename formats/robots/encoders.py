"""Pictures into mp4 files, one for each episode, and such files one after the other into a longer
one."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine.contract import LockstepError
from formats.robots.lerobot import need


class Kind(NamedTuple):
    """An encoder of FFmpeg: the codec that it writes, its options, and those that LeRobot has names
    of its own for."""

    encoder: str
    codec: str
    pix_fmt: str
    options: dict[str, str]


# g=2: reaching any frame decodes at most two. No B-frames: pictures are encoded in order. Depths
# have those that LeRobot's have, or it could not put such a video behind one of these.
COLOUR = (
    Kind("libsvtav1", "av1", "yuv420p", {"g": "2", "crf": "30", "preset": "8"}),
    Kind("libx264", "h264", "yuv420p", {"g": "2", "crf": "20", "bf": "0"}),
    Kind("mpeg4", "mpeg4", "yuv420p", {"g": "2", "bf": "0", "qmin": "2", "qmax": "4"}),
)
MOST_AHEAD = 16  # pictures that a picture is decoded before it is shown
DEPTH = (Kind("libx265", "hevc", "gray12le", {"g": "2", "crf": "30", "x265-params": "lossless=1"}),)


def about(codec: str) -> dict[str, Any]:
    """Return a codec's settings under the names that LeRobot 0.6 gives them in info.json."""
    kind = next(kind for kind in COLOUR + DEPTH if kind.codec == codec)
    rest = dict(kind.options)
    own: dict[str, Any] = {
        name: int(rest.pop(name)) if name in rest else None for name in ("g", "crf", "preset")
    }
    own |= {"fast_decode": 0, "video_backend": "pyav", "extra_options": rest}
    return {"video.codec": codec, "video.pix_fmt": kind.pix_fmt} | {
        f"video.{name}": v for name, v in own.items()
    }


class Encoder:
    """An mp4 file that pictures are added to. The codecs of `kinds` are tried in their order,
    `first` before others."""

    def __init__(
        self,
        path: Path,
        fps: float,
        size: tuple[int, ...],
        kinds: Sequence[Kind] = COLOUR,
        first: str = "",
    ):
        self.path, self.count = path, 0
        self._av = need("av")
        os.environ.setdefault("SVT_LOG", "1")  # or the encoder prints its settings for each file
        self._rate = Fraction(fps).limit_denominator(1001)
        for kind in sorted(kinds, key=lambda kind: kind.codec != first):
            try:
                self._begin(kind, size)
                return
            # not built in, or it does not take pictures this small
            except (self._av.error.FFmpegError, ValueError):
                self._container.close()
                path.unlink(missing_ok=True)
        known = ", ".join(kind.encoder for kind in kinds)
        raise LockstepError(
            f"no encoder of {known} takes {size} pixels", str(path), "use dtype image"
        )

    def _begin(self, kind: Kind, size: tuple[int, ...]) -> None:
        self._container = self._av.open(str(self.path), "w")
        options = {
            name: text + ":log-level=none" * (name == "x265-params")
            for name, text in kind.options.items()
        }
        self._stream = self._container.add_stream(kind.encoder, rate=self._rate, options=options)
        self._stream.pix_fmt = kind.pix_fmt
        self._stream.height, self._stream.width = size
        with _usual_priority():
            self._stream.codec_context.open()
        self.codec = kind.codec

    def add(self, pictures: np.ndarray) -> None:
        """Append (T, 3, H, W) uint8, or (T, 1, H, W) uint16 codes of depths."""
        for picture in pictures:
            frame = self._depth(picture[0]) if len(picture) == 1 else self._colour(picture)
            frame.pts, frame.time_base = self.count, 1 / self._rate
            with as_os_error():
                self._mux(self._container, self._stream.encode(frame))
            self.count += 1

    @staticmethod
    def _mux(container: Any, packets: list[Any]) -> None:
        for packet in packets:
            # Of one or two pictures, which stay in their order, x265 leaves the time of decoding
            # unset.
            if packet.dts is None or not packet.pts - MOST_AHEAD <= packet.dts <= packet.pts:
                packet.dts = packet.pts
            container.mux(packet)

    def _colour(self, picture: np.ndarray) -> Any:
        return self._av.VideoFrame.from_ndarray(
            np.ascontiguousarray(picture.transpose(1, 2, 0)), format="rgb24"
        )

    def _depth(self, codes: np.ndarray) -> Any:
        height, width = codes.shape
        frame = self._av.VideoFrame(width, height, "gray12le")
        # longer than a row of pixels
        rows = np.frombuffer(frame.planes[0], np.uint16).reshape(height, -1)
        rows[:] = 0
        rows[:, :width] = codes
        return frame

    def close(self) -> None:
        container, self._container = self._container, None
        if container is not None:
            with as_os_error(), container:
                self._mux(container, self._stream.encode() if self.count else [])


def join(paths: Sequence[Path], counts: Sequence[int], fps: float, target: Path) -> None:
    """Write mp4 files of one codec one after the other, without decoding; `counts` is how many
    pictures each has."""
    av, tick, before, last = need("av"), 1 / Fraction(fps).limit_denominator(1001), 0, -(1 << 62)
    stream: Any = None
    with as_os_error(), av.open(str(target), "w") as out:
        for path, count in zip(paths, counts, strict=True):
            with av.open(str(path)) as source:
                theirs = source.streams.video[0]
                if stream is None:
                    # a decoder cannot encode
                    stream = out.add_stream_from_template(theirs, opaque=True)
                    stream.time_base = theirs.time_base
                shift = round(before * tick / theirs.time_base)
                for packet in source.demux(theirs):
                    if packet.dts is not None:  # else it is the end
                        # Pictures out of order are decoded ahead of their time, after one alone too
                        # far ahead.
                        last = max(packet.dts + shift, last + 1)
                        packet.pts, packet.dts = packet.pts + shift, last
                        packet.stream = stream
                        out.mux(packet)
            before += count


@contextlib.contextmanager
def as_os_error() -> Iterator[None]:
    try:
        yield
    except need("av").error.FFmpegError as error:
        raise OSError(error.errno, error.strerror) from None


@contextlib.contextmanager
def _usual_priority() -> Iterator[None]:
    """Restore the scheduling policy afterwards: run by root, SVT-AV1 makes the calling thread
    real-time, and so every process that it starts later. Two of these that wait for each other
    starve a machine of two cores."""
    if not hasattr(os, "sched_getscheduler"):
        yield
        return
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        if os.sched_getscheduler(0) != before[0]:
            os.sched_setscheduler(0, *before)


def png(picture: np.ndarray) -> bytes:
    """(3, H, W) uint8 -> a file's content."""
    image, file = need("PIL.Image"), io.BytesIO()
    image.fromarray(np.ascontiguousarray(picture.transpose(1, 2, 0))).save(
        file, "PNG", compress_level=1
    )
    return file.getvalue()
