"""Lookahead: every fifth step the weights return half way to the slow weights."""

import torch
from torch.nn.functional import cross_entropy

from tests.tasks.ports import base

EVERY = 5


class Lookahead(torch.optim.SGD):
    """All state is in `self.state[p]` and in the group, and none in an optimizer inside."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.param_groups[0]["steps"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        for p in group["params"]:
            if "slow" not in self.state[p]:
                self.state[p]["slow"] = p.clone()
        super().step()
        group["steps"] += 1
        if group["steps"] % EVERY == 0:
            for p in group["params"]:
                p.copy_(self.state[p]["slow"].lerp_(p, 0.5))


class Task(base.Task):
    defaults = base.WITHOUT_OPTIMIZER

    def optimizer(self, model):
        return Lookahead(model.parameters(), lr=base.LR, momentum=base.MOMENTUM)


def plain():
    model = base.seeded()
    slow = [p.detach().clone() for p in model.parameters()]
    optimizer = base.sgd(model)
    for step in base.steps():
        base.take(optimizer, cross_entropy(model(step.x), step.y))
        if (step.number + 1) % EVERY == 0:
            with torch.no_grad():
                for average, p in zip(slow, model.parameters(), strict=True):
                    p.copy_(average.lerp_(p, 0.5))
    return model.state_dict()
