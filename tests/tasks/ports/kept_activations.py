"""Activations kept between steps: the features of a sample are drawn to the mean features of the step before."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from engine.contract import Loss, Sums
from tests.tasks.ports import base


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        features = self.body(x).tanh()
        return self.head(features), features


class Task(base.Task):
    state_attributes = ("last",)

    def model(self):
        self.last = torch.zeros(5, dtype=torch.float64)
        return Net().double()

    def loss(self, net, batch):
        logits, features = net(batch["x"])
        distance = (features - self.last).square().sum()
        sums = {"features": features.sum(0), "count": features.new_tensor(len(features))}
        return Loss(base.cross_entropy(logits, batch["y"]) + distance, len(logits), for_state=sums)

    def after_step(self, model, step):
        self.last = self.step_sums["features"] / self.step_sums["count"]

    def score(self, model, batch):
        logits, _ = model(batch["x"])
        return Sums(loss=base.cross_entropy(logits, batch["y"]), count=torch.tensor(len(logits)))


def plain():
    model = base.seeded(lambda: Net().double())
    last = torch.zeros(5, dtype=torch.float64)
    optimizer = base.sgd(model)
    for step in base.steps():
        logits, features = model(step.x)
        distance = (features - last).square().sum(1).mean()
        base.take(optimizer, cross_entropy(logits, step.y) + distance)
        last = features.detach().mean(0)
    return model.state_dict()
