"""Text and curves in the pictures of an evaluation.

Pillow comes with tensorboard. The first picture imports Pillow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


def text_width(line: str, size: int = 14) -> int:
    """Return the width of a line of text in pixels."""
    from PIL import ImageFont

    return int(ImageFont.load_default(size).getlength(line)) + 1


def caption(lines: Sequence[str], width: int, inverse: bool = False) -> np.ndarray:
    """Draw lines of text as (18 * lines, width) uint8, white on black.

    `inverse` is black on white.
    """
    from PIL import Image, ImageDraw, ImageFont

    strip, font = (
        Image.new("L", (width, 18 * len(lines)), 255 * inverse),
        ImageFont.load_default(14),
    )
    pen = ImageDraw.Draw(strip)
    for row, line in enumerate(lines):
        pen.text((3, 18 * row), line, fill=255 * (not inverse), font=font)
    return np.asarray(strip)


def captioned(film: np.ndarray, line: str) -> np.ndarray:
    """Add a line of text above every frame: (T, H, W, 3) uint8 -> (T, 18 + H, W, 3)."""
    strip = caption([line], film.shape[2])[None, :, :, None]
    return np.concatenate([np.broadcast_to(strip, (len(film), *strip.shape[1:3], 3)), film], 1)


class Line(NamedTuple):
    """A curve of a plot: (T,) values, NaN for no value; colour; width in half pixels."""

    values: np.ndarray
    colour: tuple[int, int, int]
    width: int


PLOT, MOST_PLOTS = (400, 130), 24  # pixels (W, H) per plot, and most plots per picture
_MARGIN = (58, 24, 10, 12)  # pixels left of, above, right of and below the axes


def plots(title: str, given: Sequence[tuple[str, Sequence[Line]]]) -> np.ndarray:
    """Draw a plot for each of `given`, (title, curves), under a title: (H, W, 3) uint8 on white.

    All curves have equal length. Each plot has its own axis, labelled with the lowest and the
    highest
    value.
    """
    kept = given[:MOST_PLOTS]
    columns = 1 if len(kept) < 3 else 2 if len(kept) < 9 else 3
    drawn = [_plot(name, lines) for name, lines in kept]
    drawn += [np.full_like(drawn[0], 255)] * (-len(drawn) % columns)
    rows = [np.concatenate(drawn[n : n + columns], 1) for n in range(0, len(drawn), columns)]
    left_out = f" (the first {len(kept)} of {len(given)} numbers)" if len(given) > len(kept) else ""
    width = max(columns * PLOT[0], text_width(title + left_out) + 6)
    body = np.concatenate(rows)
    body = np.pad(body, ((0, 0), (0, width - body.shape[1]), (0, 0)), constant_values=255)
    head = np.repeat(caption([title + left_out], width, inverse=True)[:, :, None], 3, 2)
    return np.concatenate([head, body])


def _plot(name: str, lines: Sequence[Line]) -> np.ndarray:
    """Draw curves at twice the size and shrink the picture, for smooth curves."""
    from PIL import Image, ImageDraw, ImageFont

    width, height = PLOT
    left, top, right, bottom = _MARGIN
    values = np.concatenate(
        [line.values[np.isfinite(line.values)] for line in lines] or [np.zeros(0)]
    )
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 0.0)
    spread, end = (high - low) or 1.0, max(1, max(len(line.values) for line in lines) - 1)
    sheet = Image.new("RGB", (2 * width, 2 * height), "white")
    pen = ImageDraw.Draw(sheet)
    across, down = 2 * (width - left - right), 2 * (height - top - bottom)
    pen.rectangle(
        (2 * left, 2 * top, 2 * left + across, 2 * top + down), outline=(200, 200, 200), width=2
    )
    for line in lines:
        x = 2 * left + across * np.arange(len(line.values)) / end
        y = 2 * top + down * (1 - (line.values - low) / spread)
        for part in _finite(x, y):
            if len(part) == 1:
                (a, b), r = part[0], line.width
                pen.ellipse((a - r, b - r, a + r, b + r), fill=line.colour)
            else:
                pen.line(part, fill=line.colour, width=line.width, joint="curve")
    small, font = sheet.reduce(2), ImageFont.load_default(12)
    pen = ImageDraw.Draw(small)
    pen.text((left, 5), name, fill="black", font=font)
    for at, value in ((top - 6, high), (height - bottom - 10, low)):
        pen.text((left - 6, at), f"{value:.3g}", fill=(90, 90, 90), font=font, anchor="ra")
    return np.asarray(small)


def _finite(x: np.ndarray, y: np.ndarray) -> list[list[Any]]:
    """Return the points of each part of a curve without a gap."""
    known = np.flatnonzero(np.isfinite(y))
    parts = np.split(known, np.flatnonzero(np.diff(known) > 1) + 1)
    return [
        list(zip(x[part].tolist(), y[part].tolist(), strict=True)) for part in parts if len(part)
    ]
