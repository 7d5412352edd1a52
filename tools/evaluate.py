#!/usr/bin/env python3
"""Evaluate a trained run: the metrics of its validation split, and the trials that its task makes in simulation.

python tools/evaluate.py checkpoints/robot_20260101-120000 eval.n_episodes=100
torchrun --standalone --nproc_per_node=2 tools/evaluate.py RUN            the same numbers: each rank takes its share

RUN is the folder of a run (its best checkpoint) or one of its checkpoints; what follows changes the run's own config.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train
from engine import config, dist, loop, status, storage
from engine.contract import LockstepError
from engine.stop import Stop
from engine.watch import Watch


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        return 0 if argv else 2
    return train.guarded(argv, _main, of_run)


def of_run(argv: list[str]) -> list[str]:
    """RUN and what follows -> the command line of the training that left it, to go on from that checkpoint."""
    run, rest = Path(argv[0]), argv[1:]
    folder = run if run.is_dir() else run.parent
    if not (folder / "config.yaml").is_file():
        raise LockstepError(f"no run at {argv[0]!r}", where="the first word", todo="give the folder of a run")
    checkpoints = storage.Checkpoints(folder)
    file = folder / (checkpoints.best or storage.LAST) if run.is_dir() else run
    return ["--config", str(folder / "config.yaml"), *rest, "save_dir=", f"resume={file}"]


def _main(asked: config.Asked) -> int:
    world = dist.join(asked.cfg, dist.environment())
    stop = Stop()
    asked.cfg.cache = "none"  # each sample is asked for once
    with Watch(world, stop, asked.cfg.ddp.timeout_s):
        prepared = train.prepare(asked.cfg, world, stop, to_train=False)
        scored = loop.evaluate(prepared.job, prepared.val_loader)
        if world.main and scored:
            print(f"{prepared.resumed}, step {prepared.job.progress.step}:")
            print(_table(scored[0]))
        del prepared
    world.leave()
    return status.leave_code(status.DONE)


def _table(metrics: dict[str, Any]) -> str:
    width = max(map(len, metrics))
    return "\n".join(f"  {name:<{width}}  {value:.6g}" for name, value in metrics.items())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
