#!/usr/bin/env python3
"""What an action prefix in training is worth to a robot whose predictions are late: success, and
jumps between chunks.

python train.py robot save_dir=runs/without
    a quarter of an hour on one core, as runs/with
python tools/save_pretrained.py runs/without
python train.py robot policy.path=runs/without policy.rtc_max_delay=4 steps=300 lr=5e-4
    save_dir=runs/tuned
python train.py robot policy.rtc_max_delay=4 save_dir=runs/with
python benchmarks/late_actions.py runs/without runs/tuned runs/with >
    benchmarks/results/late_actions.md

In trials on the coloured discs a prediction takes some steps, in which the last chunk is executed
on. A jump is the distance from the last action of the old chunk to the first of the new one, beside
that between two actions of one chunk, in percent of the table's side.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine import config
from engine.config import changed
from tasks.envs import discs
from tasks.robots.settings import steps_of
from tools.running import guarded, in_world
from tools.use.evaluate import of_run
from tools.use.predict import load_model

PERCENT = 100 / 2.0  # of the table's side


class Watched(discs.Discs):
    """Discs that keep the actions they are given, of worlds that have not succeeded yet."""

    taken: list[np.ndarray]

    def step(self, actions: np.ndarray) -> None:
        self.taken.append(np.where(self.success[:, None], np.nan, actions))
        super().step(actions)


def jumps(taken: list[np.ndarray], steps: int, delay: int) -> tuple[float, float]:
    """Return the mean distance of consecutive actions between two chunks and inside of one."""
    apart = np.linalg.norm(np.diff(np.stack(taken), axis=0), axis=2)  # (T - 1, n)
    now = np.arange(1, len(apart) + 1)
    between = (now % steps == delay % steps) & (now >= steps)
    return float(np.nanmean(apart[between])), float(np.nanmean(apart[~between]))


def measured(args: config.Args, trials: int, delays: list[int]) -> list[tuple[float, float, float]]:
    """Return (success, jump between chunks, inside of one) of a checkpoint for each delay."""
    loaded, _ = in_world(args.cfg, lambda world, _: load_model(args, world, "val"))
    task, found = loaded.task, []
    for delay in delays:
        task.cfg = changed(task.cfg, {"eval.delay": delay})
        total, every = 0.0, []
        for first in range(0, trials, 10):
            Watched.taken = []
            total += float(
                task.trials(loaded.model, range(first, min(first + 10, trials)), lambda: False)[
                    "successes"
                ]
            )
            every.append(jumps(Watched.taken, steps_of(task.cfg.policy), delay))
        found.append((total / trials, *np.mean(every, 0).tolist()))
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="runs of the robot task on discs")
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--delays", type=int, nargs="+", default=[0, 1, 2, 3, 4], metavar="STEPS")
    asked = parser.parse_args(argv)
    discs.Discs, table = Watched, {}  # type: ignore[misc]
    torch.set_num_threads(1)
    for run in tqdm(asked.runs, "Trials", disable=None):
        rows: list[Any] = []

        def work(args: config.Args, rows: list[Any] = rows) -> int:
            rows += measured(args, asked.trials, asked.delays)
            return 0

        with contextlib.redirect_stdout(sys.stderr):
            code = guarded([run, "device=cpu"], work, lambda words: of_run(False, words))
        if code:
            return code
        table[Path(run).name] = rows
    print(
        "| delay, steps | " + " | ".join(f"{name}: success | jump, inside" for name in table) + " |"
    )
    print("|---|" + "---|---|" * len(table))
    for n, delay in enumerate(asked.delays):
        cells = [
            f"{100 * rows[n][0]:.1f} % | {PERCENT * rows[n][1]:.1f}, {PERCENT * rows[n][2]:.1f}"
            for rows in table.values()
        ]
        print(f"| {delay} | " + " | ".join(cells) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
