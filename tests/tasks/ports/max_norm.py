"""`nn.Embedding(max_norm=1)`: torch shortens the rows in the forward pass, the port after the step."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.tasks.ports import base

LENGTH = 1.0


class Words(nn.Module):
    def __init__(self, max_norm=None):
        super().__init__()
        self.words, self.head = nn.Embedding(9, 4, max_norm=max_norm), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.words((x.abs() * 4).long().clamp(max=8)).mean(1))


@torch.no_grad()
def shorten(weight):
    norm = weight.norm(dim=1, keepdim=True)
    weight.mul_(torch.where(norm > LENGTH, LENGTH / (norm + 1e-7), 1.0))


class Task(base.Task):
    defaults = base.Task.defaults | {"optim.momentum": 0.0}

    def model(self):
        net = Words().double()
        shorten(net.words.weight)
        return net

    def after_step(self, model, step):
        shorten(model.words.weight)


def plain():
    model = base.seeded(lambda: Words(LENGTH).double())
    optimizer = base.sgd(model, momentum=0.0)
    for step in base.steps():
        base.take(optimizer, cross_entropy(model(step.x), step.y))
    shorten(model.words.weight)  # as the next forward pass does
    return model.state_dict()
