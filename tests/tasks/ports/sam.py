"""Sharpness-aware minimisation: the gradient at weights that one gradient of the same batch has moved uphill.

A step of the loop is two steps of the engine with the same global batch: the order of the data has each batch twice.
"""

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from tests.tasks.ports import base

RHO = 0.05


class SAM(torch.optim.SGD):
    """Every second step returns from the point uphill, and takes the step of SGD with the gradient of that point."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.param_groups[0]["uphill"] = False

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        if group["uphill"]:
            for p in group["params"]:
                p.sub_(self.state[p]["ascent"])
            super().step()
        else:
            norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
            for p in group["params"]:
                self.state[p]["ascent"] = p.grad * (RHO / norm)
                p.add_(self.state[p]["ascent"])
        group["uphill"] = not group["uphill"]


class Twice(base.Rows):
    """Each sample has two numbers, n and n + N."""

    def __len__(self):
        return 2 * len(self.x)

    def __getitems__(self, indices):
        return super().__getitems__([index % len(self.x) for index in indices])

    def epoch_order(self, seed, epoch):
        batches = np.random.default_rng((seed, epoch)).permutation(len(self.x)).reshape(-1, base.BATCH)
        return np.concatenate([batches, batches + len(self.x)], 1).ravel()


class Task(base.Task):
    defaults = base.WITHOUT_OPTIMIZER | {"steps": 2 * base.STEPS}

    def datasets(self):
        return Twice(base.SAMPLES, 0), base.Rows(20, 1)

    def optimizer(self, model):
        return SAM(model.parameters(), lr=base.LR, momentum=base.MOMENTUM)


def plain():
    model = base.seeded()
    optimizer = base.sgd(model)
    parameters = [*model.parameters()]
    for step in base.steps():
        optimizer.zero_grad()
        cross_entropy(model(step.x), step.y).backward()
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        ascents = [p.grad * (RHO / norm) for p in parameters]
        with torch.no_grad():
            torch._foreach_add_(parameters, ascents)
        optimizer.zero_grad()
        cross_entropy(model(step.x), step.y).backward()
        with torch.no_grad():
            torch._foreach_sub_(parameters, ascents)
        optimizer.step()
    return model.state_dict()
