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
from engine import config, dist
from engine.phases import phase


def moments(optimizer):
    return [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]


def live_bytes():
    """Of all tensors that Python knows in this process."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def main() -> None:
    launch, world, held = dist.environment(), None, []
    for argv in json.loads(sys.argv[2]):
        cfg = config.parse(argv, tasks.load).cfg
        world = world or dist.join(cfg, launch)
        prepared = train.prepare(cfg, world)
        optimizer, waited = prepared.job.optimizer, []
        if hasattr(optimizer, "zero"):
            optimizer.zero.register_step_post_hook(lambda *_, seen=waited: seen.append(phase.now[1]))
        train.fit(prepared)  # its last checkpoint is behind it
        mine = {
            "class": type(optimizer).__name__,
            "moments": sum(tensor.nbytes for tensor in moments(optimizer)),
            "live": live_bytes(),
            "waited": waited,
        }
        held.append(world.gather(mine))
        del prepared, optimizer
    if world.main:
        Path(sys.argv[1]).write_text(json.dumps(held))
    world.leave()


if __name__ == "__main__":
    main()
