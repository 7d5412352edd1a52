"""A dataset as a few large tensors, on the device if they fit: a batch is then one gather, without
a copy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.comm.digests import same_bits
from engine.contract import Batch
from engine.data.batches import map_tensors, tensors, tree_leaves
from engine.data.samples import Fetcher
from engine.errors import LockstepError, amount, console
from engine.launch import processes_sharing

SHARE = 1 / 3
"""`cache=auto` takes at most this share of a GPU's free memory, measured before the model is
made."""

CHUNK = 64 << 20
"""Bytes fetched at once."""


class InMemoryDataset:
    """A dataset that holds all samples of the fetcher's; its batches are on `device`."""

    in_memory = True

    def __init__(self, fetcher: Fetcher, sample_bytes: int, device: torch.device):
        self.device, self.length = device, len(fetcher)
        self.columns: Any = None  # a batch of all samples
        step = max(1, min(4096, CHUNK // max(1, sample_bytes)))
        for first in range(0, self.length, step):
            some = range(first, min(first + step, self.length))
            batch = fetcher.fetch([*some])
            if self.columns is None:
                self.columns = map_tensors(batch, self._column)
            parts = dict(tree_leaves(batch))
            for name, column in tree_leaves(self.columns):
                rows = column[some.start : some.stop]
                if rows.shape != parts[name].shape:  # copying would repeat a single value silently
                    what = (
                        f"{name!r} of samples {some[0]} to {some[-1]} has not the shape of "
                        "the first ones"
                    )
                    raise LockstepError(what, "cache", "use cache=none")
                rows.copy_(parts[name])

    def _column(self, values: Tensor) -> Tensor:
        return torch.empty((self.length, *values.shape[1:]), dtype=values.dtype, device=self.device)

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, indices: list[int]) -> Batch:
        """Return a batch. Waits for a GPU: the steps use `rows`."""
        return self.rows(torch.tensor(indices, device=self.device))

    def rows(self, indices: Tensor) -> Batch:
        """Return the samples of (B,) indices, which are on `device`, too: no copy, no wait. Samples
        in the host's memory go into pinned memory if there is a GPU; torch reuses it."""
        pinned = self.device.type == "cpu" and torch.cuda.is_initialized()

        def gathered(column: Tensor) -> Tensor:
            shape = (len(indices), *column.shape[1:])
            room = torch.empty(shape, dtype=column.dtype, device=self.device, pin_memory=pinned)
            return torch.index_select(column, 0, indices, out=room)

        return map_tensors(self.columns, gathered)

    def collate(self, batch: Batch) -> Batch:
        """Identity: `rows` returns a batch, also where it is a list."""
        return batch

    @property
    def bytes(self) -> int:
        return sum(column.nbytes for column in tensors(self.columns))


def cache_datasets(
    wanted: str,
    datasets: list[Any],
    device: torch.device,
) -> list[InMemoryDataset] | None:
    """Return the datasets in memory, or None to leave them as they are.

    wanted             the key `cache`; auto: on a GPU, if they take at most SHARE of its free
                       memory
    """
    auto = wanted == "auto"
    if wanted == "none" or (auto and device.type == "cpu"):
        return None
    memory = torch.device("cpu") if wanted == "host" else device
    fetchers, sizes = [Fetcher(dataset) for dataset in datasets], []
    for fetcher in fetchers:
        size, unsupported, todo = _sample_bytes(fetcher)
        if unsupported and auto:
            return None
        if unsupported:
            raise LockstepError(f"cache={wanted}, but {fetcher.name} {unsupported}", "cache", todo)
        sizes.append(size)
    needed = sum(size * len(fetcher) for size, fetcher in zip(sizes, fetchers, strict=True))
    free, copies = _free_bytes(memory), processes_sharing(memory)
    if auto and copies * needed > SHARE * free:
        return None
    if copies * needed > free:
        what = f"the data take {needed / 1e9:.1f} GB in each of {amount(copies, 'process')}"
        raise LockstepError(
            f"cache={wanted}: {what}, and {free / 1e9:.1f} GB are free", "cache", "use cache=none"
        )
    console.info(
        f"Holding {needed / 1e6:.0f} MB of data on {memory} ({free / 1e6:.0f} MB are free)...\n"
    )
    return [
        InMemoryDataset(fetcher, size, memory)
        for size, fetcher in zip(sizes, fetchers, strict=True)
    ]


def _sample_bytes(fetcher: Fetcher) -> tuple[int, str, str]:
    """Return the bytes of a sample, measured on sixteen; why samples cannot be held, if so, and
    what to do about it."""
    if fetcher.seeded:
        return 0, "draws its samples from seeds: they change with each epoch", "use cache=none"
    some = sorted({len(fetcher) * k // 16 for k in range(16)})
    together = dict(tree_leaves(fetcher.fetch(some)))
    if not all(isinstance(values, Tensor) and values.ndim for values in together.values()):
        return 0, "gives more than tensors with the batch as their leading axis", "use cache=none"
    for k, index in enumerate(some):
        alone = dict(tree_leaves(fetcher.fetch([index])))
        if not all(same_bits(values[k], alone[name][0]) for name, values in together.items()):
            todo = (
                "draw from batch['lockstep'].seed in the task's prepare, pad to one length, "
                "or use cache=none"
            )
            return 0, "gives a sample that changes each time, or with the others of its batch", todo
    return sum(values.nbytes for values in together.values()) // len(some), "", ""


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux
        return sys.maxsize
