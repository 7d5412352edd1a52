"""Run under torchrun (or plain): several trainings in one process group, in float64, each from its own argv.

    torchrun ... many.py '[["har", "--epochs", "1", ...], ...]'

A run whose argv begins with "naive" takes the steps of the tutorials instead: the mean of each micro-batch, divided by
the number of micro-batches, averaged over the ranks by DDP. It shares everything else.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import tasks
import train
from engine import config, launch
from engine.comm import digests
from engine.report.open_log import open_log


def naive_epoch(run):
    """The loop of the tutorials, with Lockstep's batches."""
    run.optimizer.zero_grad()
    run.loaders.train.set_epoch(0)
    for batch, micro in run.loaders.train.passes():
        ddp_waits = isinstance(run.net, DistributedDataParallel) and not micro.closes_step
        with run.net.no_sync() if ddp_waits else nullcontext():
            batch["lockstep"].mean_weight = None  # the tutorials' mean is of the micro-batch
            loss = run.task.loss(run.net, batch)
            (loss.total / loss.weight / run.plan.accumulation).backward()
        if micro.closes_step:
            run.optimizer.step()
            run.progress.step, run.progress.position = run.progress.step + 1, micro.consumed
            run.optimizer.zero_grad()
            if run.progress.step == run.plan.total_steps:
                return


def main() -> None:
    torch.set_default_dtype(torch.float64)
    world = None
    for argv in json.loads(sys.argv[1]):
        naive = argv[0] == "naive"
        args = config.parse(argv[1:] if naive else argv, tasks.load)
        world = world or train.setup_distributed(args.cfg)
        run = train.build(args, world)
        if naive:
            naive_epoch(run)
            if world.main:
                Path(run.cfg.save_dir).mkdir(parents=True)
                torch.save({"model": run.model.state_dict()}, Path(run.cfg.save_dir) / "last.pt")
        else:
            with open_log(run):
                train.train(run)
        checksums = world.gather(digests.as_text(run.sum_of_bits()))
        assert len(set(checksums)) == 1, "the ranks' weights differ"
    del run  # and DDP with it, before its process group
    launch.leave()


if __name__ == "__main__":
    main()
