#!/usr/bin/env python3
"""Measure what the digest of the weights in the log costs: CPU time of a digest ÷ that of the steps
before it.

python benchmarks/digest.py
    the shipped tasks; the perceptron is the worst case
python benchmarks/digest.py robot policy.type=act --rounds 20       any training

A round takes the steps from one digest to the next (`digest_every`), and then the digest; medians
and quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from functools import partial
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train
from engine import config, errors
from engine.comm import digests
from engine.comm.world import World
from plugins.resilience import status
from plugins.resilience.signals import StopRequest
from tools.machine.probe import endless
from tools.running import guarded, in_world

SHIPPED = [["har", "--mode", "flatten"], ["har"], ["video"], ["robot"]]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    asked, words = parser.parse_known_args(argv)
    print(
        "| training | numbers | ms of a digest | ms of a step | every | digest ÷ steps "
        "(quartiles) |"
    )
    print("|---|---:|---:|---:|---:|---:|")
    for each in [words] if words else SHIPPED:
        code = guarded(each, partial(of_training, " ".join(each), asked.rounds))
        if code:
            return code
    return 0


def of_training(name: str, rounds: int, args: config.Args) -> int:
    def measured(world: World, stop: StopRequest) -> None:
        run, every = train.build(args, world, stop), max(args.cfg.digest_every, 1)
        steps, found = endless(run), []
        for _ in islice(steps, 5):
            pass
        digests.digest(run.model.parameters())
        for _ in range(rounds):
            began = time.process_time()
            for _ in islice(steps, every):
                pass
            stepped = time.process_time()
            digests.digest(run.model.parameters())
            found.append((time.process_time() - stepped, stepped - began))
        quarters = statistics.quantiles([digest / steps for digest, steps in found], n=4)
        digest_s, steps_s = (statistics.median(times) for times in zip(*found, strict=True))
        low, middle, high = (f"{100 * share:.2f}" for share in quarters)
        count = sum(p.numel() for p in run.model.parameters())
        times = f"{1e3 * digest_s:.3f} | {1e3 * steps_s / every:.2f} | {every}"
        print(f"| {name} | {count:,} | {times} | {middle} % ({low} .. {high}) |", file=sys.stderr)

    in_world(args.cfg, measured)
    return status.set_exit_code(errors.DONE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
