#!/usr/bin/env python3
"""Train with DDP as the subject: a process group always, a world of one included, and a preflight before step one.

torchrun --standalone --nproc_per_node=2 train_ddp.py --config configs/har.yaml lr=4e-3 ddp.bucket_cap_mb=50
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import torch

import train
from engine import config, dist, folder, loop
from engine.contract import LockstepError


def main(argv: list[str]) -> int:
    """Refuses what train.py would adapt to, and says what to change."""
    return train.guarded(argv, _main)


def _main(asked: config.Asked) -> int:
    cfg = asked.cfg
    if cfg.multi_gpu == "dp":
        raise LockstepError(
            "train_ddp.py has no DataParallel",
            where="multi_gpu",
            todo="use `python train.py --multi-gpu dp`, or drop it",
        )
    warning = dist.forgotten_launch()
    if warning:
        raise LockstepError(warning, where="environment", todo="or use train.py, which adapts")
    world = dist.join(cfg, dist.environment(), always=True)
    prepared = train.prepare(cfg, world, strict=True)
    preflight(prepared, world)
    if not asked.dry_run:
        train.fit(prepared)
    del prepared  # and DDP with it, before its process group
    world.leave()
    return 0


def preflight(prepared: train.Prepared, world: dist.World) -> None:
    """(all ranks) Agree on config, versions, data and weights, and see one all-reduce come out right."""
    job = prepared.job
    facts = {
        "config": _digest(config.to_yaml(job.cfg)),
        "code": _digest(str(folder.environment(world)["git_commit"])),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "training samples": str(job.plan.num_samples),
        "parameters": loop.checksum(job.model)[:12],
    }
    everyone = world.gather(facts)
    for rank, theirs in enumerate(everyone):
        for name, value in theirs.items():
            if value != everyone[0][name]:
                error = LockstepError(
                    f"rank {rank} differs from rank 0 in {name}: {value} instead of {everyone[0][name]}",
                    where="preflight",
                    todo="start the same code, config and data on all of them",
                    exit_code=6,
                )
                error.everywhere = True
                raise error
    total = torch.tensor(float(world.rank), device=world.device)
    world.sum(total)
    expected = world.size * (world.size - 1) / 2
    if total.item() != expected:
        raise LockstepError(
            f"an all-reduce over {world.size} ranks gave {total.item()} instead of {expected}",
            where="preflight",
            todo="check the network and the backend",
            exit_code=6,
        )
    if world.main:
        print(f"Preflight: {world.size} rank(s) agree on {', '.join(facts)}; all-reduce is right\n", flush=True)


def _digest(text: Any) -> str:
    return hashlib.sha256(str(text).encode()).hexdigest()[:12]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
