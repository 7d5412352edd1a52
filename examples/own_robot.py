#!/usr/bin/env python3
"""Your own robot: logs of demonstrations -> a dataset in LeRobot's format -> a policy.

Fork this file.

    python examples/own_robot.py FOLDER [arguments of the training, such as steps=2000]

FOLDER (or FOLDER/raw) contains your logs, one .npz per episode with states, pictures and actions.
Change `FEATURES` and `read_episode` for your logs. Without logs the script makes up logs in
FOLDER/made_up, and prints a line about the made-up logs: a gripper that moves to a ball. A dataset
that LeRobot recorded needs no conversion: use dataset.root=DIR. `python train.py robot --help`
lists the arguments of the training. Needed package: pip install pyarrow
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from formats.robots.lerobot_writer import Recorder
from tools.lab.own_data import find_raw, run, start

FPS, SIZE = 10, 32
FEATURES = {
    "observation.state": ("float32", (2,)),
    # "video" is smaller on the disk, but not exact
    "observation.images.top": ("image", (3, SIZE, SIZE)),
    "action": ("float32", (2,)),  # commands to the robot, in their own units
}
# LeRobot needs the names to replay an action.
NAMES = {"observation.state": ["x.pos", "y.pos"], "action": ["x.pos", "y.pos"]}
SETTINGS = {"policy.chunk_size": 5, "batch_size": 16, "steps": 300}
"""Settings of the training; arguments of the command line override them."""


def make_raw(folder: Path) -> None:
    """Write a log per demonstration. YOUR DATA replaces the logs."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[-1 : 1 : SIZE * 1j, -1 : 1 : SIZE * 1j]
    for episode in range(40):
        ball, hand = rng.uniform(-0.8, 0.8, 2), rng.uniform(-0.8, 0.8, 2)
        hands, goals = [], []
        while not hands or np.abs(ball - hand).max() > 0.01:  # until it is there
            goal = hand + np.clip(ball - hand, -0.15, 0.15)
            hands.append(hand)
            goals.append(goal)
            hand = goal
        near = [np.hypot(x - at[0], y - at[1]) < 0.15 for at in (ball, *hands)]
        # (3, H, W) each
        pictures = [np.stack([255 * near[0], 255 * here, 0 * here]) for here in near[1:]]
        log = {
            "state": hands,
            "goal": goals,
            "camera": np.array(pictures, np.uint8),
            "task": "go to the ball",
        }
        np.savez(folder / f"episode_{episode:03d}.npz", **log)


def read_episode(path: Path) -> tuple[dict[str, np.ndarray], str]:
    """Return ({feature: (T, ...)}, the task as text). All arrays have a row per frame, at FPS."""
    with np.load(path) as log:
        arrays = {
            "observation.state": log["state"].astype(np.float32),
            "observation.images.top": log["camera"],  # (T, 3, H, W) uint8
            "action": log["goal"].astype(np.float32),
        }
        return arrays, str(log["task"])


def convert(raw: Path, target: Path) -> None:
    """Convert the logs to a dataset. After a kill, convert the remaining logs."""
    with Recorder(target, FPS, FEATURES, robot_type="mine", names=NAMES, resume=True) as recorder:
        # After a kill, only the remaining episodes are converted.
        for path in sorted(raw.glob("*.npz"))[recorder.num_episodes :]:
            recorder.add_episode(*read_episode(path))


def main(*words: str) -> None:
    if {"-h", "--help"} & {*words}:
        return print(__doc__)
    if not words or re.match(r"-|[\w.]+=", words[0]):  # no FOLDER
        words = ("checkpoints/own_robot", *words)
    where, *more = words
    raw, folder = find_raw(Path(where).resolve(), "*.npz", "one for each episode", (), make_raw)
    data = folder / "dataset"
    if not data.exists():
        convert(raw, data)
    else:
        print(f"{data} is there already: remove it after a change in {raw}")
    print(f"{len(list(raw.glob('*.npz')))} demonstrations in {raw} -> {data}")
    given = {word.lstrip("-").partition("=")[0].replace("-", "_") for word in more}
    settings = {
        key: value
        for key, value in SETTINGS.items()
        if not {key, key.removeprefix("dataset.")} & given
    }
    settings |= {"dataset.root": data, "save_dir": folder / "run"}
    run("train.py", "robot", *(f"{key}={value}" for key, value in settings.items()), *more)
    run("tools/evaluate.py", str(folder / "run"))


if __name__ == "__main__":
    start(main)
