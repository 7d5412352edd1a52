"""A target network: values of the next state come from a copy of the weights that is four steps old at most."""

import copy

import torch

from engine.contract import Loss, Sums
from tests.tasks.ports import base


def errors(values, x, y, target):
    """(B,) errors of the values of the actions y; the next state is a turned x, the reward a part of x."""
    best = target(x.roll(1, 1)).max(1).values
    return (values.gather(1, y[:, None])[:, 0] - x[:, 0] - 0.9 * best).square()


class Task(base.Task):
    state_attributes = ("target",)

    def model(self):
        net = super().model()
        self.target = copy.deepcopy(net).requires_grad_(False)
        return net

    def loss(self, net, batch):
        return Loss(errors(net(batch["x"]), **inputs(batch), target=self.target).sum(), len(batch["x"]))

    def after_step(self, model, step):
        if (step + 1) % 4 == 0:
            self.target.load_state_dict(model.state_dict())

    def score(self, model, batch):
        total = errors(model(batch["x"]), **inputs(batch), target=self.target).sum()
        return Sums(loss=total, count=torch.tensor(len(batch["x"])))


def inputs(batch):
    return {"x": batch["x"], "y": batch["y"]}


def plain():
    model = base.seeded()
    target = copy.deepcopy(model).requires_grad_(False)
    optimizer = base.sgd(model)
    for step in base.steps():
        base.take(optimizer, errors(model(step.x), step.x, step.y, target).mean())
        if (step.number + 1) % 4 == 0:
            target.load_state_dict(model.state_dict())
    return model.state_dict()
