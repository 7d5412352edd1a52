"""Common parts of the ports: the data, the network, the settings, and the batches of a plain loop.

A port is a file with a class `Task`, and a function `plain` with the loop that people write, which returns the trained
weights. The loop takes the batches in the order of the engine. Where a loop draws random numbers, the loop draws the
numbers of the engine.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from engine import contract
from engine.contract import Loss, Sums, sample_seeds

SEED = 3
SAMPLES = 48
BATCH = 12
STEPS = 12
LR = 0.05
MOMENTUM = 0.9


class Rows:
    """(N, 6) float64 inputs and (N,) labels of three classes; a pure function of the seed."""

    def __init__(self, samples: int, seed: int):
        rng = np.random.default_rng(seed)
        self.x = torch.from_numpy(rng.normal(size=(samples, 6)))
        self.y = self.x[:, :3].argmax(1)

    def __len__(self):
        return len(self.x)

    def __getitems__(self, indices):
        rows = torch.tensor(indices)
        return {"x": self.x[rows], "y": self.y[rows]}


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


class Task(contract.Task):
    defaults = {
        "seed": SEED,
        "epochs": 0,
        "steps": STEPS,
        "global_batch": BATCH,
        "batch_size": BATCH,
        "amp": "off",
        "device": "cpu",
        "log_every": 1,
        "optim.name": "sgd",
        "optim.lr": LR,
        "optim.momentum": MOMENTUM,
        "optim.weight_decay": 0.0,
        "optim.grad_clip": 0.0,
        "schedule.kind": "constant",
    }

    def datasets(self):
        return Rows(SAMPLES, 0), Rows(20, 1)

    def model(self):
        return network()

    def loss(self, net, batch):
        return Loss(cross_entropy(net(batch["x"]), batch["y"]), len(batch["y"]))

    def score(self, model, batch):
        losses = cross_entropy(model(batch["x"]), batch["y"])
        return Sums(loss=losses, count=torch.tensor(len(batch["y"])))

    def report(self, sums):
        return {"loss": sums["loss"] / sums["count"]}


WITHOUT_SCHEDULE = {key: value for key, value in Task.defaults.items() if not key.startswith("schedule.")}
"""The settings of a task with a scheduler of torch."""

WITHOUT_OPTIMIZER = {key: value for key, value in Task.defaults.items() if key != "optim.name"}
"""The settings of a task with an optimizer of its own."""


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """The sum over the samples."""
    return nn.functional.cross_entropy(logits, y, reduction="sum")


# ---- for the plain loops


class Step(NamedTuple):
    """A batch of a plain loop. `seeds` are the numbers of `batch["lockstep"].seed`."""

    number: int
    epoch: int
    x: Tensor
    y: Tensor
    seeds: Tensor


def steps(data=None, count: int = STEPS) -> Iterator[Step]:
    """The batches in the order of the engine."""
    data = data or Rows(SAMPLES, 0)
    per_epoch = len(data) // BATCH
    for number in range(count):
        epoch, position = number // per_epoch, BATCH * (number % per_epoch)
        rows = np.random.default_rng((SEED, epoch)).permutation(len(data))[position : position + BATCH]
        batch = data.__getitems__(rows.tolist())
        yield Step(number, epoch, batch["x"], batch["y"], sample_seeds(SEED, epoch, position + torch.arange(BATCH)))


def seeded(make=network):
    """The network with the weights of the run."""
    torch.manual_seed(SEED)
    return make()


def sgd(model: nn.Module, momentum: float = MOMENTUM) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)


def take(optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def validation_loss(model: nn.Module) -> float:
    data = Rows(20, 1)
    with torch.no_grad():
        return nn.functional.cross_entropy(model(data.x), data.y).item()
