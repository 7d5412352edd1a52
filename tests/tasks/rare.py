"""A network with a branch that few samples use: most passes of a step leave its weights alone, and some steps do."""

import torch
from torch import nn

from engine import contract
from engine.contract import Loss


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.usual, self.rare = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        out, mine = self.usual(x), x[:, 0] > 1.0
        return out.index_add(0, mine.nonzero()[:, 0], self.rare(x[mine])) if mine.any() else out


class Task(contract.Task):
    defaults = {"amp": "off", "optim.name": "sgd", "optim.grad_clip": 0, "schedule.kind": "constant"}

    def datasets(self):
        draw = torch.Generator().manual_seed(0)
        return [{"x": torch.randn(4, generator=draw)} for _ in range(30)], None

    def model(self):
        return Net()

    def loss(self, net, batch):
        return Loss(net(batch["x"]).square().sum(), len(batch["x"]))


class Terms(Task):
    """Means over all samples and over some."""

    loss = contract.Task.loss

    def losses(self, net, batch):
        squares, some = net(batch["x"]).square(), batch["x"][:, 1] > 0
        return {"all": Loss(squares[:, 0].sum(), len(some)), "some": Loss((squares[:, 1] * some).sum(), some.sum())}
