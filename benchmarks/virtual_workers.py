#!/usr/bin/env python3
"""Measure what `virtual_workers=8` costs a step: the same forward passes with it and without,
interleaved.

python benchmarks/virtual_workers.py
    one process
torchrun --standalone --nproc_per_node=2 benchmarks/virtual_workers.py --only video       two

Ratios are of CPU time within a round, on the process that takes most.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that wait take CPU time, too

import reliability
import torch
from precision import NETWORKS

import tasks
import train
from engine import config, launch
from tools.machine.probe import endless

WORKERS = 8
PASSES = {"flatten": 8, "conv": 8, "video": 4, "act": 2}
"""Networks, and samples of a forward pass."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--only", choices=PASSES)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one measurement in a round")
    args = parser.parse_args()
    world = train.setup_distributed(config.parse(["har"], tasks.load).cfg)
    if world.main:
        print(
            f"\n| {world.size} processes, CPU ms a step | off | {WORKERS} workers | ratio | "
            "quartiles |"
        )
        print("|---|---:|---:|---:|---|")
    for name, samples in PASSES.items():
        if args.only not in (None, name):
            continue
        words = [each for each in NETWORKS[name] if not each.startswith("batch_size=")] + [
            f"batch_size={samples}"
        ]
        dealt = (
            [f"gradient_accumulation_steps={WORKERS // world.size}"],
            [f"virtual_workers={WORKERS}"],
        )
        ways = [endless(reliability.prepared(world, *words, *more)) for more in dealt]
        times: list[list[float]] = [[], []]
        count = 1
        for number in range(-1, args.rounds):
            for way in (0, 1) if number % 2 else (1, 0):
                began = time.process_time()
                for _ in range(count):
                    next(ways[way])
                took = torch.tensor(time.process_time() - began)
                took = max(world.gather(float(took)))
                if number >= 0:
                    times[way].append(took / count)
            if number < 0:
                count = max(1, round(args.seconds / took))
        ratios = [b / a for a, b in zip(*times, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        if world.main:
            ms = " | ".join(f"{1e3 * statistics.median(each):.2f}" for each in times)
            print(f"| {name} | {ms} | {middle:.3f} | {low:.3f} .. {high:.3f} |", flush=True)
        del ways
    launch.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
