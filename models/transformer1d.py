"""A small transformer encoder on patches of a sensor window."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers import Standardise, sine_code


class Block(nn.Module):
    """(B, L, W) -> (B, L, W): attention and a feed-forward layer, each after a norm (pre-norm)."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1))  # (B, L, 3, H, W / H)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, L, W / H)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)  # (B, L, W)
        x = x + self.dropout(self.out(mixed))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Transformer1d(nn.Module):
    """Windows (B, C, T) of up to `length` steps -> logits (B, num_classes).

    mean, std  (C,) of the training data; the model normalises the input, so give raw sensor units
    width      size of a token, a multiple of `heads`
    depth      number of encoder blocks
    patch      steps per token; tokens overlap by half
    """

    positions: Tensor

    def __init__(
        self,
        mean: Tensor,
        std: Tensor,
        length: int,
        num_classes: int,
        width: int = 64,
        depth: int = 4,
        dropout: float = 0.0,
        heads: int = 4,
        patch: int = 8,
    ):
        super().__init__()
        self.standardise = Standardise(mean, std)
        self.patches = nn.Conv1d(len(mean), width, patch, stride=patch // 2, padding=patch // 2)
        positions = sine_code(torch.arange(length // (patch // 2) + 1), width)
        self.register_buffer("positions", positions, persistent=False)
        self.body = nn.Sequential(
            *(Block(width, heads, dropout) for _ in range(depth)), nn.LayerNorm(width)
        )
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.standardise(x)  # (B, C, T)
        x = self.patches(x).transpose(1, 2)  # (B, L, W)
        x = self.body(x + self.positions[: x.shape[1]])
        return self.head(x.mean(1))  # (B, num_classes)
