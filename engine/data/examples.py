"""Samples as a batch for trials: the same samples on all ranks, fetched by this process.

No step and no evaluation counts these batches.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.contract import Batch, BatchInfo
from engine.data.ahead import to_device
from engine.data.batches import attach_info
from engine.phases import Phase, phase
from engine.seeds import sample_seeds


class TrainExamples:
    """The examples of data_loader.TrainLoader, prepared as in a step."""

    def example(self: Any, end: int = sys.maxsize, begin: int = 0, least: int = 1) -> Batch:
        """Return samples `begin` to `end` of the epoch, at most a pass or `least` samples."""
        plan = self.sampler.plan
        end = min(end, max(least, plan.micro_batch))
        with phase.during(Phase.DATA_LOADING):
            return self.prepared(*self.unprepared(slice(begin, end)))

    def unprepared(self: Any, positions: slice) -> tuple[list[Any], Batch, Tensor]:
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
        return [micro], batch, self.numbers_of(order, drawn)


class EvalExamples:
    """The examples of data_loader.EvalLoader."""

    def example(self: Any, end: int, begin: int = 0, least: int = 1) -> Batch:
        """Return samples `begin` to `end` of the split's first batch."""
        end = min(end, self.sampler.batch_size, self.sampler.num_samples)
        request = self.source.request([*range(begin, end)])
        index = to_device(torch.tensor(request.indices), self.device)
        info = BatchInfo(index, index, sample_seeds(0, 0, index))
        return attach_info(to_device(self.source.get(request), self.device), info)
