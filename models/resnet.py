"""The residual network of He et al.

(CVPR 2016) as a feature extractor: ResNet-18 or -34 without head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DEPTHS = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3)}
"""Blocks per stage. Both networks have the same kind of block."""


class FrozenBatchNorm2d(nn.Module):
    """(B, C, H, W) -> (B, C, H, W), by the constant statistics and affine map of a checkpoint.

    Without a checkpoint the module is the identity. In both cases the step does not depend on the
    partition of the batch.
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor
    constant_buffers = ("weight", "bias", "running_mean", "running_var")

    def __init__(self, channels: int):
        super().__init__()
        self.register_buffer("weight", torch.ones(channels))
        self.register_buffer("bias", torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        # x * scale + shift would widen every feature map to float32 under autocast.
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, training=False
        )


def conv3x3(before: int, after: int, stride: int, dilation: int) -> nn.Conv2d:
    """Return a 3 x 3 convolution that keeps H and W at stride 1."""
    return nn.Conv2d(before, after, 3, stride, padding=dilation, dilation=dilation, bias=False)


class Block(nn.Module):
    """(B, before, H, W) -> (B, after, ceil(H / stride), ceil(W / stride)).

    Two convolutions beside a shortcut.

    dilations  of the two convolutions
    """

    def __init__(self, before: int, after: int, stride: int, dilations: tuple[int, int]):
        super().__init__()
        self.conv1 = conv3x3(before, after, stride, dilations[0])
        self.bn1 = FrozenBatchNorm2d(after)
        self.conv2 = conv3x3(after, after, 1, dilations[1])
        self.bn2 = FrozenBatchNorm2d(after)
        self.downsample = nn.Sequential()
        if before != after:
            self.downsample.extend(
                [nn.Conv2d(before, after, 1, stride, bias=False), FrozenBatchNorm2d(after)]
            )

    def forward(self, x: Tensor) -> Tensor:
        branch = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(self.downsample(x) + branch)


def stage(before: int, after: int, depth: int, stride: int, dilation: int = 1) -> nn.Sequential:
    """Return `depth` blocks.

    With dilation in place of a stride, the first convolution has no dilation.
    """
    # Where dilation replaces the stride, the first convolution has none.
    first = Block(before, after, stride, (1, dilation))
    return nn.Sequential(
        first, *(Block(after, after, 1, (dilation, dilation)) for _ in range(depth - 1))
    )


class ResNet(nn.Module):
    """Pictures (B, 3, H, W) -> features (B, 512, ceil(H / 32), ceil(W / 32)).

    Normalise the pictures as the weights require. Parameters and buffers have torchvision's names,
    so that torchvision's weights fit.

    name    "resnet18" (11.2 million parameters) or "resnet34" (21.3 million)
    dilate  the last stage has dilated convolutions in place of the stride: ceil(H / 16), ceil(W /
            16)
    """

    num_features = 512

    def __init__(self, name: str = "resnet18", dilate: bool = False):
        super().__init__()
        depths = DEPTHS[name]
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = FrozenBatchNorm2d(64)
        self.layer1 = stage(64, 64, depths[0], stride=1)
        self.layer2 = stage(64, 128, depths[1], stride=2)
        self.layer3 = stage(128, 256, depths[2], stride=2)
        self.layer4 = stage(
            256,
            self.num_features,
            depths[3],
            stride=1 if dilate else 2,
            dilation=2 if dilate else 1,
        )
        # No norm rescales a random network's signal: with this start, ResNet-18 takes a root mean
        # square of 1 to 2.5.
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        # (B, 64, H / 4, W / 4)
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, stride=2, padding=1)
        return self.layer4(self.layer3(self.layer2(self.layer1(x))))
