"""Samples at any times become an even signal: how long a silence may be, what rate they have, and a
new one."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from engine.contract import LockstepError

GAP = 20
"""Usual intervals without a sample that cut a recording; samples at random times stay below it."""

FEW = 3
"""Usual intervals that cut one where they are a quarter of a window; a lost sample or two and
jitter stay below it."""

BLOCK = 50
"""Intervals whose median is compared with the usual one: for random times it is never FEW times as
long or as short."""


def widest_gap(usual_s: float, window_s: float) -> float:
    """Return the seconds without a sample from which on a recording is cut: no window is mostly a
    line."""
    return min(GAP * usual_s, max(FEW * usual_s, window_s / 4))


def changed(time: np.ndarray) -> tuple[int, float] | None:
    """Return where samples begin to come at another pace, (row, their interval in seconds); (N,)
    times that rise."""
    intervals = np.diff(time)
    usual = np.median(intervals)
    blocks = np.median(intervals[: len(intervals) // BLOCK * BLOCK].reshape(-1, BLOCK), 1)
    other = np.flatnonzero((blocks > FEW * usual) | (blocks * FEW < usual))
    return (BLOCK * int(other[0]), float(blocks[other[0]])) if len(other) else None


def steps_at(time: np.ndarray, rate_hz: float) -> int:
    return int((time[-1] - time[0]) * rate_hz + 1e-6) + 1


def rate_of(time: np.ndarray) -> float:
    """Return the samples per second of (N,) times in seconds that rise: where most intervals are
    alike their mean, because times are often rounded, without those over a lost sample; else the
    mean of all."""
    intervals = np.diff(time)
    usual = np.median(intervals)
    alike = intervals[(intervals > 0.5 * usual) & (intervals < 1.5 * usual)]
    return float(1 / (alike if len(alike) > 0.8 * len(intervals) else intervals).mean())


def resampled(time: np.ndarray, values: np.ndarray, rate_hz: float) -> np.ndarray:
    """(N,) times in seconds that rise, (N, C) -> (T, C) float32 at `rate_hz`, from the first time
    on.

    Linear between samples. To a lower rate the samples are first taken evenly at their own rate,
    and what is above 1.06 times half the new rate is lowered by 50 dB or more, because it would
    come back as a slow motion: a Kaiser window's low pass of 20 periods, its middle at 0.9 times
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
