"""The robot task's simulated worlds: choose by config, record demonstrations, check a dataset."""

from __future__ import annotations

import fcntl
import re
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from engine.contract import LockstepError
from formats.robots.lerobot import Demonstrations
from formats.robots.lerobot_writer import Recorder
from tasks.envs import discs, pusht, trials

GENERATED = Path(__file__).resolve().parents[2] / "data" / "generated"
RECIPE = 2  # version of the demonstrations; increase when equal configs would give others
AT_ONCE = 25  # worlds simulated as one batch
FRESH = 10**9
"""The first seed of the trials; the seeds of demonstrations are smaller."""
SIZES = {"discs": 32, "pusht": 96}  # H = W of the pictures, in pixels


def which(env: Any, given: bool) -> str:
    """Return "discs", "pusht", or "" for none; `given` is True if the config has a dataset."""
    if env.type == "auto":
        return "" if given else "discs"
    return "" if env.type == "none" else str(env.type)


def worlds(
    env: Any, kind: str, seeds: np.ndarray, size: int = 0, pictures: bool = True
) -> trials.Worlds:
    """Return a world per seed, with pictures of `size` pixels.

    A size of 0 means `env.size`, or else the default of `kind`.
    """
    size = size or env.size or SIZES[kind]
    if kind == "pusht":
        return pusht.PushT(seeds, size, pictures)
    return discs.Discs(seeds, size, env.command or None)


def recorded(env: Any, kind: str) -> Path:
    """Return the folder of the demonstrations, recorded first if missing.

    Of several processes, one records. Raises LockstepError if the folder is not writable.
    """
    size = env.size or SIZES[kind]
    name = f"{kind}_v{RECIPE}_{env.demonstrations}x{size}_seed{env.data_seed}_noise{env.noise:g}"
    folder = GENERATED / "_".join([name, *re.findall(r"\w+", env.command)])
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.parent / f".{folder.name}.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a killed process releases the lock, too
            if not folder.exists():
                record(folder, env, kind)
    except OSError as error:
        what, todo = (
            f"cannot record demonstrations: {error.strerror or error}",
            "make the folder writable",
        )
        raise LockstepError(what, str(folder.parent), f"{todo}, or give dataset.root") from None
    return folder


def record(folder: Path, env: Any, kind: str) -> None:
    """Record `env.demonstrations` demonstrations as a LeRobot dataset."""
    seeds = env.data_seed * 10**6 + np.arange(env.demonstrations)
    shape = worlds(env, kind, seeds[:0])
    shown = tqdm(
        total=len(seeds), desc=f"Recording {folder.name}", unit="episode", delay=2, disable=None
    )
    with (
        Recorder(folder, shape.fps, shape.features, robot_type=kind, keep=False) as recorder,
        shown,
    ):
        for start in range(0, len(seeds), AT_ONCE):
            some = seeds[start : start + AT_ONCE]
            for episode, command in trials.demonstrate(worlds(env, kind, some), some, env.noise):
                recorder.add_episode(episode, command)
            shown.update(len(some))


def features(env: Any, kind: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return {name: (dtype, shape)} of the observations and the action of a world."""
    return worlds(env, kind, np.arange(0)).features


def check_fits(
    env: Any,
    kind: str,
    demos: Demonstrations,
    wanted: list[str],
    names: dict[str, str],
    given: bool,
) -> None:
    """Raise LockstepError unless the worlds have the `wanted` features in the dataset's shapes.

    A given dataset must also have the commands of the trials.

    names  {a world's name: the policy's}
    """
    there = {names[name]: feature for name, feature in features(env, kind).items()}
    for name in wanted:
        feature = demos.features[name]
        if name not in there or (not feature.is_picture and tuple(feature.shape) != there[name][1]):
            what = (
                f"the dataset is not of this simulation: it has {name} of shape "
                f"{tuple(feature.shape)}"
            )
            raise LockstepError(what, f"env.type={env.type}", "give env.type=none")
    asked = [env.command] if env.command else discs.COMMANDS
    if (
        given
        and kind == "discs"
        and (unheard := [command for command in asked if command not in demos.tasks])
    ):
        todo = f"give env.command={demos.tasks[0]!r}, or env.type=none"
        raise LockstepError(f"no demonstration is of {unheard[0]!r}", "env.type=discs", todo)
