"""A task nobody has seen before: masked regression, one file. The tests drop it anywhere and train it."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from engine import contract
from engine.config import option, section
from engine.contract import Loss, Sums


class Waves:
    """(N, 8) inputs, (N, 4) targets with a mask; a pure function of the seed."""

    def __init__(self, num_samples: int, seed: int):
        rng = np.random.default_rng(seed)
        self.x = torch.from_numpy(rng.normal(size=(num_samples, 8)))
        matrix = torch.from_numpy(np.random.default_rng(7).normal(size=(8, 4)))
        # Column by column: the last bits of a library's matrix product depend on where the memory is aligned.
        self.y = torch.tanh(sum(self.x[:, k : k + 1] * matrix[k] for k in range(8)))
        self.mask = torch.from_numpy(rng.random((num_samples, 4)) < 0.6)
        self.labels = (self.y[:, 0] > 0.8).long().numpy()

    def __len__(self):
        return len(self.x)

    def __getitems__(self, indices):
        rows = torch.tensor(indices)
        return {"x": self.x[rows], "y": self.y[rows], "mask": self.mask[rows]}


class Net(nn.Module):
    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 4))

    def forward(self, x):
        return self.layers(x.to(self.layers[0].weight.dtype))


@dataclass
class Data:
    samples: int = option(61, "training samples", low=0)
    val_samples: int = option(23, "validation samples", low=0)


@dataclass
class Model:
    width: int = option(16, "hidden units", low=1)
    dropout: float = option(0.0, "share of hidden units dropped", low=0, high=1)
    double: bool = option(False, "float64: then only a mistake shows, not rounding")


class Task(contract.Task):
    @dataclass
    class Settings(contract.Settings):
        dataset: Data = section(Data)
        model: Model = section(Model)

    defaults = {"epochs": 3, "batch_size": 12, "optim.lr": 1e-2}
    aliases = {"width": "model.width"}

    def datasets(self):
        return Waves(self.cfg.dataset.samples, 0), Waves(self.cfg.dataset.val_samples, 1)

    def model(self):
        net = Net(self.cfg.model.width, self.cfg.model.dropout)
        return net.double() if self.cfg.model.double else net

    def _errors(self, net, batch):
        return (net(batch["x"]) - batch["y"]).square() * batch["mask"]

    def loss(self, net, batch):
        noise = contract.uniform(batch["lockstep"].seed, 8) * 0.01  # augmentation
        errors = self._errors(net, batch | {"x": batch["x"] + noise})
        return Loss(errors.sum(), batch["mask"].sum())

    def score(self, model, batch):
        errors = self._errors(model, batch)
        return Sums(
            total=errors.double().sum(),
            weight=batch["mask"].sum(),
            count=torch.tensor(len(errors)),
        )

    def report(self, sums):
        return {"loss": float(sums["total"] / sums["weight"])}
