"""Steps whose host does something: in the loss, in the model, or in a method of the task. Each change is far below 1 %,
so the numbers of a step hardly show it."""

import itertools
import random
from dataclasses import dataclass

import torch
from torch import nn

from engine.config import option, section
from tests.tasks import toy

SMALL = 1e-4


class Net(toy.Net):
    """The toy network with a norm. `kind` names what its host does."""

    def __init__(self, width, dropout, kind):
        super().__init__(width, dropout)
        self.norm, self.kind = nn.BatchNorm1d(8), kind
        self.calls, self.hidden_calls = 0, itertools.count(1)
        self.before = None

    def forward(self, x):
        x = self.norm(x.float())
        if not self.training:
            return super().forward(x)
        x = x * self.factor(x)
        if self.kind == "hook":
            x.requires_grad_() if x.is_leaf else None
            x.register_hook(lambda grad: grad * (1 + SMALL * next(self.hidden_calls)))
        return super().forward(x)

    def factor(self, x):
        kind = self.kind
        if kind == "draws":
            return 1 + SMALL * random.random()
        if kind == "draws by torch":
            return 1 + SMALL * float(torch.rand(()))
        if kind == "counts":
            self.calls += 1
            return 1.5 if self.calls % 100 == 99 else 1
        if kind == "counts in hiding":
            return 1 + SMALL * next(self.hidden_calls)
        if kind == "number of the host":
            return torch.tensor(1 + SMALL * next(self.hidden_calls))
        if kind == "row of the host":
            return torch.full((8,), 1 + SMALL).pin_memory().to(x.device, non_blocking=True)
        if kind == "keeps":
            before, self.before = self.before, x.detach().mean(0)
            return 1 if before is None else 1 + SMALL * before
        return 1


@dataclass
class Own:
    kind: str = option("", "what the host does")


@dataclass
class Settings(toy.Task.Settings):
    own: Own = section(Own)


class Task(toy.Task):
    Settings = Settings
    defaults = {
        "batch_size": 6,
        "optim.lr": 1e-2,
        "check_resume": False,
        "random_samples": "warn",
        "amp": "off",
        "dataset.samples": 72,
        "epochs": 2,
        "log_every": 1,
    }
    factor = 1.0

    def model(self):
        return Net(self.cfg.model.width, self.cfg.model.dropout, self.cfg.own.kind)

    def prepare(self, batch):
        info, kind = batch["lockstep"], self.cfg.own.kind
        if kind == "prepares":
            self.factor = 1 + SMALL * (info.step > 9)
        return batch

    def after_evaluation(self, metrics):
        if self.cfg.own.kind == "evaluates":
            self.factors = [1 + SMALL]

    factors = (1.0,)

    def loss(self, net, batch):
        if self.cfg.own.kind == "input":
            batch = batch | {"x": batch["x"].requires_grad_()}
        loss = super().loss(net, batch)
        return loss._replace(total=loss.total * self.factor * self.factors[0])
