"""Run under torchrun (or plain): several trainings in one process group, each from its own argv. A
run that all ranks refuse together is not the end. Rank 0 writes a line of JSON for each run into a
file: the digest of the weights, what the ranks refused, and how often each collective of FSDP2 was
entered in training.

    torchrun ... repeated.py FILE '[["tests/tasks/repeated.py", "model.kind=twice", ...], ...]'
"""

import json
import sys
from collections import Counter

import torch

import tasks
import train
from engine import config, launch
from engine.comm import digests
from engine.errors import LockstepError
from engine.phases import phase
from engine.report.open_log import open_log

entered: Counter[str] = Counter()
phase.listeners.append(lambda name: entered.update([name]))


def outcome(args, world):
    entered.clear()
    try:
        run = train.build(args, world)
        before = Counter(entered)
        with open_log(run):
            train.train(run)
    except LockstepError as error:
        return {"refused": str(error)}
    return {"digest": digests.as_text(run.sum_of_bits()), "reduced": (entered - before)["reduce_scatter"]}


def main() -> None:
    torch.set_default_dtype(torch.float64)
    file, runs = sys.argv[1], json.loads(sys.argv[2])
    world = None
    for argv in runs:
        args = config.parse(argv, tasks.load)
        world = world or train.setup_distributed(args.cfg)
        everyone = world.gather(outcome(args, world))
        if world.main:
            with open(file, "a") as lines:
                lines.write(json.dumps(everyone) + "\n")
    launch.leave()


if __name__ == "__main__":
    main()
