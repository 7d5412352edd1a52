"""Resample irregular samples to an even signal: largest gap, sampling rate, and resampling.

The rate of a recording may be any number. A rate is rounded only as far as the recording cannot
show the difference.
"""

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


FILTERED = 1.1
"""Ratio of a recording's rate and a lower rate from which a low-pass filter is used."""

DRIFT = 0.05
"""Intervals by which a rounded rate may be off at the end of a recording. Resampling then changes
no value that counts: a line between samples lowers a fast motion by less than a percent."""

SPREADS = 3
"""Standard errors of a measured rate within which the recording cannot show a difference."""

EVEN = 0.25
"""Largest deviation of the intervals of even samples, as a share of their mean."""

PARTS = 20
"""Parts of a recording whose mean intervals give the standard error of the rate."""


COMMON_HZ = np.array([10, 20, 25, 30, 32, 40, 50, 60, 64, 100, 120, 128, 200, 250, 256, 500, 1000])
"""Rates that sensors have, preferred where a jittered clock leaves a choice."""


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
    """Return the samples per second of (N,) rising times in seconds, unrounded.

    If most intervals are alike, the rate comes from their mean, because times are often rounded.
    Intervals over a lost sample are excluded. Otherwise the rate comes from the mean of all
    intervals.
    """
    return float(1 / _typical_intervals(time).mean())


def _typical_intervals(time: np.ndarray) -> np.ndarray:
    intervals = np.diff(time)
    usual = np.median(intervals)
    alike = intervals[(intervals > 0.5 * usual) & (intervals < 1.5 * usual)]
    return alike if len(alike) > 0.8 * len(intervals) else intervals


def _tolerance(time: np.ndarray) -> float:
    """Return the difference in Hz from `rate_of` that (N,) rising times cannot show.

    The standard error comes from parts of the recording: rounded times are off in turns, so that
    the intervals of single samples would show a larger error.
    """
    intervals = _typical_intervals(time)
    parts = np.array_split(intervals, min(PARTS, len(intervals)))
    means = np.array([part.mean() for part in parts])
    error = means.std(ddof=1) / np.sqrt(len(means)) if len(means) > 1 else 0.0
    rate_hz = 1 / intervals.mean()
    by_spread = SPREADS * error * rate_hz**2
    by_drift = DRIFT / (time[-1] - time[0])
    return float(max(by_spread, by_drift))


def nominal_rate(time: np.ndarray) -> float:
    """Return the rate of (N,) rising times with as few decimals as the times can show.

    Even times of 51.2 Hz give 51.2. Times of a jittered clock of about 50 Hz give 50.
    """
    own, tolerance = rate_of(time), _tolerance(time)
    common = COMMON_HZ[np.abs(COMMON_HZ - own).argmin()]
    if abs(common - own) <= tolerance:
        return float(common)
    for decimals in range(9):
        rounded = round(own, decimals)
        if rounded and abs(rounded - own) <= tolerance:
            return float(rounded)
    return own


def leaves_even_samples(time: np.ndarray, rate_hz: float) -> bool:
    """Return whether `resampled` moves even samples a little, onto lines between the samples.

    The lines lower a fast motion most where they meet in the middle between two samples. Uneven
    samples lie on lines at any rate, and a rate far from their own is asked for.
    """
    own, intervals = rate_of(time), _typical_intervals(time)
    near = rate_hz / FILTERED < own < rate_hz * FILTERED
    even = intervals.std() < EVEN * intervals.mean()
    return bool(near and even and abs(own - rate_hz) > _tolerance(time))


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
    if own > FILTERED * rate_hz:
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
