"""Residual networks of 18 layers for clips (Tran et al., CVPR 2018).

The tensors have torchvision's names, so that torchvision's weights fit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.backbone import Backbone

SPACE_TIME, SPACE, SPLIT = "space and time at once", "space alone", "space, then time"

KINDS = {
    "mc3_18": (SPACE_TIME, SPACE, SPACE, SPACE),
    "r3d_18": (SPACE_TIME,) * 4,
    "r2plus1d_18": (SPLIT,) * 4,
}
"""The convolutions of the four stages."""

MEAN, STD = (0.43216, 0.394666, 0.37645), (0.22803, 0.22145, 0.216989)
"""Mean and standard deviation of Kinetics-400's pixels in [0, 1], red, green and blue.

The published weights need inputs that are normalised by these values."""

Triple = tuple[int, int, int]


def conv(before: int, after: int, kernel: Triple, stride: Triple = (1, 1, 1)) -> nn.Conv3d:
    """Return a convolution that keeps T, H and W at stride 1."""
    padding = (kernel[0] // 2, kernel[1] // 2, kernel[2] // 2)
    return nn.Conv3d(before, after, kernel, stride, padding, bias=False)


def convolution(kind: str, before: int, after: int, middle: int, stride: int) -> nn.Module:
    """Return a 3 x 3 (x 3) convolution of a kind of KINDS.

    middle  channels between space and time, for the kind SPLIT
    """
    if kind == SPACE_TIME:
        return conv(before, after, (3, 3, 3), (stride, stride, stride))
    in_space = conv(before, after if kind == SPACE else middle, (1, 3, 3), (1, stride, stride))
    if kind == SPACE:
        return in_space
    return nn.Sequential(
        in_space, nn.BatchNorm3d(middle), nn.ReLU(), conv(middle, after, (3, 1, 1), (stride, 1, 1))
    )


class Block(nn.Module):
    """(B, before, T, H, W) -> (B, after, T', ceil(H / stride), ceil(W / stride)).

    Two convolutions beside a shortcut. T' is T for the kind SPACE, else ceil(T / stride).
    """

    def __init__(self, kind: str, before: int, after: int, stride: int):
        super().__init__()
        # As many weights as a full 3 x 3 x 3 kernel between the two widths. Both convolutions have
        # equal `middle`.
        middle = 27 * before * after // (9 * before + 3 * after)
        self.conv1 = nn.Sequential(
            convolution(kind, before, after, middle, stride), nn.BatchNorm3d(after), nn.ReLU()
        )
        self.conv2 = nn.Sequential(
            convolution(kind, after, after, middle, 1), nn.BatchNorm3d(after)
        )
        self.downsample = nn.Sequential()
        if before != after:
            in_time = 1 if kind == SPACE else stride
            self.downsample.extend(
                [conv(before, after, (1, 1, 1), (in_time, stride, stride)), nn.BatchNorm3d(after)]
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv2(self.conv1(x)) + self.downsample(x))


class ResNet3d(Backbone):
    """Clips -> logits (B, num_classes).

    A clip is gray, (B, T, H, W) in 0..255 of any size, or (B, 3, T, H, W). A gray clip becomes
    three equal channels. Each channel is normalised with a separate mean and standard deviation.
    Stem weights summed over the channels would save work, but the borders would differ: the padding
    is 0 after the normalisation.

    name  one of KINDS: 11.7, 33.4 and 31.5 million parameters with 400 classes
    """

    parts = ("stem", "layer1", "layer2", "layer3", "layer4")
    mean: Tensor
    std: Tensor

    def __init__(self, name: str, num_classes: int, dropout: float = 0.0, fixed_norms: bool = True):
        super().__init__(fixed_norms)
        if name == "r2plus1d_18":
            in_space, in_time = conv(3, 45, (1, 7, 7), (1, 2, 2)), conv(45, 64, (3, 1, 1))
            stem = [in_space, nn.BatchNorm3d(45), nn.ReLU(), in_time, nn.BatchNorm3d(64), nn.ReLU()]
        else:
            stem = [conv(3, 64, (3, 7, 7), (1, 2, 2)), nn.BatchNorm3d(64), nn.ReLU()]
        self.stem = nn.Sequential(*stem)
        first, second, third, fourth = KINDS[name]
        self.layer1 = nn.Sequential(Block(first, 64, 64, 1), Block(first, 64, 64, 1))
        self.layer2 = nn.Sequential(Block(second, 64, 128, 2), Block(second, 128, 128, 1))
        self.layer3 = nn.Sequential(Block(third, 128, 256, 2), Block(third, 256, 256, 1))
        self.layer4 = nn.Sequential(Block(fourth, 256, 512, 2), Block(fourth, 512, 512, 1))
        for each, values in (("mean", MEAN), ("std", STD)):
            self.register_buffer(each, torch.tensor(values).view(3, 1, 1, 1), persistent=False)
        self.add_head(512, num_classes, dropout)

    def features(self, x: Tensor) -> Tensor:
        x = x.to(self.fc.weight.dtype) / 255
        x = ((x if x.ndim == 5 else x.unsqueeze(1)) - self.mean) / self.std  # (B, 3, T, H, W)
        x = self.layer4(self.layer3(self.layer2(self.layer1(self.stem(x)))))
        return x.mean((2, 3, 4))  # (B, 512)
