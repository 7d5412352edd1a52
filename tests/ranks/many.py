"""Run under torchrun (or plain): several trainings in one process group, in float64, each from its own argv.

    torchrun ... many.py '[["har", "--epochs", "1", ...], ...]'

A run whose argv begins with "naive" takes the steps of the tutorials instead: the mean of each micro-batch, divided by
the number of micro-batches, averaged over the ranks by DDP. It shares everything else.
"""

import json
import sys
from pathlib import Path

import torch

import tasks
import train
from engine import config, dist, loop


def naive_epoch(job, loader):
    """The loop of the tutorials, with Lockstep's batches."""
    job.optimizer.zero_grad()
    for batch, micro in loader:
        with job.world.accumulate(job.net, micro.closes_step):
            batch.pop("mean_weight", None)  # the tutorials' mean is of the micro-batch
            loss = job.task.loss(job.net, batch)
            (loss.total / loss.weight / job.plan.accumulation).backward()
        if micro.closes_step:
            job.optimizer.step()
            job.progress.step, job.progress.position = job.progress.step + 1, micro.consumed
            job.optimizer.zero_grad()


def main() -> None:
    torch.set_default_dtype(torch.float64)
    launch = dist.environment()
    world = None
    for argv in json.loads(sys.argv[1]):
        naive = argv[0] == "naive"
        cfg = config.parse(argv[1:] if naive else argv, tasks.load).cfg
        world = world or dist.join(cfg, launch)
        prepared = train.prepare(cfg, world)
        if naive:
            prepared.train_loader.set_epoch(0)
            naive_epoch(prepared.job, prepared.train_loader)
            if world.main:
                Path(cfg.save_dir).mkdir(parents=True)
                torch.save({"model": prepared.job.model.state_dict()}, Path(cfg.save_dir) / "last.pt")
        else:
            train.fit(prepared)
        checksums = world.gather(loop.checksum(prepared.job.model))
        assert len(set(checksums)) == 1, "the ranks' weights differ"
        del prepared
    world.leave()


if __name__ == "__main__":
    main()
