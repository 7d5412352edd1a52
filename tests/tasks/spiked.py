"""Windows of a sensor with one planted fault, for tools/rewind.py: the culprit is known, or there is none."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from engine import contract
from engine.config import option, section
from engine.contract import Loss, Sums

CLASSES, CHANNELS, LENGTH = 4, 3, 32
TIMES = 20
"""The copies of the duplicate in a global batch of 32."""


class Windows:
    """(N, 3, 32) waves of four frequencies. Sample `culprit` has the fault.

    label      another class than the wave has
    spike      a burst in one channel, thirty times as high as the wave, with the frequency of another class
    outlier    finite numbers a hundred times as high in all channels, with the frequency of another class
    duplicate  a wave between two classes, TIMES times in one step of the epoch `epoch`
    twins      as `label`, and the next sample has the same data: both in one step of the epoch `epoch`
    """

    def __init__(self, data, count, seed):
        rng = np.random.default_rng(seed)
        self.labels = rng.integers(CLASSES, size=count)
        time = np.arange(LENGTH) / LENGTH
        phases = rng.uniform(0, 2 * np.pi, (count, CHANNELS, 1))
        waves = np.sin(2 * np.pi * (1 + 2 * self.labels)[:, None, None] * time + phases)
        self.x = torch.from_numpy(waves + 0.3 * rng.normal(size=waves.shape)).float()
        self.y = torch.from_numpy(self.labels).long()
        self.culprit = int(rng.integers(count))
        self.fault, self.batch, self.epoch, self.slot = data.fault, data.batch, data.epoch, int(rng.integers(2, 8))
        self.twin = (self.culprit + 1) % count
        if self.fault in ("label", "twins"):
            self.y[self.culprit] = (self.y[self.culprit] + 2) % CLASSES
        elif self.fault == "spike":
            self.x[self.culprit, 1] += 30 * self._burst(time)
        elif self.fault == "outlier":
            self.x[self.culprit] = 100 * self._burst(time)
        elif self.fault == "duplicate":
            other = (int(self.y[self.culprit]) + 1) % CLASSES
            alike = int(np.flatnonzero(self.labels == other)[0])
            self.x[self.culprit] = 0.45 * self.x[self.culprit] + 0.55 * self.x[alike]

        if self.fault == "twins":
            self.x[self.twin], self.y[self.twin] = self.x[self.culprit], self.y[self.culprit]

    def _burst(self, time):
        other = (int(self.labels[self.culprit]) + 2) % CLASSES
        return torch.from_numpy(np.sin(2 * np.pi * (1 + 2 * other) * time)).float()

    def __len__(self):
        return len(self.x)

    def __getitems__(self, indices):
        rows = torch.tensor(indices)
        return {"x": self.x[rows], "y": self.y[rows]}

    def epoch_order(self, seed, epoch):
        order = np.random.default_rng([seed, epoch]).permutation(len(self.x))
        if self.fault == "duplicate" and epoch == self.epoch:
            first = self.slot * self.batch
            order[first : first + TIMES] = self.culprit
        elif self.fault == "twins":
            order = order[(order != self.culprit) & (order != self.twin)]
            order = np.append(order, order[:2])
            if epoch == self.epoch:
                first = self.slot * self.batch
                order[first : first + 2] = self.culprit, self.twin
        elif self.fault != "rate":
            # once, in the epoch `epoch`: before, the sample's place is taken by another
            found = np.flatnonzero(order == self.culprit)
            if epoch < self.epoch:
                order[found] = (self.culprit + 1) % len(order)
        return order


class Net(nn.Module):
    def __init__(self, norm, dropout):
        super().__init__()
        norms = [nn.BatchNorm1d(16)] if norm == "batch" else []
        self.layers = nn.Sequential(
            nn.Conv1d(CHANNELS, 16, 5, padding=2),
            *norms,
            nn.GELU(),
            nn.AdaptiveAvgPool1d(8),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(128, 32),
            nn.GELU(),
            nn.Linear(32, CLASSES),
        )

    def forward(self, x):
        return self.layers(x)


@dataclass
class Data:
    samples: int = option(512, "training samples", low=0)
    fault: str = option("", "the fault")
    seed: int = option(0, "of the data", low=0)
    batch: int = option(32, "the global batch", low=1)
    epoch: int = option(6, "the first epoch with the fault", low=0)
    step: int = option(100, "the step with the bad rate", low=0)
    norm: str = option("", "batch: with BatchNorm")
    dropout: float = option(0.0, "share of dropped numbers", low=0, high=1)
    names: bool = option(False, "the samples have sources")


class Task(contract.Task):
    @dataclass
    class Settings(contract.Settings):
        dataset: Data = section(Data)

    defaults = {"epochs": 8, "batch_size": 32, "optim.lr": 3e-3, "log_every": 1, "digest_every": 20}

    def datasets(self):
        data = self.cfg.dataset
        train = Windows(data, data.samples, data.seed)
        if data.names:
            train.sources = np.array([f"person_{n % 5}" for n in range(data.samples)])
        clean = Data(**vars(data) | {"fault": ""})
        return train, Windows(clean, 64, data.seed + 1000)

    def model(self):
        return Net(self.cfg.dataset.norm, self.cfg.dataset.dropout)

    def metadata(self):
        return {}

    def load_metadata(self, metadata):
        pass

    def scheduler(self, optimizer):
        data = self.cfg.dataset
        bad = data.step - 1 if data.fault == "rate" else -1
        return LambdaLR(optimizer, lambda step: 60.0 if step == bad else 1.0)

    def loss(self, net, batch):
        total = F.cross_entropy(net(batch["x"]).float(), batch["y"], reduction="sum")
        return Loss(total, torch.tensor(len(batch["y"])))

    def score(self, model, batch):
        total = F.cross_entropy(model(batch["x"]).float(), batch["y"], reduction="sum")
        return Sums(total=total.double(), count=torch.tensor(len(batch["y"])))

    def report(self, sums):
        return {"loss": float(sums["total"] / sums["count"])}
