"""The task of accelerate_script.py."""

import copy

import torch
from torch.nn.functional import cross_entropy, mse_loss

from engine.contract import Loss
from engine.contract import Task as Base

from project import Net, Pictures

RAMP = 30


class Task(Base):
    defaults = {"epochs": 4, "global_batch": 16}
    state_attributes = ("teacher",)

    def datasets(self):
        return Pictures(192), None

    def model(self):
        model = Net()
        self.teacher = copy.deepcopy(model).requires_grad_(False)
        return model

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / 10)
        )

    def loss(self, net, batch):
        x, y = batch
        output = net(x)
        target = self.teacher(x).softmax(1)
        loss = cross_entropy(output, y, reduction="sum")
        ramp = min(1.0, batch.lockstep.step / RAMP)
        distance = mse_loss(output.softmax(1), target, reduction="sum")
        loss = loss + ramp * distance / output.shape[1]
        return Loss(loss, len(y))

    def after_step(self, model, step):
        for old, new in zip(self.teacher.parameters(), model.parameters()):
            old.lerp_(new, 0.05)
