"""The flatten baseline: a window as one long vector through a multi-layer perceptron."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn


class MLP(nn.Module):
    """Windows (B, C, T) of exactly `length` steps -> logits (B, num_classes).

    mean, std  (C,) of the training data; the model normalises its own input, so raw sensor units go in
    width      units of the hidden layers
    depth      number of hidden layers, at least 1
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        mean: Tensor,
        std: Tensor,
        length: int,
        num_classes: int,
        width: int = 256,
        depth: int = 3,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.register_buffer("mean", torch.as_tensor(mean, dtype=torch.get_default_dtype())[:, None].clone())  # (C, 1)
        self.register_buffer("std", torch.as_tensor(std, dtype=torch.get_default_dtype())[:, None].clone())
        sizes = [len(mean) * length] + [width] * depth
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(sizes):
            layers += [nn.Linear(before, after), nn.LayerNorm(after), nn.GELU(), nn.Dropout(dropout)]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = (x.to(self.mean.dtype) - self.mean) / self.std  # (B, C, T)
        return self.head(self.body(x.flatten(1)))  # (B, num_classes)
