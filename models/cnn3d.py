"""A residual network of (2+1)D convolutions for short gray clips.

A block convolves in space first, then in time.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from models.layers import activated_norm, largest


def conv(before: int, after: int, time: int, space: int, stride: int = 1) -> nn.Conv3d:
    """Return a convolution over `time` frames and `space` x `space` pixels.

    The stride is in space. T stays.
    """
    padding = (time // 2, space // 2, space // 2)
    return nn.Conv3d(before, after, (time, space, space), (1, stride, stride), padding, bias=False)


class Block(nn.Module):
    """(B, before, T, H, W) -> (B, after, T, ceil(H / stride), ceil(W / stride)).

    Two (2+1)D convolutions (Tran et al., CVPR 2018) in a pre-activation residual block.
    """

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            *activated_norm(before, "relu"),
            conv(before, after, 1, 3, stride),
            *activated_norm(after, "relu"),
            conv(after, after, 3, 1),
            *activated_norm(after, "relu"),
            conv(after, after, 1, 3),
            *activated_norm(after, "relu"),
            conv(after, after, 3, 1),
        )
        self.skip = conv(before, after, 1, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return self.skip(x) + self.body(x)


class CNN3d(nn.Module):
    """Clips (B, T, H, W), uint8 or gray levels of 0 to 255 -> logits (B, num_classes).

    width    channels of the stem; the stages have 1, 2, 4 and 8 times as many; 40 gives 2.7 million
             parameters
    dropout  of the features before the last layer

    H, W and T >= 2 may be any. Pixels go to the device as bytes and are converted there.
    """

    def __init__(self, num_classes: int, width: int = 40, dropout: float = 0.0):
        super().__init__()
        stages = [width, 2 * width, 4 * width, 8 * width]
        # The stem keeps a sixteenth of the pixels: later layers have more channels and smaller
        # pictures.
        self.stem = nn.Sequential(conv(2, width, 1, 7, stride=4), conv(width, width, 5, 1))
        self.body = nn.Sequential(
            Block(width, width, 1),
            *(Block(before, after, 2) for before, after in itertools.pairwise(stages)),
            *activated_norm(stages[-1], "relu"),
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(2 * stages[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.head.weight.dtype) / 64 - 2  # (B, T, H, W), about -2 to 2
        # The second channel is the difference from the clip's mean, without the still floor.
        x = torch.stack([x, (x - x.mean(1, keepdim=True)) * 4], 1)  # (B, 2, T, H, W)
        x = self.body(self.stem(x)).flatten(2)  # (B, 8 width, T * ceil(H / 32) * ceil(W / 32))
        # The mean measures the amount of a motion, the maximum whether the motion occurs at all.
        return self.head(self.dropout(torch.cat([x.mean(2), largest(x, 2)], 1)))  # (B, num_classes)
