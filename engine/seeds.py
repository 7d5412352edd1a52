"""Random numbers that are a pure function of (seed, epoch, position): the same for every cut of a batch."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1


def _signed(value: int) -> int:
    """Return the int64 with the same 64 bits."""
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right logically: torch's own `>>` keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """Hash int64 to int64, bijectively: the finaliser of SplitMix64 (Steele, Lea & Flood, OOPSLA 2014)."""
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def sample_seeds(seed: int, epoch: int, positions: Tensor) -> Tensor:
    """Return (B,) int64 seeds, a pure function of (seed, epoch, position in the global order): no rank, no worker."""
    gamma = _signed(0x9E3779B97F4A7C15)
    start = mix(mix(torch.tensor(seed, device=positions.device) + gamma) + epoch)
    return mix(start + (positions + 1) * gamma)


def seed_generators(device: torch.device, *key: int | str) -> None:
    """Seed torch's generators (of the CPU and of `device`), random's and NumPy's by `key` alone, such as
    ("train", seed, epoch, position). No GPU waits for it. `torch.manual_seed` would format a stack each time."""
    seed = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        for generator in torch.cuda.default_generators:  # all: DataParallel has several
            generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def uniform(seeds: Tensor, count: int) -> Tensor:
    """(B,) int64 seeds -> (B, count) float32 in [0, 1), the same on every device and for every cut of the batch."""
    counter = torch.arange(1, count + 1, device=seeds.device) * _signed(0x9E3779B97F4A7C15)
    return _shift(mix(seeds[:, None] + counter), 40).to(torch.float32) * 2.0**-24
