"""Convert between seconds and frames: the clock of a video, a track or a recording.

    clock = Clock.of_times(times_s, stated_fps=25.0)     # of a video, see formats/lab/videos.py
    clock = Clock.even(count=1500, fps=30.0)             # of a track, whose frames have no times
    clock.frame_at(2.5), clock.time_of(75), clock.span(2.5, 4.0)

Seconds count from the start of the file, as a player shows them. A frame belongs to the seconds
nearest to its own time. All tools take this conversion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

SLACK = 0.25
"""Deviation from an even rate, in frames, that is rounding of times: no frame is missing."""

ALIKE = 0.25
"""Share of the usual interval by which intervals of the usual rate may differ."""


@dataclass(frozen=True)
class Clock:
    """The times of N frames.

    count      N
    fps        usual frames per second; 0 if unknown
    first_s    seconds of the first frame; more than 0 where the file begins earlier, with sound
    own_s      (N,) seconds of each frame, rising; None where frames are evenly apart
    stated_fps rate in the head of the file; 0 without one
    stamped    whether each picture carries its time: a decoder can then check the times
    """

    count: int
    fps: float
    first_s: float = 0.0
    own_s: np.ndarray | None = None
    stated_fps: float = 0.0
    stamped: bool = False

    @staticmethod
    def even(count: int, fps: float) -> Clock:
        return Clock(count, fps, stated_fps=fps)

    @staticmethod
    def of_times(times_s: np.ndarray, stated_fps: float, stamped: bool = True) -> Clock:
        """Return the clock of (N,) rising times in seconds.

        An even rate is the stated rate, or else the measured rate. The rate is the usual one where
        frames are unevenly apart. A single frame has the stated rate.
        """
        count = len(times_s)
        measured = (count - 1) / _duration(times_s)
        for fps in (stated_fps, measured):
            if fps and _deviation(times_s, fps) <= SLACK:
                return Clock(count, fps, float(times_s[0]), None, stated_fps, stamped)
        usual = _usual_rate(times_s)
        return Clock(count, usual, float(times_s[0]), times_s, stated_fps, stamped)

    @property
    def end_s(self) -> float:
        """Return the seconds at which the last frame ends."""
        return float(self.time_of(self.count))

    def time_of(self, frames: np.ndarray | int) -> np.ndarray:
        """Return the seconds of frames by number; beyond both ends by the usual rate."""
        numbers = np.asarray(frames)
        if self.own_s is None:
            return self.first_s + numbers / self.fps
        inside = np.clip(numbers, 0, self.count - 1)
        return self.own_s[inside] + (numbers - inside) / self.fps

    def frames_at(self, seconds: np.ndarray | float) -> np.ndarray:
        """Return the numbers of the frames nearest to `seconds`; beyond both ends by the rate.

        Of two frames equally near, an even clock takes the even number, as `round` does; an uneven
        clock takes the later frame.
        """
        at = np.asarray(seconds, dtype=np.float64)
        if self.own_s is None:
            return np.rint((at - self.first_s) * self.fps).astype(np.int64)
        midway = (self.own_s[1:] + self.own_s[:-1]) / 2
        nearest = np.searchsorted(midway, at, side="right")
        # Of frames with one time, a state that starts there has all, and one that stops there none.
        first_of_equals = np.searchsorted(self.own_s, self.own_s[nearest], side="left")
        inside = np.clip(at, self.own_s[0], self.own_s[-1])
        beyond = np.floor((at - inside) * self.fps + 0.5).astype(np.int64)
        return beyond + np.where(beyond > 0, self.count - 1, first_of_equals)

    def frame_at(self, seconds: float) -> int:
        return int(self.frames_at(seconds))

    def span(self, start_s: float, stop_s: float) -> slice:
        """Return the frames of a state from start to stop, exclusive; from frame 0 on."""
        first, stop = self.frames_at(np.array([start_s, stop_s])).tolist()
        return slice(max(first, 0), max(stop, 0))

    def duration(self, first: np.ndarray | int, stop: np.ndarray | int) -> np.ndarray:
        """Return the seconds from the frames `first` to the frames `stop`."""
        if self.own_s is None:
            return (np.asarray(stop) - np.asarray(first)) / self.fps
        return self.time_of(stop) - self.time_of(first)

    def samples(self, fps: float) -> np.ndarray:
        """Return (M,) the frames at 0, 1/fps, 2/fps, ... seconds after the first frame."""
        if self.own_s is None:
            count = int(self.count * fps / self.fps) + 2
            found = np.rint(np.arange(count) * (self.fps / fps)).astype(np.int64)
        else:
            count = int((self.end_s - self.first_s) * fps) + 2
            found = self.frames_at(self.first_s + np.arange(count) / fps)
        return found[found < self.count]

    def nearest_samples(self, fps: float) -> np.ndarray:
        """Return (N,) the nearest of `samples` for each frame, by number.

        A frame that is a sample has its own number, also if another sample is nearer in time: the
        answer for a picture belongs to this picture.
        """
        if self.own_s is None:
            nearest = np.rint(np.arange(self.count) / (self.fps / fps)).astype(np.int64)
        else:
            nearest = np.rint((self.own_s - self.first_s) * fps).astype(np.int64)
        samples = self.samples(fps)
        own = np.full(self.count, -1)
        own[samples[::-1]] = np.arange(len(samples))[::-1]
        taken = samples[np.minimum(nearest, len(samples) - 1)]
        is_exchanged = (own >= 0) & (taken != np.arange(self.count))
        return np.where(is_exchanged, own, nearest)

    def shortened(self, count: int) -> Clock:
        """Return the clock of the first `count` frames."""
        own_s = None if self.own_s is None else self.own_s[:count]
        return Clock(count, self.fps, self.first_s, own_s, self.stated_fps, self.stamped)

    def note(self, name: str) -> str:
        """Return a line on times that the stated rate does not give; empty if there is none."""
        found = []
        if self.own_s is not None:
            apart = np.diff(self.own_s)
            found.append(
                f"its frames are {apart.min():.3g} to {apart.max():.3g} s apart, so each frame has "
                "its own time"
            )
        elif self.stated_fps and self._stated_shift() > 0.5:
            found.append(
                f"the file states {self.stated_fps:g} frames/s, the times of its frames give "
                f"{self.fps:g}, and the times count"
            )
        if self.first_s * self.fps > 0.5:
            found.append(
                f"its first frame is {self.first_s:.3f} s after the start of the file, where "
                "players begin to count"
            )
        return f"{name}: {'; '.join(found)}" if found else ""

    def _stated_shift(self) -> float:
        """Return the frames by which the stated rate would be wrong at the end."""
        return abs(self.stated_fps - self.fps) * self.count / self.fps


MOST_NOTES = 5


def some_notes(clocks: Mapping[str, Clock]) -> list[str]:
    """Return the notes of named videos; beyond MOST_NOTES their number."""
    notes = [note for name, clock in clocks.items() if (note := clock.note(name))]
    if len(notes) <= MOST_NOTES:
        return notes
    return [*notes[:MOST_NOTES], f"the same of {len(notes) - MOST_NOTES} more videos"]


def _duration(times_s: np.ndarray) -> float:
    """Return the seconds from the first frame to the last; infinite if there are none."""
    duration = float(times_s[-1] - times_s[0])
    return duration if duration > 0 else np.inf


def _deviation(times_s: np.ndarray, fps: float) -> float:
    """Return the largest deviation of the times from an even rate, in frames."""
    expected = times_s[0] + np.arange(len(times_s)) / fps
    return float(np.abs(times_s - expected).max() * fps)


def _usual_rate(times_s: np.ndarray) -> float:
    """Return the rate of most intervals; 0 if all times are equal.

    The mean of alike intervals undoes the rounding of times.
    """
    intervals = np.diff(times_s)
    if not intervals.any():
        return 0.0
    usual = np.median(intervals[intervals > 0])
    alike = intervals[np.abs(intervals - usual) <= ALIKE * usual]
    return round(float(1 / alike.mean()), 6)
