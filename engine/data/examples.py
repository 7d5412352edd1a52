"""Samples as a batch for trials: the same samples on all ranks, fetched by this process.

No step and no evaluation counts these batches.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.contract import Batch, BatchInfo, StepInfo
from engine.data.ahead import to_device
from engine.data.batches import attach_info
from engine.phases import Phase, phase
from engine.seeds import sample_seeds


class ObservedStep(StepInfo):
    """The numbers of a StepInfo; `on_read` is called with the name of each number that is read."""

    def __init__(self, info: StepInfo, on_read: Callable[[str], Any]):
        vars(self).update(vars(info), on_read=on_read)

    def __getattribute__(self, name: str) -> Any:
        if name in StepInfo.__dataclass_fields__:
            self.on_read(name)
        return super().__getattribute__(name)


class TrainExamples:
    """The examples of data_loader.TrainLoader, prepared as in a step.

    example_step  the step that the examples belong to; None: the first step of the run
    turn          the task's function, if it has turns
    """

    turn: Any = None
    example_step: StepInfo | None = None

    def step_info(self: Any, micros: list[Any]) -> StepInfo:
        """Return the step of a pass. The StepInfo of several passes cannot be read."""
        if len(micros) > 1:
            return self.cached.several_steps
        return self.step_info_at(micros[0].step, self.sampler.epoch)

    def step_info_at(self: Any, step: int, epoch: int) -> StepInfo:
        """Return the place in the run of optimizer step `step`."""
        turn = self.turn(step, epoch) if self.turn else ""
        return self.sampler.plan.step_info(step, epoch, turn)

    def example(self: Any, end: int = sys.maxsize, begin: int = 0, least: int = 1) -> Batch:
        """Return samples `begin` to `end` of the epoch, at most a pass or `least` samples."""
        plan = self.sampler.plan
        end = min(end, max(least, plan.micro_batch))
        with phase.during(Phase.DATA_LOADING):
            return self.prepared(*self.unprepared(slice(begin, end)))

    def unprepared(self: Any, positions: slice) -> tuple[list[Any], Batch, Tensor, StepInfo]:
        """Return the arguments of `prepared` for these positions of the epoch's order, without the
        excluded samples."""
        sampler = self.sampler
        included = itertools.islice(sampler.iter_included(), positions.start, positions.stop)
        pairs = np.array([each[1:] for each in included], dtype=np.int64).reshape(-1, 2)
        order, drawn = pairs.T.copy()
        seeds = sampler.seeds_at(drawn) if sampler.seeded else None
        micro = next(iter(sampler))._replace(indices=order.tolist(), seeds=seeds)
        batch = None
        if self.cached is None:
            batch = to_device(self.source.get(micro), self.device)
        step = self.example_step or self.step_info_at(0, 0)
        return [micro], batch, self.numbers_of(order, drawn), step


class EvalExamples:
    """The examples of data_loader.EvalLoader.

    step_info  the place of the evaluation in the run
    """

    step_info: StepInfo = StepInfo()

    def example(self: Any, end: int, begin: int = 0, least: int = 1) -> Batch:
        """Return samples `begin` to `end` of the split's first batch."""
        end = min(end, self.sampler.batch_size, self.sampler.num_samples)
        request = self.source.request([*range(begin, end)])
        index = to_device(torch.tensor(request.indices), self.device)
        info = BatchInfo(index, index, sample_seeds(0, 0, index), step_info=self.step_info)
        return attach_info(to_device(self.source.get(request), self.device), info)
