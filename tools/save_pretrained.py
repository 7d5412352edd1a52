#!/usr/bin/env python3
"""Write a trained policy as a `pretrained_model` folder for `policy.pretrained_path` and, except for a vla, LeRobot.

python tools/save_pretrained.py RUN          to RUN/pretrained_model, from the best checkpoint
python tools/save_pretrained.py RUN FOLDER

RUN is the folder of a run of the robot task, or one of its checkpoints. --trust runs a task file that lies in RUN's own
folder.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train
from engine import config, dist
from engine.contract import LockstepError
from tools.evaluate import of_run


def main(argv: list[str]) -> int:
    trust, argv = "--trust" in argv, [word for word in argv if word != "--trust"]
    if not 1 <= len(argv) <= 2 or argv[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    run = Path(argv[0])
    folder = Path(argv[1]) if argv[1:] else (run if run.is_dir() else run.parent) / "pretrained_model"

    def work(asked: config.Asked) -> int:
        world = dist.join(asked.cfg, dist.environment())
        job = train.prepare(asked.cfg, world, split="val").job
        if not hasattr(job.task, "save_pretrained"):
            raise LockstepError(
                f"task {asked.cfg.task} has no policy to save", where=argv[0], todo="give a robot's run"
            )
        world.on_main(lambda: job.task.save_pretrained(job.evaluated_model, folder))  # type: ignore[attr-defined]
        if world.main:
            print(f"Saved {folder}")
        world.leave()
        return 0

    return train.guarded(argv[:1], work, partial(of_run, trust))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
