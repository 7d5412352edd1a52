"""OneCycleLR, which moves the momentum, too."""

from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR

from tests.tasks.ports import base


class Task(base.Task):
    defaults = base.WITHOUT_SCHEDULE

    def scheduler(self, optimizer):
        return OneCycleLR(optimizer, max_lr=0.2, total_steps=self.total_steps)


def plain():
    model = base.seeded()
    optimizer = base.sgd(model)
    scheduler = OneCycleLR(optimizer, max_lr=0.2, total_steps=base.STEPS)
    for step in base.steps():
        base.take(optimizer, cross_entropy(model(step.x), step.y))
        scheduler.step()
    return model.state_dict()
