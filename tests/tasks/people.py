"""Points of nine people, in three classes: a task of one's own that tools/study.py can cut by person."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from engine import contract
from engine.config import option, section
from engine.contract import LockstepError
from tasks.shared.classification import Classification, LossSettings

PEOPLE = ["ann", "bob & co", "c,d", "dee_1", "eva", "fay", "gus", "hal", "ida"]


class Points:
    """(N, 4) points about a centre for each class, moved for each person; a pure function of the person."""

    def __init__(self, people):
        x, y, who = [], [], []
        for name in people:
            rng = np.random.default_rng(PEOPLE.index(name))
            labels = rng.integers(0, 3, 6 + 3 * PEOPLE.index(name))
            x.append(np.eye(3, 4)[labels] + 0.4 * rng.normal(size=4) + 0.5 * rng.normal(size=(len(labels), 4)))
            y.append(labels)
            who += [name] * len(labels)
        self.x, self.labels = torch.from_numpy(np.concatenate(x)).float(), np.concatenate(y)
        self.sources = np.array(who)

    def __len__(self):
        return len(self.labels)

    def __getitems__(self, indices):
        return {"x": self.x[indices], "y": torch.from_numpy(self.labels[indices])}


@dataclass
class Data:
    val: list[str] = option(["ann"], "people to validate on")
    test: list[str] = option([], "people to test on")


@dataclass
class Model:
    width: int = option(0, "units of a hidden layer; 0: none", low=0)


class Task(Classification):
    @dataclass
    class Settings(contract.Settings):
        dataset: Data = section(Data)
        model: Model = section(Model)
        loss: LossSettings = field(default_factory=LossSettings)

    defaults = {"epochs": 4, "batch_size": 16, "optim.lr": 0.05}
    split_keys = {"people": ("dataset.val", "dataset.test")}
    classes = ["low", "mid_1", "high & up"]

    def datasets(self):
        wanted = self.cfg.dataset
        if unknown := {*wanted.val, *wanted.test} - {*PEOPLE}:
            raise LockstepError(f"nobody is called {min(unknown)}", "dataset")
        self.test = Points(wanted.test) if wanted.test else None
        train = Points([name for name in PEOPLE if name not in (*wanted.val, *wanted.test)])
        val = Points(wanted.val)
        self.count(train.labels, "people", val.labels, None, self.test)
        return train, val

    def test_dataset(self):
        return self.test

    def model(self):
        width = self.cfg.model.width
        if not width:
            return nn.Linear(4, 3)
        return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))
