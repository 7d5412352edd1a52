"""The task of lightning_module.py."""

import torch
from torch.nn.functional import cross_entropy

from engine.contract import Loss, Sums
from engine.contract import Task as Base

from project import Net, Pictures


class Task(Base):
    defaults = {
        "epochs": 8,
        "global_batch": 16,
        "optim.grad_clip": 1.0,
        "optim.ema_decay": 0.9,
        "patience": 2,
    }

    def datasets(self):
        return Pictures(200), Pictures(80, seed=1)

    def model(self):
        return Net()

    def loss(self, net, batch):
        x, y = batch
        smoothing = 0.2 if batch.lockstep.epoch < 2 else 0.0
        loss = cross_entropy(
            net(x), y, label_smoothing=smoothing, reduction="sum"
        )
        return Loss(loss, len(y))

    def score(self, model, batch):
        x, y = batch
        output = model(x)
        return Sums(
            loss=cross_entropy(output, y, reduction="sum"),
            hits=(output.argmax(1) == y).sum(),
            count=torch.tensor(len(y)),
        )

    def report(self, sums):
        count = sums["count"]
        return {
            "loss": sums["loss"] / count,
            "accuracy": sums["hits"] / count,
        }

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.01, total_steps=self.total_steps
        )
