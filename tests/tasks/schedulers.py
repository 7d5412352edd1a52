"""The toy task with schedulers of its own, of torch's classes by name."""

import math
from dataclasses import dataclass

import torch
from torch.optim import lr_scheduler

from engine.config import option, section
from tests.tasks import faulty


def warm_up(step):
    return min(1.0, (step + 1) / 4)


MADE = {
    "StepLR": lambda o, task: lr_scheduler.StepLR(o, 4, 0.5),
    "MultiStepLR": lambda o, task: lr_scheduler.MultiStepLR(o, [3, 3, 9], 0.5),
    "ConstantLR": lambda o, task: lr_scheduler.ConstantLR(o, 0.25, 5),
    "LinearLR": lambda o, task: lr_scheduler.LinearLR(o, 0.1, 1.0, task.steps_per_epoch),
    "ExponentialLR": lambda o, task: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o, task: lr_scheduler.PolynomialLR(o, task.total_steps, 2.0),
    "CosineAnnealingLR": lambda o, task: lr_scheduler.CosineAnnealingLR(o, task.total_steps, 1e-4),
    "CosineAnnealingWarmRestarts": lambda o, task: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o, task: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, 3, mode="triangular2"),
    "OneCycleLR": lambda o, task: lr_scheduler.OneCycleLR(o, 3e-2, task.total_steps),
    "LambdaLR": lambda o, task: lr_scheduler.LambdaLR(o, lambda step: warm_up(step) * math.exp(-step / 9)),
    "MultiplicativeLR": lambda o, task: lr_scheduler.MultiplicativeLR(o, lambda step: 0.95),
    "SequentialLR": lambda o, task: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.25, 1.0, 3), lr_scheduler.CosineAnnealingLR(o, task.total_steps - 4)],
        [4],
    ),
    "ChainedScheduler": lambda o, task: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.25, 1.0, 3), lr_scheduler.StepLR(o, 5, 0.5)]
    ),
    "ReduceLROnPlateau": lambda o, task: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.9),
}
"""{class: function of the optimizer and the task}."""


def two_schedulers(optimizer, task):
    lr_scheduler.LinearLR(optimizer, 0.1)
    return lr_scheduler.CosineAnnealingLR(optimizer, task.total_steps)


class Forgetful(lr_scheduler.LRScheduler):
    """Keeps a number that its state does not hold."""

    def get_lr(self):
        self.calls = getattr(self, "calls", 0) + 1
        return [rate / self.calls for rate in self.base_lrs]

    def state_dict(self):
        return {name: value for name, value in super().state_dict().items() if name != "calls"}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.last_epoch += 1


class Held:
    """A function with an object that no checkpoint holds."""

    def __init__(self):
        self.held = Forgetful

    def __call__(self, step):
        return 1.0


MISTAKES = {
    "object": lambda o, task: lr_scheduler.LambdaLR(o, Held()),
    "number": lambda o, task: 3,
    "other": lambda o, task: lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)], 0.1), 3),
    "max": lambda o, task: lr_scheduler.ReduceLROnPlateau(o, mode="max"),
    "two": two_schedulers,
    "short": lambda o, task: lr_scheduler.OneCycleLR(o, 3e-2, 5),
    "forgetful": lambda o, task: Forgetful(o),
}


@dataclass
class Own:
    scheduler: str = option("", "which one; empty: that of schedule.kind")
    optimizer: str = option("", "sgd or groups; empty: that of optim.name")
    val: bool = option(True, "evaluate")


@dataclass
class Settings(faulty.Settings):
    own: Own = section(Own)


class Task(faulty.Task):
    Settings = Settings

    def datasets(self):
        data, val = super().datasets()
        return data, val if self.cfg.own.val else None

    def optimizer(self, model):
        weights = [*model.parameters()]
        if self.cfg.own.optimizer == "sgd":
            return torch.optim.SGD(weights, lr=self.cfg.optim.lr, momentum=0.9)
        if self.cfg.own.optimizer == "groups":
            return torch.optim.AdamW([{"params": weights[:2], "lr": 3e-3}, {"params": weights[2:]}], lr=1e-2)
        return None

    def scheduler(self, optimizer):
        kind = self.cfg.own.scheduler
        return (MADE | MISTAKES)[kind](optimizer, self) if kind else None
