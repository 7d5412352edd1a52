"""Draw the pictures of a report, each as a data: URI.

No picture contains the name of a run, a class or a file: names are text of the page.

Curves and signals are transparent SVG by matplotlib. The colours are legible on white and on black,
and distinct for people with red-green colour blindness (Okabe and Ito). Films are animated WebP, or
GIF if Pillow has no WebP.
"""

from __future__ import annotations

import base64
import io
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1", "#7F7F7F")
"""The colours of runs and channels. The ninth has the first colour again, dashed."""
INK = "#808080"  # colour of axes and numbers
MOST_POINTS, MOST_LANES, MOST_FRAMES, MOST_DIMS = 1500, 12, 48, 24
STYLE: Any = {  # matplotlib's type lists every key
    "svg.fonttype": "none",  # text stays text, in the browser's font
    "svg.hashsalt": "report",  # equal figures have equal bytes
    "text.parse_math": False,
    "text.usetex": False,
    "figure.constrained_layout.w_pad": 0.1,  # inches: the browser's font may be wider
    "font.size": 9,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": INK,
    "grid.alpha": 0.2,
    "axes.formatter.limits": (-3, 5),
    "axes.formatter.useoffset": False,
    "axes.formatter.use_mathtext": False,
}


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _line(number: int) -> str:
    return ("-", "--", ":", "-.")[number // len(COLOURS) % 4]


@dataclass
class Curve:
    """A curve over the steps of run number `run`.

    kind  train, val, or mark: vertical lines at `x`
    """

    run: int
    kind: str
    x: np.ndarray
    y: np.ndarray


def data_uri(kind: str, data: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _svg(figure: Any) -> str:
    file = io.BytesIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return data_uri("svg+xml", file.getvalue())


def _axes(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # an extra, and slow to import

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True)
    return figure, axes.ravel()


def curves(given: Sequence[Curve], may_be_log: bool = False) -> str:
    """Draw the curves of a panel in the colours of the runs.

    Training curves are thin. Validation curves have points.
    """
    from matplotlib import rc_context
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

    with rc_context(STYLE):
        figure, (ax,) = _axes(5.2, 2.5)
        values = np.concatenate(
            [curve.y[np.isfinite(curve.y)] for curve in given if curve.kind != "mark"] or [[]]
        )
        if may_be_log and len(values) and values.min() > 0 and values.max() > 100 * values.min():
            ax.set_yscale("log")
            # The default formatter writes mathtext.
            ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            ax.yaxis.set_minor_formatter(NullFormatter())
        for curve in given:
            about = {"color": colour(curve.run), "linestyle": _line(curve.run)}
            x, y = _thinned(curve.x, curve.y)
            if curve.kind == "mark":
                for step in curve.x[:100]:
                    ax.axvline(step, color=colour(curve.run), linewidth=0.8, linestyle=":")
                continue
            dots = "o" if curve.kind == "val" or len(x) == 1 else ""
            style = {"linewidth": 1.6, "alpha": 1}
            if curve.kind == "train" and any(other.kind == "val" for other in given):
                style = {"linewidth": 0.9, "alpha": 0.6}
            ax.plot(x, y, marker=dots, markersize=3.5, **style, **about)
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        ax.set_xlabel("step")
        return _svg(figure)


def _thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return at most MOST_POINTS points: the lowest and the highest of each part."""
    y = np.where(np.isfinite(y), y, np.nan)
    if len(y) <= MOST_POINTS:
        return x, y
    kept = []
    for part in np.array_split(np.arange(len(y)), MOST_POINTS // 2):
        known = part[np.isfinite(y[part])]
        if len(known):
            kept += sorted({known[y[known].argmin()], known[y[known].argmax()]})
        else:
            kept.append(part[0])
    return x[kept], y[kept]


Ranges = tuple[np.ndarray, np.ndarray]


def ranges(windows: Sequence[np.ndarray]) -> Ranges | None:
    """Return (lowest value, spread) of each channel of windows (C, T), or None.

    The result is None if all channels can share a scale: the spreads are similar, and there are at
    most MOST_LANES channels.
    """
    lanes = [_lanes(window) for window in windows]
    low = np.min([np.nan_to_num(each, nan=np.inf).min(1) for each in lanes], 0)
    high = np.max([np.nan_to_num(each, nan=-np.inf).max(1) for each in lanes], 0)
    known = low <= high  # False for a channel without a finite value: low is inf
    spread = np.where(known & (high > low), np.where(known, high, 1) - np.where(known, low, 0), 0)
    moving = spread[spread > 0]
    differ = len(moving) > 1 and bool(moving.max() > 20 * moving.min())
    if not differ and len(low) <= MOST_LANES:
        return None
    return np.where(known, low, 0), np.where(spread > 0, spread, 1)


def _lanes(window: np.ndarray) -> np.ndarray:
    lanes = np.atleast_2d(np.asarray(window, np.float64))
    return np.where(np.isfinite(lanes), lanes, np.nan)


def signal(window: np.ndarray, scale: Ranges | None = None) -> str:
    """Draw a window (C, T) or (T,): as lines, or as a map of shades above MOST_LANES channels."""
    from matplotlib import rc_context

    lanes = _lanes(window)
    if scale:
        lanes = (lanes - scale[0][:, None]) / scale[1][:, None]
    with rc_context(STYLE):
        figure, (ax,) = _axes(4.2, 1.9)
        if len(lanes) > MOST_LANES:
            ax.imshow(lanes, aspect="auto", cmap="viridis", interpolation="nearest")
            ax.grid(False)
            return _svg(figure)
        for n, lane in enumerate(lanes):
            x, y = _thinned(np.arange(len(lane)), lane)
            ax.plot(x, y, color=colour(n), linestyle=_line(n), linewidth=1.1)
        ax.margins(x=0)
        return _svg(figure)


def beside(recorded: np.ndarray, predicted: np.ndarray) -> str:
    """Draw predicted over recorded values (T, dims): a plot for each of MOST_DIMS dims."""
    from matplotlib import rc_context

    recorded = np.asarray(recorded, np.float64).reshape(len(recorded), -1)
    predicted = np.asarray(predicted, np.float64).reshape(len(predicted), -1)
    dims = min(MOST_DIMS, recorded.shape[1])
    columns = 1 if dims == 1 else 2
    with rc_context(STYLE):
        rows = -(-dims // columns)
        figure, axes = _axes(3.6 * columns, 1.5 * rows, rows, columns)
        for n, ax in enumerate(axes):
            if n >= dims:
                ax.set_axis_off()
                continue
            for values, about in (
                (recorded, {"color": COLOURS[5], "linewidth": 3.0}),
                (predicted, {"color": COLOURS[1], "linewidth": 1.2}),
            ):
                x, y = _thinned(np.arange(len(values)), values[:, n])
                ax.plot(x, y, marker="o" if len(x) == 1 else "", markersize=3, **about)
            ax.set_title(f"{n}", loc="left", fontsize=8, color=INK, pad=2)
            ax.margins(x=0)
        return _svg(figure)


# ---- pictures and films
# ---------------------------------------------------------------------------------------------


def seen(part: np.ndarray) -> tuple[str, np.ndarray] | None:
    """Return the kind and the pixels or values of a sample's array, or None if no kind fits.

    The kinds: ("signal", (C, T)), ("picture", (H, W[, 3])), ("film", (T, H, W[, 3])).
    """
    numbers, shape = part.dtype.kind, part.shape
    if numbers not in "fiub" or 0 in shape:
        return None
    channels_first = part.ndim >= 3 and shape[-3] in (1, 3) and min(shape[-2:]) >= 8
    if part.ndim == 4 and channels_first:  # (T, 3, H, W)
        part = np.moveaxis(part, 1, 3)
        return "film", part[..., 0] if part.shape[3] == 1 else part
    if part.ndim == 4 and shape[3] == 3:
        return "film", part
    if part.ndim == 3 and (channels_first or (shape[2] == 3 and min(shape[:2]) >= 8)):
        part = np.moveaxis(part, 0, 2) if channels_first else part
        return "picture", part[..., 0] if part.shape[2] == 1 else part
    if part.ndim == 3 and min(shape[1:]) >= 8:
        return "film", part
    if part.ndim == 2 and min(shape) >= 16 and numbers == "u":
        return "picture", part
    if (part.ndim == 2 and shape[1] >= 8) or (part.ndim == 1 and len(part) >= 16):
        return "signal", part
    return None


def _bytes(pixels: np.ndarray) -> np.ndarray:
    """Return pixels of any range as uint8: the 1st percentile is black, the 99th is white."""
    values = np.nan_to_num(np.asarray(pixels, np.float32), posinf=0.0, neginf=0.0)
    low, high = np.percentile(values, (1, 99))
    return np.clip((values - low) * (255 / max(high - low, 1e-12)), 0, 255).astype(np.uint8)


def film(frames: np.ndarray, side: int = 160) -> tuple[str, str]:
    """Return an animation of frames (T, H, W[, 3]), and the middle frame as a picture.

    The animation has at most MOST_FRAMES frames.
    """
    from PIL import Image, features  # comes with matplotlib

    frames = frames[np.linspace(0, len(frames) - 1, min(len(frames), MOST_FRAMES)).astype(int)]
    pixels = frames if frames.dtype == np.uint8 and frames.ndim == 4 else _bytes(frames)
    height, width = pixels.shape[1:3]
    zoom = max(1, side // max(height, width)) or 1
    shrink = max(1.0, max(height, width) / (2 * side))
    size = max(1, round(width * zoom / shrink)), max(1, round(height * zoom / shrink))
    kind = "webp" if features.check("webp") else "gif"
    images = [
        Image.fromarray(frame).resize(size, Image.Resampling.NEAREST if shrink == 1 else None)
        for frame in pixels
    ]
    moving, still = io.BytesIO(), io.BytesIO()
    about: dict[str, Any] = {"quality": 60, "method": 3} if kind == "webp" else {}
    per_frame_ms = max(60, min(200, 3000 // len(images)))
    first, *rest = images
    first.save(
        moving, kind, save_all=True, append_images=rest, duration=per_frame_ms, loop=0, **about
    )
    images[len(images) // 2].save(still, kind, **about)
    return data_uri(kind, moving.getvalue()), data_uri(kind, still.getvalue())


def picture(pixels: np.ndarray, side: int = 160) -> str:
    """Return pixels (H, W[, 3]) as a picture."""
    _, still = film(pixels[None], side)
    return still


# ---- strips
# --------------------------------------------------------------------------------------------------


def bands(labels: np.ndarray, width: int = 1000) -> list[tuple[float, float, int]]:
    """Return the runs of equal labels as (begin, length, label) on an axis of `width`.

    The label -1 is left out. With more than `width` samples, each place has the most frequent
    label.
    """
    count = len(labels)
    if count > width:
        edges = np.arange(width + 1) * count // width
        labels = np.array([_most(labels[a:b]) for a, b in itertools.pairwise(edges)])
    cuts = [0, *(np.flatnonzero(np.diff(labels)) + 1).tolist(), len(labels)]
    scale = width / max(1, len(labels))
    found = [
        (a * scale, (b - a) * scale, int(labels[a])) for a, b in itertools.pairwise(cuts) if b > a
    ]
    return [
        (round(begin, 2), round(length, 2), label) for begin, length, label in found if label >= 0
    ]


def _most(labels: np.ndarray) -> int:
    values, counts = np.unique(labels, return_counts=True)
    return int(values[counts.argmax()])


def class_colour(number: int, count: int) -> str:
    """Return a distinct colour for a class: Okabe and Ito, or hues in three shades if C > 8."""
    if count <= len(COLOURS):
        return COLOURS[number]
    hue = round(360 * (number * 0.61803398875 % 1))
    return f"hsl({hue} 65% {(38, 55, 72)[number % 3]}%)"


def share(value: float) -> float:
    """Return a value clamped to [0, 1], the range of a shade; 0 if not finite."""
    return min(1.0, max(0.0, value)) if math.isfinite(value) else 0.0
