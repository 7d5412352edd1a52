"""The residual network for wrist accelerometers of Yuan et al. (npj Digital Medicine 2024).

The tensors have the published names, so that the weights of ssl-wearables fit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.backbone import Backbone

RATE_HZ = 30
LIMIT_G = 3.0

STAGES = {
    150: ((64, 2, 2), (128, 2, 2), (256, 3, 1), (256, 3, 1), (512, 3, 1)),
    300: ((64, 2, 2), (128, 2, 2), (256, 5, 1), (512, 5, 1), (1024, 3, 1)),
    900: ((64, 3, 1), (128, 3, 1), (256, 5, 1), (512, 5, 1), (1024, 4, 0)),
}
"""Steps of a window: (channels, factor of the downsampling, order of the filter) per stage."""


def conv(before: int, after: int) -> nn.Conv1d:
    """Return a circular convolution over 5 steps."""
    return nn.Conv1d(before, after, 5, padding=2, bias=False, padding_mode="circular")


class Block(nn.Module):
    """(B, C, T) -> (B, C, T), pre-activation residual block."""

    def __init__(self, channels: int):
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm1d(channels), nn.BatchNorm1d(channels)
        self.conv1, self.conv2 = conv(channels, channels), conv(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.bn2(self.conv1(F.relu(self.bn1(x))))))


class Downsample(nn.Module):
    """(B, C, T) -> (B, C, T / factor), through a filter against aliasing (Zhang, ICML 2019).

    The filter is a box of `factor` steps, convolved `order` times with a box. The filter is a
    buffer, because the published weights contain the filter.
    """

    kernel: Tensor
    constant_buffers = ("kernel",)

    def __init__(self, channels: int, factor: int, order: int):
        super().__init__()
        self.factor, self.padding = factor, order * (factor - 1) // 2
        kernel = torch.ones(1, 1, factor)
        for _ in range(order):
            kernel = F.conv1d(kernel, torch.ones(1, 1, factor), padding=factor - 1)
        self.register_buffer("kernel", (kernel / kernel.sum()).repeat(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv1d(x, self.kernel, stride=self.factor, padding=self.padding, groups=x.shape[1])


def stage(before: int, after: int, factor: int, order: int, blocks: int) -> nn.Sequential:
    """Return a stage: a convolution, residual blocks, and the downsampling."""
    residual = [Block(after) for _ in range(blocks)]
    return nn.Sequential(
        conv(before, after),
        *residual,
        nn.BatchNorm1d(after),
        nn.ReLU(),
        Downsample(after, factor, order),
    )


class HarNet(Backbone):
    """Windows (B, 3, length) of acceleration in g at 30 Hz -> logits (B, num_classes).

    The acceleration includes gravity. Values beyond 3 g are clipped, as in the data of the
    published weights.

    length  a key of STAGES: 150 (4.2 million parameters, 512 features), 300 or 900 (10.5 million,
            1024 features)
    """

    parts = ("feature_extractor",)

    def __init__(
        self, length: int, num_classes: int, dropout: float = 0.0, fixed_norms: bool = True
    ):
        stages = STAGES[length]
        super().__init__(fixed_norms)
        self.feature_extractor = nn.Sequential()
        before = 3
        for n, (channels, factor, order) in enumerate(stages, 1):
            last = n == len(stages)
            self.feature_extractor.add_module(
                f"layer{n}", stage(before, channels, factor, order, 0 if last else 2)
            )
            before = channels
        self.add_head(before, num_classes, dropout)

    def features(self, x: Tensor) -> Tensor:
        x = x.to(self.fc.weight.dtype).clamp(-LIMIT_G, LIMIT_G)
        return self.feature_extractor(x).flatten(1)  # the last stage leaves one step
