"""Run under torchrun (or plain): several trainings in one process group; of each, what every rank holds at its end.

torchrun ... shares.py OUT.json '[["toy.py", "optim.zero=true", ...], ...]'
"""

import gc
import json
import sys
from pathlib import Path

import torch

import tasks
import train
from engine import config, launch
from engine.phases import phase
from engine.report.open_log import open_log
from plugins.reporting import plan_text


def moments(optimizer):
    return [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]


def live_bytes():
    """Of all tensors that Python knows in this process."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def main() -> None:
    world, held = None, []
    for argv in json.loads(sys.argv[2]):
        args = config.parse(argv, tasks.load)
        world = world or train.setup_distributed(args.cfg)
        plan_text.announce(world, args.cfg, always=False)
        run = train.build(args, world)
        plan_text.training(run, strict=False)
        optimizer, waited = run.optimizer, []
        if hasattr(optimizer, "zero"):
            optimizer.zero.register_step_post_hook(lambda *_, seen=waited: seen.append(phase.now[1]))
        with open_log(run):
            train.train(run)  # its last checkpoint is behind it
        mine = {
            "class": type(optimizer).__name__,
            "moments": sum(tensor.nbytes for tensor in moments(optimizer)),
            "live": live_bytes(),
            "waited": waited,
        }
        held.append(world.gather(mine))
        del run, optimizer
    if world.main:
        Path(sys.argv[1]).write_text(json.dumps(held))
    launch.leave()


if __name__ == "__main__":
    main()
