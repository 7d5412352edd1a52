"""CosineAnnealingWarmRestarts, stepped once per step."""

from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts

from tests.tasks.ports import base


class Task(base.Task):
    defaults = base.WITHOUT_SCHEDULE

    def scheduler(self, optimizer):
        return CosineAnnealingWarmRestarts(optimizer, T_0=3, T_mult=2, eta_min=1e-3)


def plain():
    model = base.seeded()
    optimizer = base.sgd(model)
    scheduler = CosineAnnealingWarmRestarts(optimizer, T_0=3, T_mult=2, eta_min=1e-3)
    for step in base.steps():
        base.take(optimizer, cross_entropy(model(step.x), step.y))
        scheduler.step()
    return model.state_dict()
