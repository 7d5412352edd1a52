"""Run under torchrun: a training, and how often each rank calls its model in each phase, as a line of JSON per rank in
the file COUNTS.rank.

    torchrun ... forwards.py task ... (the environment has COUNTS)
"""

import atexit
import json
import os
import sys
from collections import Counter

from torch import nn

import train
from engine.phases import phase
from engine.run import Run

counts: Counter[str] = Counter()
built, path = Run.__post_init__, f"{os.environ['COUNTS']}.{os.environ.get('RANK', '0')}"


def count_forwards(run: Run) -> None:
    """Once the parts of the run are made: count from here on, and keep what was counted after each step."""
    built(run)
    run.model.register_forward_pre_hook(lambda module, given: counts.update([f"{phase.name} {phase.step}"]))


def keep() -> None:
    with open(path, "a") as file:
        file.write(json.dumps(counts) + "\n")


Run.__post_init__ = count_forwards
atexit.register(keep)
assert nn.Module  # the hook is torch's
sys.exit(train.main(sys.argv[1:]))
