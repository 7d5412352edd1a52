"""The first layer is frozen from the second epoch on."""

from torch.nn.functional import cross_entropy

from tests.tasks.ports import base


class Task(base.Task):
    turns = {"all": ("0", "2"), "head": ("2",)}

    def turn(self, step, epoch):
        return "all" if epoch < 1 else "head"


def plain():
    model = base.seeded()
    optimizer = base.sgd(model)
    for step in base.steps():
        model[0].requires_grad_(step.epoch < 1)
        base.take(optimizer, cross_entropy(model(step.x), step.y))
    return model.state_dict()
