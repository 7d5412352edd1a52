"""Demonstrations of an expert and trials of a policy, in any simulated worlds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

ACTION = "action"
MOST_FRAMES = 100  # of a film


class Worlds(Protocol):
    """A batch of n worlds, each a pure function of its seed and its actions.

    fps, horizon  steps per second, and the steps after which a trial has failed
    patience      steps after which a demonstration is abandoned
    linger        steps of a recording after success
    unit          half the table's side, the unit of noise
    commands      (n,) the command of each world
    success       (n,) bool: the command is done, now or earlier
    reward        (n,) the best reward so far, 0 to 1 for success
    """

    fps: int
    horizon: int
    patience: int
    linger: int
    unit: float
    commands: list[str]
    success: np.ndarray

    @property
    def reward(self) -> np.ndarray: ...

    @property
    def features(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return {name: (dtype, shape of one frame)} of the observations and of the action."""

    def observe(self) -> dict[str, np.ndarray]:
        """Return the observations {name: (n, ...)}."""

    def render(self, which: slice = slice(None)) -> np.ndarray:
        """Return the pictures (n, 3, H, W) uint8."""

    def expert(self) -> np.ndarray:
        """Return (n, A) actions that lead to success."""

    def step(self, actions: np.ndarray) -> None:
        """Advance one step by actions (n, A)."""


class Episode(NamedTuple):
    """The arrays and the command of an episode.

    features  {name: (T, ...)} of `Worlds.observe`, and "action" (T, A) float32
    command   text of the command

    The command is a text.
    """

    features: dict[str, np.ndarray]
    command: str


def demonstrate(worlds: Worlds, seeds: np.ndarray, noise: float = 0.05) -> Iterator[Episode]:
    """Yield the expert's successful recordings in the worlds of the seeds.

    The robot executes the action plus noise (`noise` is the standard deviation, in `unit`). The
    recording holds the expert's action without noise. The recording therefore shows the recovery
    from errors (DART, Laskey et al., CoRL 2017).
    """
    draws = [
        np.random.default_rng([int(s) % 2**64, 1]).normal(0, noise, (worlds.horizon, 2))
        for s in seeds
    ]
    shocks = worlds.unit * np.array(draws)  # (n, horizon, 2)
    frames: list[dict[str, np.ndarray]] = []
    lengths = np.full(len(seeds), worlds.patience)
    for now in range(worlds.patience):
        action = worlds.expert()
        frames.append(worlds.observe() | {ACTION: action.astype(np.float32)})
        worlds.step(action + shocks[:, now])
        lengths = np.where(worlds.success, np.minimum(lengths, now + 1 + worlds.linger), lengths)
        if (lengths <= now + 1).all():
            break
    for i in np.flatnonzero(worlds.success):
        track = {
            name: np.stack([frame[name][i] for frame in frames[: lengths[i]]]) for name in frames[0]
        }
        yield Episode(track, worlds.commands[i])


Policy = Callable[..., np.ndarray]
"""(observations {name: (n, ...)}, n commands) -> (n, chunk, A) actions. A delayed policy gets a
third argument: the actions (n, delay, A) executed during the prediction, or None at the start."""


def roll_out(
    policy: Policy,
    worlds: Worlds,
    chunk_steps: int,
    stopped: Callable[[], bool] = lambda: False,
    delay: int = 0,
    filmed: int = 1,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Run a policy for a trial, or until `stopped()`.

    The policy predicts again after every `chunk_steps` actions.

    delay   steps of a prediction, at most chunk_steps. Meanwhile the next actions of the last chunk
            are executed. During the first prediction the world stands still.
    filmed  number of worlds, from the first, with a film

    Returns (n,) bool, success within the horizon, and films (T, 3, H, W) uint8. Each film ends
    `linger` steps after success. The film of a long trial has about MOST_FRAMES frames. Raises
    ValueError for chunks that are too short.
    """
    films: list[list[np.ndarray]] = [[] for _ in range(filmed)]
    last = np.full(len(worlds.commands), worlds.horizon)
    every = -(-worlds.horizon // MOST_FRAMES)
    chunk: Any = None
    for now in range(worlds.horizon):
        if now % chunk_steps == 0:
            committed = chunk[:, chunk_steps : chunk_steps + delay] if now and delay else None
            chunk = policy(worlds.observe(), worlds.commands, *([committed] if delay else []))
            if chunk.shape[1] < chunk_steps + delay:
                raise ValueError(
                    f"a chunk of {chunk.shape[1]} actions has no {chunk_steps + delay} to execute"
                )
            if committed is not None:
                chunk = np.concatenate([committed, chunk[:, delay:]], 1)
        if now % every == 0 and len(running := np.flatnonzero(now < last[:filmed])):
            shots = worlds.render(slice(0, running[-1] + 1))
            for n in running:
                films[n].append(shots[n])
        worlds.step(chunk[:, now % chunk_steps])
        last = np.where(worlds.success, np.minimum(last, now + 1 + worlds.linger), last)
        if stopped() or (worlds.success.all() and now + 1 >= last[:filmed].max(initial=0)):
            break
    return worlds.success, [np.stack(film) for film in films]
