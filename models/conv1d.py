"""A small residual network of 1D convolutions: the default for sensor windows.

The layers are 2D convolutions of height 1, with the same arithmetic: torch has channels-last for 2D
only, and channels-last is faster on a CPU and in mixed precision.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.layers import Standardise, activated_norm, largest


class Block(nn.Module):
    """(B, before, 1, T) -> (B, after, 1, ceil(T / stride)).

    A pre-activation residual block (He et al., ECCV 2016).
    """

    def __init__(self, before: int, after: int, kernel: int, stride: int, dropout: float):
        super().__init__()
        self.body = nn.Sequential(
            *activated_norm(before, "gelu"),
            nn.Conv2d(before, after, (1, kernel), (1, stride), (0, kernel // 2), bias=False),
            *activated_norm(after, "gelu"),
            nn.Dropout(dropout),
            nn.Conv2d(after, after, (1, kernel), 1, (0, kernel // 2), bias=False),
        )
        same = stride == 1 and before == after
        self.skip = nn.Identity() if same else nn.Conv2d(before, after, 1, (1, stride), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.skip(x) + self.body(x)


class Conv1d(nn.Module):
    """Windows (B, C, T) of any length T >= 1 -> logits (B, num_classes).

    mean, std  (C,) of the training data; the model normalises the input, so give raw sensor units
    width      channels of the first stage; the later stages have twice as many
    depth      number of stages; each halves the time axis
    """

    def __init__(
        self,
        mean: Tensor,
        std: Tensor,
        num_classes: int,
        width: int = 48,
        depth: int = 3,
        dropout: float = 0.0,
        kernel: int = 5,
    ):
        super().__init__()
        self.standardise = Standardise(mean, std)
        sizes = [width] + [2 * width] * (depth - 1)
        self.stem = nn.Conv2d(len(mean), width, (1, 7), (1, 2), (0, 3))
        self.body = nn.Sequential(
            *(
                Block(before, after, kernel, 2, dropout)
                for before, after in zip([width, *sizes], sizes, strict=False)
            ),
            *activated_norm(sizes[-1], "gelu"),
        )
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(2 * sizes[-1], num_classes))

    def forward(self, x: Tensor) -> Tensor:
        x = self.standardise(x).unsqueeze(2)  # (B, C, 1, T)
        x = self.body(self.stem(x)).flatten(2)  # (B, W, ceil(T / 2^(depth + 1)))
        # The mean measures the amount of a motion, the maximum whether the motion occurs at all.
        return self.head(torch.cat([x.mean(2), largest(x, 2)], 1))  # (B, num_classes)
