"""Mean teacher: the answers for noisy inputs are near the answers of an average of the weights."""

import copy

import torch
from torch.nn.functional import cross_entropy

from engine.contract import Loss, uniform
from tests.tasks.ports import base


def noisy(x, seeds):
    return x + 0.1 * uniform(seeds, 6)


class Task(base.Task):
    state_attributes = ("teacher",)

    def model(self):
        net = super().model()
        self.teacher = copy.deepcopy(net).requires_grad_(False)
        return net

    def loss(self, net, batch):
        logits = net(noisy(batch["x"], batch["lockstep"].seed))
        distance = (logits - self.teacher(batch["x"])).square().sum()
        return Loss(base.cross_entropy(logits, batch["y"]) + distance, len(logits))

    def after_step(self, model, step):
        for average, p in zip(self.teacher.parameters(), model.parameters(), strict=True):
            average.lerp_(p, 0.1)


def plain():
    model = base.seeded()
    teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer = base.sgd(model)
    for step in base.steps():
        logits = model(noisy(step.x, step.seeds))
        distance = (logits - teacher(step.x)).square().sum(1).mean()
        base.take(optimizer, cross_entropy(logits, step.y) + distance)
        with torch.no_grad():
            for average, p in zip(teacher.parameters(), model.parameters(), strict=True):
                average.lerp_(p, 0.1)
    return model.state_dict()
