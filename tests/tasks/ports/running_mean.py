"""A running mean of the inputs, which the loop of people keeps in a buffer with persistent=False."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from engine.contract import Loss, Sums
from tests.tasks.ports import base


class Centred(nn.Module):
    """The network of people."""

    def __init__(self):
        super().__init__()
        self.net = base.network()
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64), persistent=False)

    def forward(self, x):
        logits = self.net(x - self.mean)
        self.mean = 0.8 * self.mean + 0.2 * x.mean(0)
        return logits


class Task(base.Task):
    state_attributes = ("mean",)

    def model(self):
        self.mean = torch.zeros(6, dtype=torch.float64)
        return super().model()

    def loss(self, net, batch):
        x = batch["x"]
        sums = {"x": x.sum(0), "count": x.new_tensor(len(x))}
        return Loss(base.cross_entropy(net(x - self.mean), batch["y"]), len(x), for_state=sums)

    def after_step(self, model, step):
        self.mean = 0.8 * self.mean + 0.2 * self.step_sums["x"] / self.step_sums["count"]

    def score(self, model, batch):
        losses = base.cross_entropy(model(batch["x"] - self.mean), batch["y"])
        return Sums(loss=losses, count=torch.tensor(len(batch["y"])))


def plain():
    model = base.seeded(Centred)
    optimizer = base.sgd(model)
    for step in base.steps():
        base.take(optimizer, cross_entropy(model(step.x), step.y))
    return model.net.state_dict()
