"""Write a trained policy as a `pretrained_model` folder for `policy.pretrained_path` and, except
for a vla, LeRobot.

python tools/save_pretrained.py RUN          to RUN/pretrained_model, from the best checkpoint
python tools/save_pretrained.py RUN FOLDER

RUN is the folder of a run of the robot task, or a checkpoint. --trust runs a task file in RUN's own
folder. --json prints one JSON object with the folder.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import train
from engine import config, launch
from engine.comm.world import World, sync_errors
from engine.errors import LockstepError
from plugins.reporting import plan_text
from tools.running import folder_of, guarded, in_world, stdout_aside
from tools.use.evaluate import of_run


def main(argv: list[str]) -> int:
    trust, as_json = "--trust" in argv, "--json" in argv
    argv = [word for word in argv if word not in ("--trust", "--json")]
    if not 1 <= len(argv) <= 2 or argv[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    folder = Path(*argv[1:]) if argv[1:] else folder_of(Path(argv[0])) / "pretrained_model"

    def work(args: config.Args, world: World) -> None:
        cfg = config.changed(args.cfg, {"ddp.shares": []})
        found = train.build(args._replace(cfg=cfg), world, split="val")
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

    def save(args: config.Args) -> int:
        with stdout_aside(as_json):
            in_world(args.cfg, lambda world, _: work(args, world))
        if as_json and launch.is_local_rank0():
            print(json.dumps({"output": str(folder)}))
        return 0

    return guarded(argv[:1], save, partial(of_run, trust))
