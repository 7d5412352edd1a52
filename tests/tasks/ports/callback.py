"""A function after each evaluation that ends the training."""

from torch.nn.functional import cross_entropy

from tests.tasks.ports import base

GOOD = 1.03
"""Reached after the second epoch of three."""


class Task(base.Task):
    def after_evaluation(self, metrics):
        return "the loss is good enough" if metrics["loss"] < GOOD else None


def plain():
    model = base.seeded()
    optimizer = base.sgd(model)
    for step in base.steps():
        base.take(optimizer, cross_entropy(model(step.x), step.y))
        if (step.number + 1) % 4 == 0 and base.validation_loss(model) < GOOD:
            break
    return model.state_dict()
