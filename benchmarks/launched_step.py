#!/usr/bin/env python3
"""Measure the host's time of a recorded step: all that Lockstep does around the launches of CUDA
graphs. No GPU is needed: tests/kit/recording.py stands in for the graphs, and a launch does nothing
after the first.

python benchmarks/launched_step.py                                      the perceptron of har
python benchmarks/launched_step.py har virtual_workers=4 batch_size=16  another training

Prints the time of the training's thread in a step in microseconds, the smallest and the median of
ten groups of steps, and the part in which the CPU copies the batch: a GPU copies by itself. The
time of the data loader is left out.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import timeit
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.kit import recording

recording.install()

import torch  # noqa: E402

import train  # noqa: E402
from plugins.performance import cuda_graph  # noqa: E402

PERCEPTRON = ["har", "model.mode=flatten", "optim.ema_decay=0.99"]
ALONE = ["augment.enabled=false", "drop_last=true", "amp=off", "threads=1", "cuda_graph=true"]
RARELY = ["eval_every=1000000", "log_every=50", "check_every=0"]

FIRST, GROUP, GROUPS = 20, 50, 10
"""Steps that are not counted; steps of a group; groups."""


class EmptyGraph(recording.Graph):
    """A graph whose launches do nothing after the first."""

    has_run = False

    def replay(self) -> None:
        if not self.has_run:
            self.has_run = True
            super().replay()


class Timed(cuda_graph.StepGraph):
    """Steps whose CPU time is taken, without the comparisons at powers of two after the first."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.seconds: list[float] = []
        steps.append(self)

    def __call__(self, run: Any, passes: Any) -> Any:
        pairs = [*passes]
        if self.recorded is not None:
            self.recorded.totals[0].zero_()  # a vote that a launched pass would replace
        begin = time.thread_time()
        due = super().__call__(run, pairs)
        self.seconds.append(time.thread_time() - begin)
        return due


steps: list[Timed] = []


def copy_time(tensors: list[torch.Tensor]) -> float:
    """Return the microseconds of a copy of a batch."""
    copies = [*map(torch.clone, tensors)]
    copy = partial(torch._foreach_copy_, tensors, copies)
    times = timeit.repeat(copy, number=GROUP, repeat=GROUPS)
    return 1e6 * min(times) / GROUP


def main(argv: list[str]) -> int:
    """Train, and print the time of a step."""
    torch.cuda.CUDAGraph = EmptyGraph  # type: ignore[misc, assignment]
    cuda_graph.StepGraph = Timed  # type: ignore[misc]
    cuda_graph._is_power_of_two = lambda number: number == 1
    cuda_graph._difference = lambda *outcomes: ""
    words = [*(argv or PERCEPTRON), *ALONE, *RARELY, f"steps={FIRST + GROUP * GROUPS}"]
    with tempfile.TemporaryDirectory() as folder:
        code = train.main([*words, f"save_dir={folder}"])
    counted = steps[0].seconds[FIRST:]
    groups = [1e6 * sum(counted[at : at + GROUP]) / GROUP for at in range(0, len(counted), GROUP)]
    copies = copy_time(steps[0].inputs.leaves)
    least, median = min(groups), statistics.median(groups)
    print(
        f"host time of a launched step: {least:.0f} us at least, {median:.0f} us in the median of "
        f"{len(groups)} groups of {GROUP} steps; {copies:.0f} us of them copy the batch"
    )
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
