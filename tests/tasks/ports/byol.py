"""BYOL: a predictor of the features that an average of the encoder gives for the other view. No labels."""

import copy

import torch
from torch import nn
from torch.nn.functional import cosine_similarity

from engine.contract import Loss, Sums, uniform
from tests.tasks.ports import base


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = base.network()
        self.predictor = nn.Linear(3, 3).double()

    def forward(self, x):
        return self.predictor(self.encoder(x))


def views(x, seeds):
    first, second = (0.2 * uniform(seeds, 12)).chunk(2, 1)
    return torch.cat([x + first, x + second])


def distances(student, target):
    """(2 B,) for the outputs of both views, each beside the target of the other view."""
    first, second = target.detach().chunk(2)
    return 2 - 2 * cosine_similarity(student, torch.cat([second, first]), dim=1)


class Task(base.Task):
    state_attributes = ("target",)

    def model(self):
        net = Student()
        self.target = copy.deepcopy(net.encoder).requires_grad_(False)
        return net

    def loss(self, net, batch):
        both = views(batch["x"], batch["lockstep"].seed)
        return Loss(distances(net(both), self.target(both)).sum(), len(batch["x"]))

    def after_step(self, model, step):
        for average, p in zip(self.target.parameters(), model.encoder.parameters(), strict=True):
            average.lerp_(p, 0.05)

    def score(self, model, batch):
        both = torch.cat([batch["x"], batch["x"]])
        return Sums(loss=distances(model(both), self.target(both)).sum(), count=torch.tensor(len(batch["x"])))


def plain():
    model = base.seeded(Student)
    target = copy.deepcopy(model.encoder).requires_grad_(False)
    optimizer = base.sgd(model)
    for step in base.steps():
        both = views(step.x, step.seeds)
        base.take(optimizer, 2 * distances(model(both), target(both)).mean())
        with torch.no_grad():
            for average, p in zip(target.parameters(), model.encoder.parameters(), strict=True):
                average.lerp_(p, 0.05)
    return model.state_dict()
