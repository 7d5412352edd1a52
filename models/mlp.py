"""The flatten baseline: a multi-layer perceptron on the window as one long vector."""

from __future__ import annotations

import itertools

from torch import Tensor, nn

from models.layers import Standardise


class MLP(nn.Module):
    """Windows (B, C, T) of exactly `length` steps -> logits (B, num_classes).

    mean, std  (C,) of the training data; the model normalises the input, so give raw sensor units
    width      units of the hidden layers
    depth      number of hidden layers, at least 1
    """

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
        self.standardise = Standardise(mean, std)
        sizes = [len(mean) * length] + [width] * depth
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(sizes):
            layers += [
                nn.Linear(before, after),
                nn.LayerNorm(after),
                nn.GELU(),
                nn.Dropout(dropout),
            ]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.standardise(x)  # (B, C, T)
        return self.head(self.body(x.flatten(1)))  # (B, num_classes)
