"""Text in the pictures of an evaluation. Pillow comes with tensorboard and is imported by the first picture."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def text_width(line: str, size: int = 14) -> int:
    """Return the width of a line of text in pixels."""
    from PIL import ImageFont

    return int(ImageFont.load_default(size).getlength(line)) + 1


def caption(lines: Sequence[str], width: int, inverse: bool = False) -> np.ndarray:
    """Draw lines of text as (18 * lines, width) uint8, white on black; `inverse` is black on white."""
    from PIL import Image, ImageDraw, ImageFont

    strip, font = Image.new("L", (width, 18 * len(lines)), 255 * inverse), ImageFont.load_default(14)
    pen = ImageDraw.Draw(strip)
    for row, line in enumerate(lines):
        pen.text((3, 18 * row), line, fill=255 * (not inverse), font=font)
    return np.asarray(strip)


def captioned(film: np.ndarray, line: str) -> np.ndarray:
    """(T, H, W, 3) uint8 -> (T, 18 + H, W, 3), with the same line of text above every frame."""
    strip = caption([line], film.shape[2])[None, :, :, None]
    return np.concatenate([np.broadcast_to(strip, (len(film), *strip.shape[1:3], 3)), film], 1)
