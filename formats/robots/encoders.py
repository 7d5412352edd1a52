"""Encode pictures into mp4 files, one for each episode, and join mp4 files without decoding."""

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
    """An encoder of FFmpeg: its codec, its options, and the options with a name in LeRobot."""

    encoder: str
    codec: str
    pix_fmt: str
    options: dict[str, str]


# g=2: reaching any frame decodes at most two. No B-frames: pictures are encoded in order. Depth
# videos have B-frames like LeRobot's. Otherwise LeRobot could not append depth videos.
COLOUR = (
    Kind("libsvtav1", "av1", "yuv420p", {"g": "2", "crf": "30", "preset": "8"}),
    Kind("libx264", "h264", "yuv420p", {"g": "2", "crf": "20", "bf": "0"}),
    Kind("mpeg4", "mpeg4", "yuv420p", {"g": "2", "bf": "0", "qmin": "2", "qmax": "4"}),
)
MOST_AHEAD = 16  # largest lead of decoding over showing, in pictures
DEPTH = (Kind("libx265", "hevc", "gray12le", {"g": "2", "crf": "30", "x265-params": "lossless=1"}),)


def about(codec: str) -> dict[str, Any]:
    """Return a codec's settings under LeRobot 0.6's names in info.json."""
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
    """An mp4 file under construction.

    The codecs of `kinds` are tried in order, with `first` before all.
    """

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
        os.environ.setdefault("SVT_LOG", "1")  # else the encoder prints its settings for each file
        self._rate = Fraction(fps).limit_denominator(1001)
        for kind in sorted(kinds, key=lambda kind: kind.codec != first):
            try:
                self._begin(kind, size)
                return
            # The encoder is not built in, or rejects pictures of a small size.
            except (self._av.error.FFmpegError, ValueError):
                self._container.close()
                path.unlink(missing_ok=True)
        known = ", ".join(kind.encoder for kind in kinds)
        raise LockstepError(
            f"no encoder of {known} takes {size} pixels", str(path), "use dtype image"
        )

    def _begin(self, kind: Kind, size: tuple[int, ...]) -> None:
        self._container = self._av.open(str(self.path), "w")
        options = dict(kind.options)
        if "x265-params" in options:
            options["x265-params"] += ":log-level=none"
        self._stream = self._container.add_stream(kind.encoder, rate=self._rate, options=options)
        self._stream.pix_fmt = kind.pix_fmt
        self._stream.height, self._stream.width = size
        with _usual_priority():
            self._stream.codec_context.open()
        self.codec = kind.codec

    def add(self, pictures: np.ndarray) -> None:
        """Append pictures (T, 3, H, W) uint8, or codes of depths (T, 1, H, W) uint16."""
        for picture in pictures:
            frame = self._depth(picture[0]) if len(picture) == 1 else self._colour(picture)
            frame.pts, frame.time_base = self.count, 1 / self._rate
            with as_os_error():
                self._mux(self._container, self._stream.encode(frame))
            self.count += 1

    @staticmethod
    def _mux(container: Any, packets: list[Any]) -> None:
        for packet in packets:
            # For a file of one or two pictures, x265 leaves the decoding time unset; the order is
            # unchanged.
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
        # The line size may exceed a row of pixels.
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
    """Concatenate mp4 files of one codec without decoding.

    counts  number of pictures in each file
    """
    av, tick, before, last = need("av"), 1 / Fraction(fps).limit_denominator(1001), 0, -(1 << 62)
    stream: Any = None
    with as_os_error(), av.open(str(target), "w") as out:
        for path, count in zip(paths, counts, strict=True):
            with av.open(str(path)) as source:
                theirs = source.streams.video[0]
                if stream is None:
                    # A decoder cannot encode: opaque=True copies the stream's parameters.
                    stream = out.add_stream_from_template(theirs, opaque=True)
                    stream.time_base = theirs.time_base
                shift = round(before * tick / theirs.time_base)
                for packet in source.demux(theirs):
                    if packet.dts is not None:  # None marks the end
                        # Reordered pictures are decoded ahead of their time. After a file with a
                        # single picture, the decoding time could fall below the last packet's time.
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
    """Restore the scheduling policy of the thread afterwards.

    Run by root, SVT-AV1 makes the calling thread real-time. All processes started later inherit the
    policy. Two real-time processes that wait for each other starve a machine with two cores.
    """
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
    """Encode a picture (3, H, W) uint8 as the bytes of a PNG file."""
    image, file = need("PIL.Image"), io.BytesIO()
    image.fromarray(np.ascontiguousarray(picture.transpose(1, 2, 0))).save(
        file, "PNG", compress_level=1
    )
    return file.getvalue()
