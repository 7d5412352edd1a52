"""The task of quickstart.py."""

import torch
from torch import nn

from engine.contract import Loss, Sums
from engine.contract import Task as Base

from project import Net, Pictures

loss_fn = nn.CrossEntropyLoss(reduction="sum")


class Task(Base):
    defaults = {"epochs": 5, "global_batch": 16, "optim.grad_clip": 0.0}
    monitor, higher_is_better = "accuracy", True

    def datasets(self):
        return Pictures(200), Pictures(80, seed=1)

    def model(self):
        return Net()

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def scheduler(self, optimizer):
        epoch = self.steps_per_epoch
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2 * epoch)

    def loss(self, net, batch):
        x, y = batch
        return Loss(loss_fn(net(x), y), len(y))

    def score(self, model, batch):
        x, y = batch
        output = model(x)
        loss = loss_fn(output, y)
        hits = (output.argmax(1) == y).sum()
        return Sums(loss=loss, hits=hits, count=torch.tensor(len(y)))

    def report(self, sums):
        count = sums["count"]
        return {
            "loss": sums["loss"] / count,
            "accuracy": sums["hits"] / count,
        }
