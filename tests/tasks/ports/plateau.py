"""ReduceLROnPlateau after each epoch. The threshold is such that each evaluation but the first is on a plateau."""

from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tests.tasks.ports import base

RULES = {"factor": 0.3, "patience": 0, "threshold": 0.9}


class Task(base.Task):
    defaults = base.WITHOUT_SCHEDULE

    def scheduler(self, optimizer):
        return ReduceLROnPlateau(optimizer, **RULES)


def plain():
    model = base.seeded()
    optimizer = base.sgd(model)
    scheduler = ReduceLROnPlateau(optimizer, **RULES)
    for step in base.steps():
        base.take(optimizer, cross_entropy(model(step.x), step.y))
        if (step.number + 1) % 4 == 0:
            scheduler.step(base.validation_loss(model))
    return model.state_dict()
