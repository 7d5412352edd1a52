"""Coloured discs on a table, and a magnet that follows commands: a simulated robot on NumPy alone.

The table is [-1, 1] x [-1, 1], x to the right and y downwards in the picture. An action is the
magnet's target, which the magnet approaches at SPEED. The first touched disc sticks to the magnet
permanently, so a wrong disc is a failure. Only the command identifies the target disc, and only the
picture shows the disc's position.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

COLOURS = {"red": (214, 48, 49), "green": (38, 166, 91), "blue": (52, 106, 219)}
VERBS = ("move to the {} disc", "bring the {} disc to the centre")
COMMANDS = tuple(verb.format(colour) for verb in VERBS for colour in COLOURS)
STATE, CAMERA, ACTION = "observation.state", "observation.images.top", "action"

RADIUS = 0.18  # of a disc, in table units
SPEED = 0.15  # table units per step
REACH = 0.3  # largest distance of the expert's actions: two steps
TOLERANCE = 0.1  # largest distance of a brought disc from the centre
HORIZON = 40
LINGER = 3  # steps of a recording and a film after success
_TABLE, _MARK, _MAGNET = (226, 221, 211), (190, 184, 172), (35, 35, 40)


class Discs:
    """n worlds, each a pure function of its seed.

    seeds    (n,) integers
    size     H = W of the pictures, in pixels
    command  the command of all worlds, such as "move to the red disc"; None = drawn from COMMANDS
             by the seed

    commands  the command of each world
    success   (n,) bool: the command is done, now or earlier
    """

    fps, horizon, patience, linger, unit = 10, HORIZON, HORIZON, LINGER, 1.0

    def __init__(self, seeds: np.ndarray, size: int = 32, command: str | None = None):
        self.size = size
        start = [_begin(int(seed) % 2**64, command) for seed in seeds]
        self.bring = np.array([one.bring for one in start], bool)  # (n,)
        # (n,) the target disc of the command
        self.target = np.array([one.target for one in start], np.int64)
        self.discs = np.array([one.places[1:] for one in start]).reshape(-1, len(COLOURS), 2)
        self.magnet = np.array([one.places[0] for one in start]).reshape(-1, 2)
        self.held = np.full(len(start), -1)  # (n,) the disc that sticks to the magnet, -1 = none
        self.success = np.zeros(len(start), bool)
        self.commands = [COMMANDS[one.bring * len(COLOURS) + one.target] for one in start]

    @property
    def reward(self) -> np.ndarray:
        return self.success.astype(float)

    @property
    def features(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {
            STATE: ("float32", (2,)),
            CAMERA: ("image", (3, self.size, self.size)),
            ACTION: ("float32", (2,)),
        }

    def observe(self) -> dict[str, np.ndarray]:
        """Return the observations.

        "observation.state" (n, 2) float32 is the magnet's position. "observation.images.top" is
        (n, 3, H, W) uint8.
        """
        return {STATE: self.magnet.astype(np.float32), CAMERA: self.render()}

    def render(self, which: slice = slice(None)) -> np.ndarray:
        """Return the pictures (n, 3, H, W) uint8, with edges smoothed over a pixel."""
        magnet, discs = self.magnet[which], self.discs[which]
        image = np.empty((len(magnet), 3, self.size, self.size), np.float32)
        image[:] = np.reshape(_TABLE, (3, 1, 1))
        _paint(image, np.zeros_like(magnet), TOLERANCE, _MARK)
        for number, colour in enumerate(COLOURS.values()):
            _paint(image, discs[:, number], RADIUS, colour)
        _paint(image, magnet, 0.07, _MAGNET)
        return np.rint(image).astype(np.uint8)

    def expert(self) -> np.ndarray:
        """Return (n, 2) actions: a point on the way to the target disc.

        Once the disc is held, the point is on the way to the centre if commanded. The distance is
        at most REACH, because a direction can be learned from far fewer layouts than a position.
        """
        disc = self.discs[np.arange(len(self.discs)), self.target]
        goal = np.where((self.bring & (self.held == self.target))[:, None], 0.0, disc)
        way = goal - self.magnet
        length = np.hypot(way[:, 0], way[:, 1])
        return self.magnet + way * np.minimum(1.0, REACH / np.maximum(length, 1e-12))[:, None]

    def step(self, actions: np.ndarray) -> None:
        """Advance one step; actions (n, 2) are targets, clipped to the table."""
        way = np.clip(actions, -1.0, 1.0) - self.magnet
        length = np.hypot(way[:, 0], way[:, 1])
        self.magnet = (
            self.magnet + way * np.minimum(1.0, SPEED / np.maximum(length, 1e-12))[:, None]
        )
        apart = np.hypot(*np.moveaxis(self.discs - self.magnet[:, None], 2, 0))  # (n, discs)
        touched = np.where(apart.min(1) < RADIUS, apart.argmin(1), -1)
        self.held = np.where(self.held < 0, touched, self.held)
        self.discs = np.where(
            (np.arange(len(COLOURS)) == self.held[:, None])[:, :, None],
            self.magnet[:, None],
            self.discs,
        )
        there = np.hypot(self.magnet[:, 0], self.magnet[:, 1]) < TOLERANCE
        self.success = self.success | ((self.held == self.target) & (there | ~self.bring))


class _Start(NamedTuple):
    bring: bool
    target: int
    places: np.ndarray  # (1 + discs, 2): the magnet's, then the discs'


def _begin(seed: int, command: str | None) -> _Start:
    """Draw worlds until straight lines can complete the command."""
    rng = np.random.default_rng(seed)
    bring, target = bool(rng.integers(len(VERBS))), int(rng.integers(len(COLOURS)))
    if command is not None:
        verb, target = divmod(COMMANDS.index(command), len(COLOURS))
        bring = bool(verb)
    places = np.zeros((1 + len(COLOURS), 2))
    while not _is_open(places, target):
        places = rng.uniform(-0.8, 0.8, places.shape)
    return _Start(bring, target, places)


def _is_open(places: np.ndarray, target: int) -> bool:
    """Return whether no discs touch, no disc is at the centre, and the paths are wide enough.

    The magnet cannot release a wrong disc, so a path must tolerate errors of the magnet.
    """
    apart = np.hypot(*np.moveaxis(places[:, None] - places, 2, 0)) + 9.0 * np.eye(len(places))
    if apart.min() < 2.2 * RADIUS or np.hypot(*places[1:].T).min() < 2 * RADIUS:
        return False  # most draws end here, before the costlier half
    goal, others = places[1 + target], np.delete(places, [0, 1 + target], 0)
    ways = _distance(others, places[0], goal), _distance(others, goal, np.zeros(2))
    return bool(np.min(ways) > 1.8 * RADIUS)


def _distance(points: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return (k,) distances of points (k, 2) from the segment between start (2,) and end (2,)."""
    way = end - start
    share = np.clip((points - start) @ way / (way @ way), 0.0, 1.0)
    return np.hypot(*(points - start - share[:, None] * way).T)


def _paint(image: np.ndarray, at: np.ndarray, radius: float, colour: tuple[int, int, int]) -> None:
    """Blend a disc at (n, 2), in table units, into each picture of image (n, 3, H, W)."""
    size = image.shape[2]
    centres = (np.arange(size, dtype=np.float32) + 0.5) / size * 2 - 1
    x, y = at.astype(np.float32)[:, :, None].transpose(1, 0, 2)  # each (n, 1)
    squared = (centres - x)[:, None] ** 2 + (centres - y)[:, :, None] ** 2  # (n, H, W)
    cover = np.clip((radius - np.sqrt(squared)) * np.float32(size / 2) + np.float32(0.5), 0, 1)[
        :, None
    ]
    image += cover * (np.reshape(colour, (3, 1, 1)).astype(np.float32) - image)
