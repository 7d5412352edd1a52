"""Resample irregular samples to an even signal: largest gap, sampling rate, and resampling."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from engine.contract import LockstepError

GAP = 20
"""Gap in usual intervals that cuts a recording. Samples at random times stay below the limit."""

FEW = 3
"""Usual intervals of a gap that cuts a recording if the gap is also a quarter of a window. Jitter
or a lost sample or two stay below the limit."""

BLOCK = 50
"""Intervals per median. For random times, a median is never FEW times longer or shorter than the
usual interval."""


def widest_gap(usual_s: float, window_s: float) -> float:
    """Return the seconds without a sample that cut a recording.

    No window then consists mostly of an interpolated line.
    """
    return min(GAP * usual_s, max(FEW * usual_s, window_s / 4))


def changed(time: np.ndarray) -> tuple[int, float] | None:
    """Return the first change of the sampling interval in (N,) rising times, or None.

    The result is (row, new interval in seconds).
    """
    intervals = np.diff(time)
    usual = np.median(intervals)
    blocks = np.median(intervals[: len(intervals) // BLOCK * BLOCK].reshape(-1, BLOCK), 1)
    other = np.flatnonzero((blocks > FEW * usual) | (blocks * FEW < usual))
    return (BLOCK * int(other[0]), float(blocks[other[0]])) if len(other) else None


def steps_at(time: np.ndarray, rate_hz: float) -> int:
    return int((time[-1] - time[0]) * rate_hz + 1e-6) + 1


def rate_of(time: np.ndarray) -> float:
    """Return the samples per second of (N,) rising times in seconds.

    If most intervals are alike, the rate comes from their mean, because times are often rounded.
    Intervals over a lost sample are excluded. Otherwise the rate comes from the mean of all
    intervals.
    """
    intervals = np.diff(time)
    usual = np.median(intervals)
    alike = intervals[(intervals > 0.5 * usual) & (intervals < 1.5 * usual)]
    return float(1 / (alike if len(alike) > 0.8 * len(intervals) else intervals).mean())


def resampled(time: np.ndarray, values: np.ndarray, rate_hz: float) -> np.ndarray:
    """Resample (N, C) values at (N,) rising times in seconds to (T, C) float32 at `rate_hz`.

    The result starts at the first time. Interpolation between samples is linear. For a lower rate,
    the samples are first resampled evenly at their own rate. A low-pass filter then lowers
    frequencies above 1.06 times half the new rate by 50 dB or more, because aliasing would show
    them as a slow motion. The filter is a Kaiser window of 20 periods with its middle at 0.9 times
    half the new rate. Raises LockstepError without SciPy.
    """
    steps, own = steps_at(time, rate_hz), rate_of(time) if len(time) > 1 else rate_hz
    share = Fraction(1)
    if own > 1.1 * rate_hz:
        share = Fraction(rate_hz / own).limit_denominator(max(100, round(2 * own / rate_hz)))
    dense = rate_hz * share.denominator / share.numerator
    even = time[0] + np.arange(steps_at(time, dense)) / dense
    found = np.stack([np.interp(even, time, column) for column in values.T], 1)
    if share < 1:
        signal, most = _import_signal(), max(share.numerator, share.denominator)
        low_pass = signal.firwin(20 * most + 1, 0.9 / most, window=("kaiser", 5.0))
        found = signal.resample_poly(
            found, share.numerator, share.denominator, window=low_pass, padtype="line"
        )
    return found[:steps].astype(np.float32)


def _import_signal() -> Any:
    try:
        import scipy.signal
    except ImportError:
        what = "a lower rate needs a low-pass filter, and SciPy is not installed"
        raise LockstepError(what, "the sensors' rate", "pip install scipy") from None
    return scipy.signal
