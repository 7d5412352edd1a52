"""Turn decoded pictures as players show them, by the display matrix of a video."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from engine.contract import LockstepError

UNIT = 1 << 16
"""One, in the fixed-point numbers of a display matrix."""


def turn_of(frame: Any, path: Path) -> tuple[bool, bool, bool]:
    """Return (transpose, flip left to right, flip upside down), in this order, of a frame of PyAV.

    The display matrix sends the pixel (x, y) to (a x + c y, b x + d y). Phones write a matrix where
    they are held upright. Raises LockstepError for an angle that is no multiple of 90 degrees.
    """
    matrix = next((each for each in frame.side_data if each.type.name == "DISPLAYMATRIX"), None)
    if matrix is None:
        return False, False, False
    a, b, _, c, d, *_ = struct.unpack("=9i", bytes(matrix)[:36])
    transposed = abs(b) + abs(c) > abs(a) + abs(d)
    small = (a, d) if transposed else (b, c)
    if max(map(abs, small)) > UNIT // 1000:
        raise LockstepError(
            f"its pictures are turned by {frame.rotation % 360} degrees, no multiple of 90",
            str(path),
            f"turn them: ffmpeg -i {path.name} upright.mp4",
        )
    if transposed:
        return True, c < 0, b < 0
    return False, a < 0, d < 0


def upright(picture: np.ndarray, frame: Any, path: Path) -> np.ndarray:
    """Return the picture (H, W, ...) of a frame as players show it; a view of the array.

    Raises LockstepError as `turn_of`.
    """
    transposed, mirrored, upside_down = turn_of(frame, path)
    if transposed:
        picture = picture.swapaxes(0, 1)
    if mirrored:
        picture = picture[:, ::-1]
    if upside_down:
        picture = picture[::-1]
    return picture
