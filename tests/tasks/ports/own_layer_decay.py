"""Layer-wise rates in groups of one's own."""

import torch
from torch.nn.functional import cross_entropy

from tests.tasks.ports import base


def groups(model):
    return [{"params": [*layer.parameters()], "lr": base.LR * 0.5 ** (1 - n)} for n, layer in enumerate(model[::2])]


class Task(base.Task):
    defaults = base.WITHOUT_OPTIMIZER

    def optimizer(self, model):
        return torch.optim.Adam(groups(model), lr=base.LR)


def plain():
    model = base.seeded()
    optimizer = torch.optim.Adam(groups(model))
    for step in base.steps():
        base.take(optimizer, cross_entropy(model(step.x), step.y))
    return model.state_dict()
