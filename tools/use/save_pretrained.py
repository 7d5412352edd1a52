"""Write a trained policy as a `pretrained_model` folder for `policy.pretrained_path` and, except
for a vla, LeRobot.

python tools/save_pretrained.py RUN          to RUN/pretrained_model, from the best checkpoint
python tools/save_pretrained.py RUN FOLDER

RUN is the folder of a run of the robot task, or a checkpoint. --trust runs a task file in RUN's own
folder.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import train
from engine import config
from engine.comm.world import World, sync_errors
from engine.errors import LockstepError
from plugins.reporting import plan_text
from tools.running import folder_of, guarded, in_world
from tools.use.evaluate import of_run


def main(argv: list[str]) -> int:
    trust = "--trust" in argv
    argv = [word for word in argv if word != "--trust"]
    if not 1 <= len(argv) <= 2 or argv[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    folder = Path(*argv[1:]) if argv[1:] else folder_of(Path(argv[0])) / "pretrained_model"

    def work(args: config.Args, world: World) -> int:
        found = train.build(args, world, split="val")
        plan_text.print_plan(found, steps=False)
        task: Any = found.task
        if not hasattr(task, "save_pretrained"):
            raise LockstepError(
                f"task {args.cfg.task} has no policy to save", argv[0], "give a robot's run"
            )
        with sync_errors(world):
            if world.main:
                with found.evaluated() as model:
                    task.save_pretrained(model, folder)
                print(f"Saved {folder}")
        return 0

    return guarded(
        argv[:1],
        lambda args: in_world(args.cfg, lambda world, _: work(args, world)),
        partial(of_run, trust),
    )
