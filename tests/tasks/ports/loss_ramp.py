"""A penalty that ramps up over the first eight steps."""

from torch.nn.functional import cross_entropy, log_softmax

from engine.contract import Loss
from tests.tasks.ports import base


def entropy(logits):
    """(B,) of each sample."""
    return -(logits.softmax(1) * log_softmax(logits, 1)).sum(1)


class Task(base.Task):
    def loss(self, net, batch):
        logits = net(batch["x"])
        ramp = min(1.0, batch["lockstep"].step / 8)
        return Loss(base.cross_entropy(logits, batch["y"]) + ramp * entropy(logits).sum(), len(logits))


def plain():
    model = base.seeded()
    optimizer = base.sgd(model)
    for step in base.steps():
        logits = model(step.x)
        ramp = min(1.0, step.number / 8)
        base.take(optimizer, cross_entropy(logits, step.y) + ramp * entropy(logits).mean())
    return model.state_dict()
