"""Stochastic depth: blocks are left out at random, for each sample (`random.random()` in the loop of people)."""

from torch import nn
from torch.nn.functional import cross_entropy

from engine.contract import Loss, uniform
from tests.tasks.ports import base


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 3)

    def forward(self, x, kept=None):
        """kept: (B, 3) numbers by which the blocks are multiplied; in an evaluation all blocks run."""
        for n, block in enumerate(self.blocks):
            x = x + block(x).tanh() * (1 if kept is None else kept[:, n : n + 1])
        return self.head(x)


def draw(seeds):
    return (uniform(seeds, 3) < 0.7).double() / 0.7


class Task(base.Task):
    def model(self):
        return Net().double()

    def loss(self, net, batch):
        logits = net(batch["x"], draw(batch["lockstep"].seed))
        return Loss(base.cross_entropy(logits, batch["y"]), len(logits))


def plain():
    model = base.seeded(lambda: Net().double())
    optimizer = base.sgd(model)
    for step in base.steps():
        base.take(optimizer, cross_entropy(model(step.x, draw(step.seeds)), step.y))
    return model.state_dict()
