"""Lets virtual workers move at log points to deals that no measurement has chosen: a test of bits must not depend on
times."""

import itertools
import random

from plugins.parallel import shares


def counts_of_move(deals, times):
    """Numbers of workers that follow from the number of moves alone, at least one for each process."""
    print("workers move", flush=True)
    draw = random.Random(len(deals.begins))
    ends = [0, *sorted(draw.sample(range(1, deals.workers), len(times) - 1)), deals.workers]
    return [end - begin for begin, end in itertools.pairwise(ends)]


def install():
    """With ddp.shares=auto, move workers at every second log point."""
    shares.Balance.ENOUGH_S = 0.0
    shares.Balance._gains = lambda *arguments: True
    shares.fastest_counts = counts_of_move
