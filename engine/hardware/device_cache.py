"""A dataset kept as a few large tensors, on the device where they fit: a batch is then one gather, and no copy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.console import console
from engine.contract import Batch
from engine.errors import LockstepError, amount

SHARE = 1 / 3
"""Share of the free memory, before there is a model, that `cache=auto` takes of a GPU at most."""

CHUNK = 64 << 20
"""Bytes fetched at once."""


class CachedDataset:
    """A dataset like the one it was filled from. Its batches lie on `device` already."""

    def __init__(self, fetch: Callable[[list[int]], Batch], length: int, sample_bytes: int, device: torch.device):
        self.device, self.length = device, length
        self.columns: dict[str, Tensor] = {}
        step = max(1, min(4096, CHUNK // max(1, sample_bytes)))
        for first in range(0, length, step):
            batch = fetch(list(range(first, min(first + step, length))))
            for name, values in batch.items():
                if name not in self.columns:
                    self.columns[name] = torch.empty((length, *values.shape[1:]), dtype=values.dtype, device=device)
                rows = self.columns[name][first : first + len(values)]
                if rows.shape != values.shape:  # copying would repeat a single value silently
                    raise LockstepError(
                        f"samples {first} to {first + len(values) - 1} have another shape of {name!r} than the first",
                        where="cache",
                        todo="use cache=none",
                    )
                rows.copy_(values)

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, indices: list[int]) -> Batch:
        rows = torch.tensor(indices)
        if self.device.type == "cuda":  # from pinned memory: any other copy waits for the GPU
            rows = rows.pin_memory().to(self.device, non_blocking=True)
        return self.rows(rows)

    def rows(self, indices: Tensor) -> Batch:
        """Return the samples of (B,) indices that lie on `device`: of an epoch's order there, no copy and no wait."""
        return {name: column.index_select(0, indices) for name, column in self.columns.items()}

    @property
    def bytes(self) -> int:
        return sum(column.nbytes for column in self.columns.values())


def cache_datasets(
    wanted: str,
    datasets: list[tuple[Any, Callable[[list[int]], Batch]]],
    device: torch.device,
    processes_sharing: Callable[[torch.device], int],
) -> list[CachedDataset] | None:
    """Return the datasets in memory as `cache` asks, or None to leave them as they are; each is given with what fetches
    a batch of it.

    wanted             auto is the device, if it is a GPU in which they take up no more than a third of the free memory
    processes_sharing  returns how many processes hold their data in a memory
    """
    if wanted == "none" or (wanted == "auto" and device.type == "cpu"):
        return None
    memory = torch.device("cpu") if wanted == "host" else device
    sizes = []
    for dataset, fetch in datasets:
        some = sorted({len(dataset) * k // 16 for k in range(16)} if len(dataset) else ())
        together = fetch(some) if some else {}
        if not all(_same(together, k, fetch([index])) for k, index in enumerate(some)):
            if wanted == "auto":
                return None
            raise LockstepError(
                f"cache={wanted}, but {type(dataset).__name__} gives another sample each time, or in other company",
                where="cache",
                todo="draw from batch['seed'] in the task's loss, pad all samples to one length, or use cache=none",
            )
        sizes.append(sum(values.nbytes for values in together.values()) // max(1, len(some)))
    needed = sum(size * len(dataset) for size, (dataset, _) in zip(sizes, datasets, strict=True))
    free, copies = _free_bytes(memory), processes_sharing(memory)
    if wanted == "auto" and copies * needed > SHARE * free:
        return None
    if copies * needed > free:
        raise LockstepError(
            f"cache={wanted}: the data take {needed / 1e9:.1f} GB in each of {amount(copies, 'process')}, and "
            f"{free / 1e9:.1f} GB are free",
            where="cache",
            todo="use cache=none",
        )
    console.info(f"Holding {needed / 1e6:.0f} MB of data on {memory} ({free / 1e6:.0f} MB are free)...\n")
    return [
        CachedDataset(fetch, len(dataset), size, memory) for size, (dataset, fetch) in zip(sizes, datasets, strict=True)
    ]


def _same(together: Batch, k: int, alone: Batch) -> bool:
    """Return whether the k-th sample of a batch equals the sample fetched alone."""
    return all(same_bits(values[k], alone[name][0]) for name, values in together.items())


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Compare bit by bit; NaN equals NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(-1).view(torch.uint8)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux
        return sys.maxsize
