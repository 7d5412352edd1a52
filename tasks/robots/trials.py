"""Make, film and count trials of a robot's policy in a simulation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine import contract
from engine.contract import Sums
from models import act
from models.policy import Policy
from tasks.envs.trials import roll_out
from tasks.robots import lerobot as _lerobot
from tasks.robots import simulation
from tasks.robots.settings import steps_of
from tasks.shared.pictures import caption, captioned

SHOWN = 4  # films of an evaluation
TILE = 288  # pixels of a film's side, at least
GREEN, ORANGE = (0, 158, 115), (213, 94, 0)  # safe for colour blindness (Okabe and Ito)


class Trial(NamedTuple):
    """A filmed trial: number, command, outcome, and pictures (T, 3, H, W) uint8."""

    number: int
    command: str
    success: bool
    film: np.ndarray


def make(
    task: Any, model: Policy, which: range, stopped: Callable[[], bool]
) -> tuple[Sums, list[Trial]]:
    """Make the trials `which` of a robot task; return totals and films."""
    cfg, device = task.cfg, next(model.parameters()).device
    coefficient = getattr(cfg.policy, "temporal_ensemble_coeff", 0.0)
    blend = act.TemporalEnsemble(coefficient) if coefficient else None
    looks, delay = itertools.count(), cfg.eval.delay
    takes_committed = delay <= getattr(model.net, "max_committed", 0)

    def policy(
        observations: dict[str, np.ndarray],
        commands: list[str],
        committed: np.ndarray | None = None,
    ) -> np.ndarray:
        named = {task.names.get(name, name): value for name, value in observations.items()}
        batch = {name: torch.from_numpy(value).to(device) for name, value in named.items()}
        batch |= {name: _shrunk(batch[name], task.sizes[name]) for name in task.cameras}
        if task.encode:
            # A policy trained on one task has learned the wording of the task alone, whatever the
            # text of the simulation.
            texts = commands if len(task.demos.tasks) > 1 else task.demos.tasks * len(commands)
            batch["words"] = task.encode(texts).to(device)
        # Noise selects one of several ways instead of their mean. The seed depends on trial and
        # prediction, not on the rank.
        seeds_now = contract.sample_seeds(next(looks), 0, torch.tensor(which, device=device))
        given: tuple[torch.Tensor, ...] = ()
        if takes_committed and committed is not None:
            given = (torch.from_numpy(committed).to(device),)
        chunk = model.act(batch, contract.uniform(seeds_now, model.net.num_noise), *given)
        return (blend(chunk)[:, None] if blend else chunk).float().cpu().numpy()

    totals, trials = dict.fromkeys(("successes", "rewards", "trials"), 0.0), list[Trial]()
    if len(which):
        seeds = simulation.FRESH + np.array(which, dtype=np.int64)
        # Render at the size of the recorded pictures.
        recorded = [task.demos.features[name].shape[1] for name in task.cameras]
        worlds = simulation.worlds(
            cfg.env, task.simulation, seeds, max(recorded, default=0), bool(recorded)
        )
        # The first batch belongs to rank 0 for any number of processes.
        filmed = len(which) if 0 in which else 0
        asked, steps = _lerobot.with_history(policy, task.windows.history, steps_of(cfg.policy))
        success, films = roll_out(asked, worlds, steps, stopped, delay, filmed)
        about = zip(which, worlds.commands, success.tolist(), films, strict=False)
        trials = [Trial(*each) for each in about]
        totals = {"successes": success.sum(), "rewards": worlds.reward.sum(), "trials": len(which)}
    return Sums(
        {name: torch.tensor(total, dtype=torch.float64) for name, total in totals.items()}
    ), trials


def metrics(sums: Sums) -> dict[str, float]:
    """Return the success rate with the 95 % interval, and the mean of the best rewards.

    The result is {} without a trial.
    """
    count = float(sums["trials"]) if "trials" in sums else 0.0
    if not count:
        return {}
    rate = float(sums["successes"]) / count
    low, high = interval(rate, count)
    found = {
        "success_rate": rate,
        "success_rate_low": low,
        "success_rate_high": high,
        "trials": count,
    }
    return found | {"avg_max_reward": float(sums["rewards"]) / count}


def interval(rate: float, count: float, z: float = 1.959963984540054) -> tuple[float, float]:
    """Return the 95 % confidence interval of a rate over `count` trials (Wilson, 1927).

    The interval is inside 0 to 1, and not empty if all trials or none succeed.
    """
    middle = (rate + z * z / (2 * count)) / (1 + z * z / count)
    half = (
        z / (1 + z * z / count) * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count))
    )
    return max(0.0, middle - half), min(1.0, middle + half)


def pictures(trials: list[Trial]) -> dict[str, np.ndarray]:
    """Return `trial` and `trial_strip`.

    `trial` is a film of SHOWN trials side by side, failed trials first. `trial_strip` has ten
    frames of the first trial.
    """
    chosen = sorted(trials, key=lambda trial: trial.success)[:SHOWN]
    if not chosen:
        return {}
    length = max(len(trial.film) for trial in chosen)
    tiles = [_tile(trial, length) for trial in chosen]
    columns = 1 if len(tiles) == 1 else 2
    tiles += [np.full_like(tiles[0], 255)] * (-len(tiles) % columns)
    rows = [np.concatenate(tiles[n : n + columns], 2) for n in range(0, len(tiles), columns)]
    film = _enlarged(chosen[0].film)
    ten = film[np.linspace(0, len(film) - 1, 10).astype(int)]
    strip = np.concatenate(
        list(np.pad(ten, ((0, 0), (2, 2), (2, 2), (0, 0)), constant_values=255)), 1
    )
    return {
        "trial": np.concatenate(rows, 1),
        "trial_strip": captioned(strip[None], _words(chosen[0]))[0],
    }


def _words(trial: Trial) -> str:
    return f"trial {trial.number}, {'done' if trial.success else 'failed'}: {trial.command}"


def _enlarged(film: np.ndarray) -> np.ndarray:
    """Enlarge (T, 3, H, W) to (T, H, W, 3), at least TILE wide."""
    times = max(1, TILE // film.shape[-1])
    return film.transpose(0, 2, 3, 1).repeat(times, 1).repeat(times, 2)


def _tile(trial: Trial, length: int) -> np.ndarray:
    """Return (length, H, W, 3): a film under two lines of text and a bar in the outcome's colour.

    The last frame of the film is repeated.
    """
    film = _enlarged(trial.film)
    film = np.concatenate([film, np.repeat(film[-1:], length - len(film), 0)])
    words = caption(
        [f"trial {trial.number}: {'done' if trial.success else 'failed'}", trial.command],
        film.shape[2],
    )
    bar = np.broadcast_to(
        np.array(GREEN if trial.success else ORANGE, np.uint8), (6, film.shape[2], 3)
    )
    head = np.concatenate([np.repeat(words[:, :, None], 3, 2), bar])
    framed = np.concatenate([np.broadcast_to(head, (length, *head.shape)), film], 1)
    return np.pad(framed, ((0, 0), (2, 2), (2, 2), (0, 0)), constant_values=255)


def _shrunk(pictures: Tensor, size: tuple[int, int]) -> Tensor:
    """Shrink (B, 3, H, W) uint8 to (B, 3, *size) by the filter of formats/robots/frames.py."""
    if size == tuple(pictures.shape[2:]):
        return pictures
    return F.interpolate(pictures.float(), size, mode="bilinear", antialias=True).round()
