"""The body parts of an animal in a video, as all readers of tracks return them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.contract import LockstepError


@dataclass(frozen=True)
class Track:
    """The body parts of one animal in one video.

    video       name of the video, without suffix
    animal      name in the file; empty if the file has only one animal
    parts       P names
    xy          (N, P, 2) float64 pixels, NaN for a missing part
    likelihood  (N, P) from 0 to 1, 0 for a missing part
    unique      parts in the file that belong to no animal, such as the corners of a maze
    """

    path: Path
    video: str
    animal: str
    parts: list[str]
    xy: np.ndarray
    likelihood: np.ndarray
    unique: tuple[str, ...] = ()


def make_track(
    path: Path,
    video: str,
    animal: str,
    parts: list[str],
    xy: np.ndarray,
    likelihood: np.ndarray,
    unique: tuple[str, ...] = (),
) -> Track:
    """Return a track in which a part without a position is missing. Raises LockstepError."""
    if not len(xy):
        raise LockstepError("no frames", str(path), "give the track of a video")
    lost = ~np.isfinite(xy).all(2)
    xy = np.where(lost[:, :, None], np.nan, xy)
    likelihood = np.where(lost | np.isnan(likelihood), 0.0, likelihood)
    return Track(path, video, animal, parts, xy, likelihood, unique)
