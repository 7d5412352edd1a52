"""Compare the statistics that a dataset stores with its frames.

A dataset that was cut, merged or edited may keep the statistics of other frames. A policy that is
normalised with these learns little, and its loss looks better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

EXACT, SUBSAMPLED = 0.02, 0.25
"""Largest distance in deviations: of statistics that count every frame, and of statistics that may
be of a sample of the frames."""

BYTE = 255
"""Largest value of a pixel. LeRobot stores statistics of pixels in [0, 1]."""


def find_difference(
    stored: Mapping[str, np.ndarray],
    measured: Mapping[str, np.ndarray],
    names: Sequence[str],
    share: float = 1.0,
) -> str:
    """Return the first statistic that the frames contradict, as text; empty if there is none.

    stored    {statistic: (D,)}
    measured  {mean, std, min, max: (D,), count: (1,)} of the frames that were read
    names     of the D numbers; may be empty
    share     frames that were read, as a share of the frames that `stored` describes
    """
    wrong = _whole(stored, measured) if share >= 1 else _part(stored, measured, share)
    for key, at in wrong.items():
        if at.any():
            n = int(at.argmax())
            number = names[n] if n < len(names) else f"number {n}"
            there, here = stored[key].ravel()[n], measured[key].ravel()[n]
            return f"{key} of {number} {there:.4g}, measured {here:.4g}"
    return ""


def _whole(
    stored: Mapping[str, np.ndarray], measured: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return {statistic: (D,) bool}: True where the statistics of all frames differ."""
    every_frame = np.array_equal(stored.get("count", np.zeros(1)), measured["count"])
    share = EXACT if every_frame else SUBSAMPLED
    unit = _deviation(measured)
    spread = np.maximum(measured["max"] - measured["min"], unit)
    allowed = {"mean": unit, "std": unit, "min": spread, "max": spread}
    wrong = {}
    for key, size in allowed.items():
        if key in stored:
            wrong[key] = (np.abs(stored[key] - measured[key]) > share * size).ravel()
    return wrong


def _part(
    stored: Mapping[str, np.ndarray], measured: Mapping[str, np.ndarray], share: float
) -> dict[str, np.ndarray]:
    """Return {statistic: (D,) bool}: True where some frames contradict the statistics of all.

    The frames have a range within the range of all. Their squared distance from the mean of all,
    times their share, is at most the variance of all.
    """
    unit = _deviation(measured)
    wrong = {}
    if {"min", "max"} <= stored.keys():
        allowed = SUBSAMPLED * np.maximum(stored["max"] - stored["min"], unit)
        wrong["min"] = (measured["min"] < stored["min"] - allowed).ravel()
        wrong["max"] = (measured["max"] > stored["max"] + allowed).ravel()
    if {"mean", "std"} <= stored.keys():
        apart = (measured["mean"] - stored["mean"]) ** 2 + measured["std"] ** 2
        largest = ((1 + SUBSAMPLED) * stored["std"] + SUBSAMPLED * unit) ** 2
        wrong["mean"] = (share * apart > largest).ravel()
    return wrong


def _deviation(measured: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return (D,) the standard deviation; of a number that never moves a small share of its
    size."""
    size = np.maximum(np.abs(measured["min"]), np.abs(measured["max"]))
    return np.maximum(measured["std"], np.maximum(1e-3 * size, 1e-8))


def of_pixels(stored: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], str]:
    """Return the statistics of a colour camera for pixels in [0, 1], and a text on a change.

    Statistics of pixels in [0, 255] are divided. Statistics that contradict themselves are left
    out.
    """
    stats, note = dict(stored), ""
    largest = max((float(np.max(values)) for values in stats.values()), default=0.0)
    if 2 < largest <= BYTE:
        stats = {key: values / BYTE for key, values in stats.items()}
        note = "of pixels in [0, 255], divided by 255"
    low, high = stats.get("min", np.zeros(1)), stats.get("max", np.ones(1))
    mean, std = stats.get("mean", low), stats.get("std", np.zeros(1))
    slack = 1e-3
    inside = (mean >= low - slack).all() and (mean <= high + slack).all()
    if not inside or (std < 0).any() or largest > BYTE:
        return {}, "contradict themselves and are not used"
    return stats, note
