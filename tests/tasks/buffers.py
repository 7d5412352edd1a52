"""The toy task with a network whose modules keep something in buffers of their own, and draw at random."""

import os
from dataclasses import dataclass

import torch
from torch import nn

from engine.config import option, section
from tests.tasks import toy


class Centre(nn.Module):
    """Takes away a running mean, and counts; the cache of a forward pass is no part of the state."""

    def __init__(self, begins: int):
        super().__init__()
        self.passes = -begins
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("cache", torch.zeros(0), persistent=False)

    def forward(self, x):
        self.cache, mean = x.detach().clone(), self.mean
        self.passes += self.training
        if self.training and self.passes > 0:
            self.mean = mean.lerp(x.detach().mean(0), 0.1)  # another tensor in its place
            self.count += (x[:, 0] > 0).sum()
        return x - mean


class Net(toy.Net):
    def __init__(self, width, begins):
        super().__init__(width, 0.0)
        self.centre = Centre(begins)
        self.norm = nn.InstanceNorm1d(4, track_running_stats=True)

    def forward(self, x):
        x = self.centre(x.to(self.layers[0].weight.dtype))
        return super().forward(x + self.norm(x.view(-1, 4, 2)).flatten(1))


@dataclass
class Own:
    begins: int = option(0, "how many forward passes leave the modules' own buffers alone", low=0)
    nan_at: int = option(-1, "the forward pass, from 0, whose input is not finite")


class Task(toy.Task):
    @dataclass
    class Settings(toy.Task.Settings):
        own: Own = section(Own)

    def __init__(self, cfg):
        super().__init__(cfg)
        self.calls = 0

    def model(self):
        net = Net(self.cfg.model.width, self.cfg.own.begins)
        return net.double() if self.cfg.model.double else net

    def loss(self, net, batch):
        if self.calls == 0:
            print(f"DRAWN {os.environ.get('RANK', 0)} {torch.rand(()).item()}", flush=True)
        x = batch["x"] * float("nan") if self.calls == self.cfg.own.nan_at else batch["x"]
        self.calls += 1
        return super().loss(net, batch | {"x": x})
