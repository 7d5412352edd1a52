"""The toy task with networks that depend on the cut of a batch: dropout, BatchNorm, and other running statistics."""

import random
from dataclasses import dataclass

import torch
from torch import nn

from engine.config import option
from tests.tasks import toy


class Centre(nn.Module):
    """Takes away a running mean, which it puts into another tensor; -inf stands in a constant; draws from `random`."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        if self.training:
            self.mean = self.mean.lerp(x.detach().mean(0), 0.1)
            self.calls += 1
            x = x * (1 + 0.1 * random.random())
        return (x - self.mean) * self.mask.exp()[0]


def conv(width):
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv1d(1, width, 3, padding=1), nn.BatchNorm1d(width), nn.ReLU(), nn.MaxPool1d(2),
        nn.Dropout(0.3), nn.Conv1d(width, width, 3), nn.InstanceNorm1d(width, track_running_stats=True), nn.Flatten(),
        nn.Linear(2 * width, 4),
    )  # fmt: skip


def perceptron(width):
    return nn.Sequential(
        Centre(),
        nn.Linear(8, width),
        nn.BatchNorm1d(width, momentum=None),
        nn.Tanh(),
        nn.Dropout(0.5),
        nn.Linear(width, 4),
    )


def attention(width):
    layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1, batch_first=True)
    return nn.Sequential(
        nn.Unflatten(1, (8, 1)), nn.Linear(1, width), nn.TransformerEncoder(layer, 2), nn.BatchNorm1d(8), nn.Flatten(),
        nn.Linear(8 * width, 4),
    )  # fmt: skip


NETWORKS = {"conv": conv, "perceptron": perceptron, "attention": attention}


@dataclass
class Model(toy.Model):
    network: str = option("conv", "one of NETWORKS")


class Single(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return self.layers(x.float())


class Task(toy.Task):
    @dataclass
    class Settings(toy.Task.Settings):
        model: Model = toy.section(Model)

    def model(self):
        return Single(NETWORKS[self.cfg.model.network](self.cfg.model.width))
