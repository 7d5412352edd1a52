"""Write a trained policy as a `pretrained_model` folder for `policy.pretrained_path` and, except
for a vla, LeRobot.

python tools/save_pretrained.py RUN          to RUN/pretrained_model, from the best checkpoint
python tools/save_pretrained.py RUN FOLDER

FOLDER may exist: the files of the policy in it are replaced.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import train
from engine import config, launch
from engine.comm.world import World, sync_errors
from engine.errors import LockstepError
from plugins.reporting import plan_text
from tools.arguments import Parser
from tools.output import print_json
from tools.running import folder_of, guarded, in_world
from tools.use.evaluate import TRUST, of_run


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="save_pretrained.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a run of the robot task, or a checkpoint")
    what = "the new folder (default: RUN/pretrained_model)"
    add("folder", metavar="FOLDER", type=Path, nargs="?", help=what)
    add("--json", action="store_true", help="one JSON object on stdout, with the folder")
    add("--trust", action="store_true", help=TRUST)
    add("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args(argv)
    words = [options.run]
    if options.debug:
        words.append("--debug")

    def work(args: config.Args, world: World, folder: Path) -> None:
        cfg = config.changed(args.cfg, {"ddp.shares": []})
        found = train.build(args._replace(cfg=cfg), world, split="val")
        plan_text.print_plan(found, steps=False)
        task: Any = found.task
        if not hasattr(task, "save_pretrained"):
            raise LockstepError(
                f"task {args.cfg.task} has no policy to save", options.run, "give a robot's run"
            )
        with sync_errors(world):
            if world.main:
                with found.evaluated() as model:
                    task.save_pretrained(model, folder)
                print(f"Saved {folder}")

    def save(args: config.Args) -> int:
        folder = options.folder or folder_of(Path(options.run)) / "pretrained_model"
        in_world(args.cfg, lambda world, _: work(args, world, folder))
        if options.json and launch.environment().rank == 0:
            print_json({"output": str(folder)})
        return 0

    return guarded(words, save, partial(of_run, options.trust), options.json)
