"""Loaders of all ranks of a training in this process, and the steps that they take."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from data_loader import TrainSampler, create_data_loaders
from engine import config, plan
from engine.comm.world import World

LABELS = np.repeat([0, 1, 2], [40, 15, 6])
"""Of 61 samples."""


class Rows(torch.utils.data.Dataset):
    """The dataset of the tutorials: ten samples, one at a time, no labels."""

    def __len__(self):
        return 10

    def __getitem__(self, i):
        return {"x": torch.tensor(i * 10)}


def world(rank=0, size=1):
    return World(rank, rank, size, torch.device("cpu"))


def make_plan(num_samples, size=1, *, batch=3, accumulation=1, drop_last=False, global_batch=0):
    words = {"batch_size": batch, "gradient_accumulation_steps": accumulation}
    cfg = config.Config(**words, drop_last=drop_last, global_batch=global_batch)
    return plan.make_plan(cfg, world(size=size), num_samples)


def loaders_of(dataset, workers=0, epoch=0, **more):
    """(train, val) of one rank, both of this dataset, four samples a batch."""
    words = {"batch_size": 4, "seed": 9, "num_workers": workers} | more
    the_plan = make_plan(len(dataset), batch=4)
    train, val = create_data_loaders(config.Config(**words), world(), the_plan, dataset, dataset)
    train.set_epoch(epoch)
    return train, val


def epoch_of(the_plan, *, epoch=0, position=0, seed=5, labels=None):
    """[[MicroBatch, ...] of rank 0, of rank 1, ...]."""
    ranks = []
    for rank in range(the_plan.processes):
        sampler = TrainSampler(range(the_plan.num_samples), the_plan, rank, seed, labels)
        sampler.set_epoch(epoch)
        sampler.position = position
        ranks.append(list(sampler))
        assert len(sampler) == len(ranks[-1])
    return ranks


def places_of(micro):
    return range(micro.positions.start, micro.positions.stop, micro.positions.step or 1)


def steps_of(ranks):
    """The samples of each optimizer step, as sets of (position, index), empty passes left out."""
    steps = []
    for micros in ranks:
        assert len(micros) == len(ranks[0]), "ranks that take part a different number of times hang"
        step = 0
        for micro in micros:
            while len(steps) <= step:
                steps.append([])
            assert micro.indices, "networks may not take a batch of nothing"
            if not micro.empty:
                steps[step] += zip(places_of(micro), micro.indices, strict=True)
            step += micro.closes_step
    return [sorted(step) for step in steps]


def loaded_steps(make: Callable[[], Any], key: str, size: int, epoch: int, done: int, **words) -> dict[int, list]:
    """{step: sorted (position, sample)} of the loaders of all ranks, from the step `done` of an epoch on.

    make  returns the dataset of a rank
    key   the part of a batch that is the number of a sample
    """
    found = collections.defaultdict(list)
    cfg = config.changed(config.Config(), words)
    for rank in range(size):
        dataset = make()
        the_plan = plan.make_plan(cfg, world(rank, size), len(dataset))
        loader, _ = create_data_loaders(cfg, world(rank, size), the_plan, dataset, None)
        loader.set_epoch(epoch, the_plan.global_batch * done)
        for number, step in enumerate(loader, done):
            for batch, micro in step:
                if not micro.empty:
                    assert batch["lockstep"].index.tolist() == batch[key].tolist()
                    found[number] += zip(batch["lockstep"].position.tolist(), batch[key].tolist(), strict=True)
    return {number: sorted(each) for number, each in found.items()}
