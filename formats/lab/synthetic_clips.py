"""Synthetic trials of a mouse seen from above, in the packed format of `clips`.

The video task needs no download with these trials.

Only motion separates the classes. A pose has six parameters: position x and y, heading, body
length, head angle and paw extension. In every class and at every frame, each parameter is uniform
and independent of the rest. A class moves only its own parameter, along a triangle wave with a
uniformly random phase. The value of such a wave is uniform at any moment. A model of single frames
therefore cannot beat chance.

    rest          nothing moves
    walk          x and y move, with reflection at the walls of the arena
    rear          the body shortens and lengthens
    groom         the head swings quickly
    paw_withdraw  a hind paw is pulled in and put out: small, and rare
"""

from __future__ import annotations

import fcntl
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from engine.contract import LockstepError
from formats.lab.clips import ClipsWriter

CLASSES = ("rest", "walk", "rear", "groom", "paw_withdraw")
SHARES = (0.543, 0.2, 0.12, 0.117, 0.02)
POSE = ("x", "y", "heading", "length", "head", "paw")
VERSION = 1  # increase when equal recipes would give different clips
RECIPE = "recipe.json"

# Cycles per frame, slowest and fastest. A walk's full cycle is there and back across the arena.
_RATES = {
    "walk": (0.022, 0.045),
    "rear": (1 / 14, 1 / 9),
    "groom": (1 / 7, 1 / 4),
    "paw_withdraw": (1 / 9, 1 / 5),
}


@dataclass(frozen=True)
class Recipe:
    """Parameters that determine the clips to the last bit.

    trials   N, spread evenly over the videos
    videos   recordings, each with its own floor, light and size of mouse
    frames   T of each trial
    size     H = W in pixels
    seed     of all random draws
    shares   of the five classes
    """

    trials: int = 980
    videos: int = 100
    frames: int = 17
    size: int = 64
    seed: int = 0
    shares: tuple[float, ...] = SHARES

    @property
    def name(self) -> str:
        """Return the folder's name, unique to the recipe with the default shares."""
        shape = f"{self.frames}x{self.size}x{self.size}"
        return f"clips_v{VERSION}_{self.trials}of{self.videos}_{shape}_seed{self.seed}"


