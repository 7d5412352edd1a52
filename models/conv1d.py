"""A small residual network of 1D convolutions: the default for sensor windows."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def group_norm(channels: int) -> nn.GroupNorm:
    """Eight groups where they divide the channels. Not BatchNorm: the step would depend on how the batch is cut."""
    return nn.GroupNorm(math.gcd(8, channels), channels)


class Block(nn.Module):
    """(B, before, T) -> (B, after, ceil(T / stride)), pre-activation residual block (He et al., ECCV 2016)."""

    def __init__(self, before: int, after: int, kernel: int, stride: int, dropout: float):
        super().__init__()
        self.body = nn.Sequential(
            group_norm(before),
            nn.GELU(),
            nn.Conv1d(before, after, kernel, stride, kernel // 2, bias=False),
            group_norm(after),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Conv1d(after, after, kernel, 1, kernel // 2, bias=False),
        )
        same = stride == 1 and before == after
        self.skip = nn.Identity() if same else nn.Conv1d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.skip(x) + self.body(x)


class Conv1d(nn.Module):
    """Windows (B, C, T) of any length T >= 1 -> logits (B, num_classes).

    mean, std  (C,) of the training data; the model normalises its own input, so raw sensor units go in
    width      channels of the first stage; the later stages have twice as many
    depth      number of stages; each halves the time axis
    """

    mean: Tensor
    std: Tensor

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
        self.register_buffer("mean", torch.as_tensor(mean, dtype=torch.get_default_dtype())[:, None].clone())  # (C, 1)
        self.register_buffer("std", torch.as_tensor(std, dtype=torch.get_default_dtype())[:, None].clone())
        sizes = [width] + [2 * width] * (depth - 1)
        self.stem = nn.Conv1d(len(mean), width, 7, stride=2, padding=3)
        self.body = nn.Sequential(
            *(Block(before, after, kernel, 2, dropout) for before, after in zip([width, *sizes], sizes, strict=False)),
            group_norm(sizes[-1]),
            nn.GELU(),
        )
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(2 * sizes[-1], num_classes))

    def forward(self, x: Tensor) -> Tensor:
        x = (x.to(self.mean.dtype) - self.mean) / self.std  # (B, C, T)
        x = self.body(self.stem(x))  # (B, W, ceil(T / 2^(depth + 1)))
        # The mean says how much of a motion the window holds, the maximum whether it occurs at all.
        return self.head(torch.cat([x.mean(2), x.amax(2)], 1))  # (B, num_classes)
