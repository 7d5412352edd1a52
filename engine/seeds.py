"""Random numbers as a pure function of (seed, epoch, position). The seeds of samples are the same
for every partition of a batch. The generators that `seed_generators` seeds are the same for equal
keys only: dropout in a pass follows the first sample of the pass, and so depends on the
partition."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

GAMMA, FIRST, SECOND = (
    n - (1 << 64) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
"""The constants of SplitMix64 as int64, because torch has no arithmetic for uint64."""


def mix(x: Tensor) -> Tensor:
    """Hash int64 to int64, bijectively: the finaliser of SplitMix64 (Steele, Lea & Flood, OOPSLA
    2014)."""
    # `>>` keeps the sign; the masks make it a logical shift.
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * FIRST
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * SECOND
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def sample_seeds(seed: int, epoch: int, positions: Tensor) -> Tensor:
    """Return (B,) int64 seeds, a pure function of (seed, epoch, position in the global order): no
    rank, no worker."""
    # `full`, because a copy to a GPU is a sync point.
    start = mix(
        mix(torch.full((), seed, dtype=torch.int64, device=positions.device) + GAMMA) + epoch
    )
    return mix(start + (positions + 1) * GAMMA)


def data_seeds(seed: int, epoch: int, positions: Tensor) -> list[int]:
    """Return the seeds from which a dataset draws its samples, in [0, 2**63), the range of NumPy.
    The seeds differ from `sample_seeds`: otherwise a crop and the noise in the loss would come from
    the same numbers."""
    return (mix(sample_seeds(seed, epoch, positions)) & ((1 << 63) - 1)).tolist()


def seed_generators(device: torch.device, *key: int | str) -> None:
    """Seed torch's generators (of the CPU and of `device`), random's and NumPy's by `key` alone,
    such as ("train", seed, epoch, position). No sync point; `torch.manual_seed` would also format a
    stack each time."""
    seed = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        for generator in torch.cuda.default_generators:  # all: DataParallel has several
            generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def seed_everything(seed: int) -> None:
    """Seed torch, random and NumPy alike on every rank, for what `Task.model` draws."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@contextmanager
def preserve_rng_state(device: torch.device | None = None) -> Iterator[None]:
    """Restore the generators of torch (of the CPU and of `device`), random and NumPy after the
    block."""
    of_random, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device and device.type == "cuda" else []):
            yield
    finally:
        random.setstate(of_random)
        np.random.set_state(of_numpy)


def uniform(seeds: Tensor, count: int) -> Tensor:
    """(B,) int64 seeds -> (B, count) float32 in [0, 1), the same on every device and for every
    partition of the batch."""
    counter = torch.arange(1, count + 1, device=seeds.device) * GAMMA
    return ((mix(seeds[:, None] + counter) >> 40) & ((1 << 24) - 1)).to(torch.float32) * 2.0**-24
