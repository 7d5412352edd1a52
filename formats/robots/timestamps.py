"""The cause of timestamps that are not the frame's number over the rate in meta/info.json."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

USUAL_S = 1e-4
"""The usual `dataset.tolerance_s`, with which a cause must explain all timestamps."""

SCALES = {1e3: "milliseconds", 1e6: "microseconds", 1e9: "nanoseconds"}


class Cause(NamedTuple):
    """The one cause of all differences, and the cure."""

    what: str
    todo: str


def find_cause(
    stamps: np.ndarray, frame: np.ndarray, episode: np.ndarray, fps: float
) -> Cause | None:
    """Return the cause that explains all timestamps; None without one.

    stamps   (N,) timestamps, in seconds
    frame    (N,) number of the frame in its episode
    episode  (N,) number of the episode
    fps      of meta/info.json
    """
    stamps = stamps.astype(np.float64)
    unit = _unit(stamps, frame / fps)
    if unit:
        return Cause(f"the timestamps are in {unit}", "write seconds")
    rate = _rate(stamps, frame)
    if rate:
        what = f"timestamps are {rate:g} Hz, info.json has {fps:g}"
        return Cause(what, f"set fps to {rate:g} in meta/info.json")
    return _offset(stamps, frame, episode, fps)


def _unit(stamps: np.ndarray, times: np.ndarray) -> str:
    for scale, unit in SCALES.items():
        if times.any() and _explains(stamps, scale * times, scale):
            return unit
    return ""


def _rate(stamps: np.ndarray, frame: np.ndarray) -> float:
    """Return the rate that explains all timestamps, as round as possible; 0 without one."""
    count = frame.astype(np.float64)
    period = float(count @ stamps) / max(1.0, float(count @ count))
    if period <= 0:
        return 0.0
    for digits in (0, 1, 2, 3, 6):
        rate = round(1 / period, digits)
        if rate and _explains(stamps, count / rate):
            return rate
    return 0.0


def _offset(stamps: np.ndarray, frame: np.ndarray, episode: np.ndarray, fps: float) -> Cause | None:
    """Return the cause if the timestamps of the episodes begin at other times than 0."""
    first_rows = np.flatnonzero(np.diff(episode, prepend=-1))
    lengths = np.diff(first_rows, append=len(episode))
    starts = stamps[first_rows]
    if not _explains(stamps, np.repeat(starts, lengths) + frame / fps):
        return None
    at = int(np.abs(starts).argmax())
    what = (
        f"the timestamps of episode {episode[first_rows[at]]} begin at {starts[at]:.6g} s, not at 0"
    )
    return Cause(what, "subtract the first timestamp of each episode from its timestamps")


def _explains(stamps: np.ndarray, times: np.ndarray, scale: float = 1.0) -> bool:
    """Return whether all timestamps are these times, as exactly as float32 stores them.

    scale  units in a second
    """
    slack = scale * USUAL_S + 2 * np.spacing(np.abs(stamps).astype(np.float32))
    return bool((np.abs(stamps - times) <= slack).all())