def ensure(folder: str | Path, recipe: Recipe = Recipe()) -> Path:
    """Return the folder with the recipe's clips, built first if missing.

    Any number of processes of a machine may call the function at once: one process builds, the rest
    wait. The folder gets its name when complete. Raises LockstepError if the folder has clips of
    another recipe.
    """
    folder = Path(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.parent / f".{folder.name}.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a killed process releases the lock, too
            if not folder.exists():
                _build(folder, recipe)
    except OSError as error:
        raise LockstepError(
            f"cannot make clips: {error}", str(folder), "choose another folder"
        ) from None
    _check_recipe(folder, recipe)
    return folder


def _build(folder: Path, recipe: Recipe) -> None:
    try:
        generate(folder, recipe)
    except LockstepError:
        # The lock may not reach other machines on the file system. Another machine may have
        # finished first.
        if not folder.exists():
            raise


def _check_recipe(folder: Path, recipe: Recipe) -> None:
    try:
        found = json.loads((folder / RECIPE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        found = None
    if found != _as_json(recipe):
        raise LockstepError(
            (
                f"the folder holds {repr(found)[:300] if found else 'no synthetic clips'}, not "
                f"{_as_json(recipe)}"
            ),
            str(folder),
            "remove it or choose another",
        )


def _as_json(recipe: Recipe) -> dict[str, object]:
    return asdict(recipe) | {"shares": list(recipe.shares), "version": VERSION}


def generate(folder: str | Path, recipe: Recipe) -> None:
    """Write the recipe's clips one trial at a time, so that memory does not grow with `trials`."""
    if not 1 <= recipe.videos <= recipe.trials or len(recipe.shares) != len(CLASSES):
        raise LockstepError(
            f"cannot spread {recipe.trials} trials over {recipe.videos} videos", "dataset"
        )
    rng = np.random.default_rng([recipe.seed, 0])
    labels = rng.permutation(
        np.repeat(np.arange(len(CLASSES)), class_counts(recipe.trials, recipe.shares))
    )
    poses = draw_poses(labels, recipe.frames, rng)
    video = np.arange(recipe.trials) * recipe.videos // recipe.trials
    with ClipsWriter(folder, CLASSES) as writer:
        for trial, label in enumerate(labels):
            if trial == 0 or video[trial] != video[trial - 1]:
                look = Look.draw(
                    np.random.default_rng([recipe.seed, 1, int(video[trial])]), recipe.size
                )
            clip = render(poses[trial], look, np.random.default_rng([recipe.seed, 2, trial]))
            writer.add(clip, video=f"video_{video[trial]:03d}", label=CLASSES[label])
        writer.write_text(RECIPE, json.dumps(_as_json(recipe), indent=1))


def class_counts(trials: int, shares: tuple[float, ...] = SHARES) -> np.ndarray:
    """Return (C,) trials per class, with at least two of each class if possible.

    Two trials give one to train on and one to validate on.
    """
    counts = np.floor(trials * np.asarray(shares) / sum(shares)).astype(np.int64)
    if trials >= 4 * len(shares):
        counts = np.maximum(counts, 2)
    counts[0] += trials - counts.sum()
    return counts


def draw_poses(labels: np.ndarray, frames: int, rng: np.random.Generator) -> np.ndarray:
    """Draw poses (N, T, 6) float64 for (N,) classes.

    The last axis is named in POSE: the heading is in radians, the rest is in [0, 1].
    """
    count = len(labels)
    rates = np.zeros((count, len(CLASSES)))
    for name, (low, high) in _RATES.items():
        rates[:, CLASSES.index(name)] = rng.uniform(low, high, count)
    rates *= np.arange(len(CLASSES)) == labels[:, None]  # each class moves one parameter
    walk, rear, groom, paw = (rates[:, CLASSES.index(name)] for name in _RATES)
    direction = rng.uniform(0, 2 * np.pi, count)
    cosine, sine = np.cos(direction), np.sin(direction)
    rate = np.stack([walk * cosine, walk * sine, rear, groom, paw], 1)  # (N, 5)
    # (N, T, 5)
    phase = (rng.uniform(0, 1, (count, 1, 5)) + rate[:, None] * np.arange(frames)[:, None]) % 1.0
    wave = 1.0 - np.abs(2.0 * phase - 1.0)  # uniform in [0, 1], because the phase is uniform
    # The mouse faces the direction of its walk and turns at a wall. The remaining classes draw the
    # sign at random. The direction is uniform and independent of the phase. The heading is
    # therefore independent of the position in every class.
    forth = np.where(phase[..., :2] < 0.5, 1.0, -1.0)
    heading = np.arctan2(forth[..., 1] * sine[:, None], forth[..., 0] * cosine[:, None])
    return np.stack(
        [wave[..., 0], wave[..., 1], heading, wave[..., 2], wave[..., 3], wave[..., 4]], 2
    )


@dataclass
class Look:
    """Appearance shared by the trials of a recording.

    floor  (H, W) float32 gray levels
    scale  size of the mouse, in pixels per body unit (the frame is 1 high)
    fur, skin  gray levels of the body and of ears, paws and tail
    """

    floor: np.ndarray
    scale: float
    fur: float
    skin: float

    @staticmethod
    def draw(rng: np.random.Generator, size: int) -> Look:
        knots = 5
        at = np.linspace(0, knots - 1, size)[:, None] - np.arange(knots)
        hat = np.maximum(0, 1 - np.abs(at))  # (size, knots): linear interpolation as a matrix
        floor = rng.uniform(100, 150) + hat @ rng.uniform(-20, 20, (knots, knots)) @ hat.T
        floor += rng.normal(0, 5, (size, size))  # bedding, which does not move
        scale = size * rng.uniform(0.9, 1.15)
        return Look(floor.astype(np.float32), scale, rng.uniform(25, 65), rng.uniform(190, 230))


def render(pose: np.ndarray, look: Look, rng: np.random.Generator) -> np.ndarray:
    """Render (T, 6) poses as (T, H, W) uint8.

    rng  draws the trial's light, sensor noise and paw
    """
    frames, (height, width) = len(pose), look.floor.shape
    image = np.repeat(look.floor[None], frames, 0)
    x, y, heading, length, head, paw = pose.T
    x, y = (0.22 + 0.56 * x) * width, (0.22 + 0.56 * y) * height
    side = rng.choice([-1.0, 1.0])
    half = 0.09 + 0.08 * length  # half the body's length
    angle = (head - 0.5) * np.deg2rad(130)
    along, across = (
        half * 0.9 + 0.055 * np.cos(angle),
        0.055 * np.sin(angle),
    )  # position of the head

    def stamp(*ellipse: float | np.ndarray, shade: float) -> None:
        """Draw an ellipse in the mouse's axes and units.

        The arguments are forward, left, turn and half-axes, each a scalar or (T,).
        """
        forward, left, turn, a, b = (value + 0 * x for value in ellipse)
        cosine, sine, scale = np.cos(heading), np.sin(heading), look.scale
        place = (
            x + scale * (forward * cosine - left * sine),
            y + scale * (forward * sine + left * cosine),
        )
        _ellipse(image, *place, heading + turn, scale * a, scale * b, shade)

    stamp(-half - 0.07, 0, 0, 0.085, 0.011, shade=look.skin)  # tail
    stamp(-0.5 * half, side * (0.055 + 0.06 * paw), side * 0.6, 0.034, 0.02, shade=look.skin)
    stamp(0, 0, 0, half, 0.07, shade=look.fur)  # body, over the paw
    stamp(along, across, angle, 0.07, 0.045, shade=look.fur)  # head
    for ear in (-1.0, 1.0):
        back, out = -0.015, ear * 0.045
        ear_x, ear_y = (
            np.cos(angle) * back - np.sin(angle) * out,
            np.sin(angle) * back + np.cos(angle) * out,
        )
        stamp(along + ear_x, across + ear_y, angle, 0.02, 0.02, shade=look.skin)
    image *= rng.uniform(0.8, 1.15)
    image += rng.integers(-7, 8, image.shape, dtype=np.int8)
    return np.clip(image, 0, 255).astype(np.uint8)


def _ellipse(
    image: np.ndarray,
    x: np.ndarray,
    y: np.ndarray,
    angle: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    shade: float,
) -> None:
    """Blend an ellipse into each frame of image (T, H, W).

    The edge is smoothed over about a pixel.

    All remaining arguments are (T,).
    """
    reach = np.maximum(a, b) + 1.0
    # Only the bounding box of the ellipse over the clip changes: most of the frame is floor.
    rows = slice(max(0, int((y - reach).min())), max(0, int((y + reach).max()) + 1))
    columns = slice(max(0, int((x - reach).min())), max(0, int((x + reach).max()) + 1))
    box = image[:, rows, columns]
    x, y, angle, a, b = (value.astype(np.float32)[:, None, None] for value in (x, y, angle, a, b))
    # (T, 1, w)
    dx = (
        np.arange(columns.start, columns.start + box.shape[2], dtype=np.float32)
        + np.float32(0.5)
        - x
    )
    # (T, h, 1)
    dy = (
        np.arange(rows.start, rows.start + box.shape[1], dtype=np.float32)[:, None]
        + np.float32(0.5)
        - y
    )
    cosine, sine = np.cos(angle), np.sin(angle)
    # 1 at the edge
    radius = np.hypot(dx * (cosine / a) + dy * (sine / a), dy * (cosine / b) - dx * (sine / b))
    cover = np.clip((1 - radius) * np.minimum(a, b) + np.float32(0.5), 0, 1)
    box += cover * (np.float32(shade) - box)
