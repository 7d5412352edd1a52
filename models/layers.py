"""What several networks share."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def group_norm(channels: int) -> nn.GroupNorm:
    """Eight groups where they divide the channels. Not BatchNorm: the step would depend on how the batch is cut."""
    return nn.GroupNorm(math.gcd(8, channels), channels)


class Standardise(nn.Module):
    """(B, C, T) raw sensor units -> the same with mean 0 and standard deviation 1 per channel of the training data.

    mean, std  (C,) of the training data; buffers, so a checkpoint holds all that a prediction needs
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor, std: Tensor):
        super().__init__()
        dtype = torch.get_default_dtype()  # the parameters' own: a model in float64 takes float32 data too
        self.register_buffer("mean", torch.as_tensor(mean, dtype=dtype)[:, None].clone())  # (C, 1)
        self.register_buffer("std", torch.as_tensor(std, dtype=dtype)[:, None].clone())

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.mean.dtype) - self.mean) / self.std
