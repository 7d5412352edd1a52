#!/usr/bin/env python3
"""Train with DDP as the subject: a process group always, a world of one included, and a preflight before step one.

torchrun --standalone --nproc_per_node=2 train_ddp.py --config configs/har.yaml lr=4e-3 ddp.bucket_cap_mb=50
"""

from __future__ import annotations

import sys

import train
from engine import config, dist, terminal
from engine.contract import LockstepError


def main(argv: list[str]) -> int:
    """Refuses what train.py would adapt to, and says what to change."""
    terminal.outlive()
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
    return train.work(asked, dist.join(cfg, dist.environment(), always=True), strict=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
