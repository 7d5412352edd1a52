"""The layer-wise rates of BEiT by one setting, with AdamW."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.tasks.ports import base


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6))

    def forward(self, x):
        return x + self.layers(x).tanh()


def network():
    return nn.Sequential(nn.Linear(6, 6), nn.Sequential(Block(), Block(), Block()), nn.Linear(6, 3)).double()


class Task(base.Task):
    defaults = base.Task.defaults | {"optim.name": "adamw", "optim.layer_decay": 0.6}

    def model(self):
        return network()


def groups(model):
    stem, blocks, head = model
    layers = [stem, *blocks, head]
    return [{"params": [*layer.parameters()], "lr": base.LR * 0.6 ** (4 - n)} for n, layer in enumerate(layers)]


def plain():
    model = base.seeded(network)
    optimizer = torch.optim.AdamW(groups(model), weight_decay=0.0)
    for step in base.steps():
        base.take(optimizer, cross_entropy(model(step.x), step.y))
    return model.state_dict()
