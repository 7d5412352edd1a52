"""A dataset as a few large tensors, on the device if the memory suffices.

A batch is then one gather, without a copy from the host.
"""

from __future__ import annotations

import contextlib
import re
import sys
from operator import mul
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.comm.digests import same_bits
from engine.contract import Batch, StepInfo
from engine.data.batches import map_tensors, tensors, tree_leaves
from engine.data.examples import ObservedStep
from engine.data.samples import Fetcher
from engine.errors import LockstepError, amount, console
from engine.launch import processes_sharing

SHARE = 1 / 3
"""Largest share of a GPU's free memory that `cache=auto` takes. The free memory is read before the
model is made."""

CHUNK = 64 << 20
"""Bytes fetched at once."""

AT_ONCE = {"cpu": 256 << 10, "cuda": 16 << 20}
"""Bytes gathered and prepared at once: on a GPU each small kernel then serves many passes; on a CPU
no more than stays in its cache."""


def _refuse(name: str) -> None:
    """Raise LockstepError for a number of the step that is read for several passes at once."""
    raise LockstepError(
        f"it reads batch['lockstep'].{name} in some of its calls only, and this call prepares "
        "several steps",
        "the task's `prepare`",
        "read it in each call, before any condition; or use cache=none",
    )


class InMemoryDataset:
    """All samples of a fetcher in the memory of `device`.

    columns        a batch of all samples
    bytes          size of the tensors
    several_steps  the StepInfo of several passes that are prepared at once
    """

    in_memory = True
    several_steps = ObservedStep(StepInfo(), _refuse)

    def __init__(self, fetcher: Fetcher, sample_bytes: int, device: torch.device):
        self.device, self.length = device, len(fetcher)
        self.columns: Any = None
        step = max(1, min(4096, CHUNK // max(1, sample_bytes)))
        for first in range(0, self.length, step):
            stop = min(first + step, self.length)
            batch = fetcher.fetch([*range(first, stop)])
            if self.columns is None:
                self.columns = map_tensors(batch, self._new_column)
            self._fill(first, stop, batch)
        self.bytes = sum(column.nbytes for column in tensors(self.columns))

    def _new_column(self, values: Tensor) -> Tensor:
        """Return memory for the values of all samples, given the values of some."""
        shape = (self.length, *values.shape[1:])
        return torch.empty(shape, dtype=values.dtype, device=self.device)

    def _fill(self, first: int, stop: int, batch: Batch) -> None:
        """Copy a batch to the samples `first` to before `stop`. Raises LockstepError if the shape
        differs from the shape of the first batch: a copy would repeat a single value."""
        parts = dict(tree_leaves(batch))
        for name, column in tree_leaves(self.columns):
            rows = column[first:stop]
            if rows.shape != parts[name].shape:
                raise LockstepError(
                    f"{name!r} of samples {first} to {stop - 1} has not the shape of the "
                    "first ones",
                    "cache",
                    "use cache=none",
                )
            rows.copy_(parts[name])

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, indices: list[int]) -> Batch:
        """Return a batch. The call waits for a GPU, so the steps call `gather`."""
        return self.gather(torch.tensor(indices, device=self.device))

    def gather(self, indices: Tensor) -> Batch:
        """Return the batch of (B,) indices on `device`, without a copy and without a wait.

        Beside a GPU, samples in the host's memory go into pinned memory, which torch reuses.
        """
        pinned = self.device.type == "cpu" and torch.cuda.is_initialized()

        def gather_column(column: Tensor) -> Tensor:
            shape = (len(indices), *column.shape[1:])
            rows = torch.empty(shape, dtype=column.dtype, device=self.device, pin_memory=pinned)
            return torch.index_select(column, 0, indices, out=rows)

        return map_tensors(self.columns, gather_column)

    def batches_at_once(self, batch_size: int) -> int:
        """Return the number of batches that are gathered and prepared at once."""
        if type(self.columns) is not dict:
            return 1
        bytes_of_batch = batch_size * self.bytes // len(self)
        return max(1, AT_ONCE[self.device.type] // max(1, bytes_of_batch))

    def collate(self, batch: Batch) -> Batch:
        """Return the batch unchanged: `gather` returns a batch even if the batch is a list."""
        return batch


def cache_datasets(
    wanted: str, datasets: list[Any], device: torch.device
) -> list[InMemoryDataset] | None:
    """Return the datasets in memory, or None to leave the datasets as they are.

    wanted  the key `cache`. auto: on a GPU, if the data take at most SHARE of the free memory

    Raises LockstepError if the samples cannot be cached, or if the memory is too small. With auto
    the result is None in both cases.
    """
    auto = wanted == "auto"
    if wanted == "none" or (auto and device.type == "cpu"):
        return None
    memory = torch.device("cpu") if wanted == "host" else device
    fetchers = [*map(Fetcher, datasets)]
    try:
        sizes = [_sample_bytes(fetcher, wanted) for fetcher in fetchers]
    except _Uncacheable:
        if auto:
            return None
        raise
    needed = sum(map(mul, sizes, map(len, fetchers)))
    free = _free_bytes(memory)
    copies = processes_sharing(memory)
    if auto and copies * needed > SHARE * free:
        return None
    if copies * needed > free:
        raise LockstepError(
            f"cache={wanted}: the data take {needed / 1e9:.1f} GB in each of "
            f"{amount(copies, 'process')}, and {free / 1e9:.1f} GB are free",
            "cache",
            "use cache=none",
        )
    console.info(
        f"Holding {needed / 1e6:.0f} MB of data on {memory} ({free / 1e6:.0f} MB are free)...\n"
    )
    return [
        InMemoryDataset(fetcher, size, memory)
        for fetcher, size in zip(fetchers, sizes, strict=True)
    ]


class _Uncacheable(LockstepError):
    """The samples of a dataset cannot be cached."""


def _sample_bytes(fetcher: Fetcher, wanted: str) -> int:
    """Return the mean size of a sample, measured on 16 samples. Raises _Uncacheable if a sample is
    not the same each time, or is no dict of tensors."""
    what = f"cache={wanted}, but {fetcher.name}"
    if fetcher.seeded:
        what += " draws its samples from seeds: they change with each epoch"
        raise _Uncacheable(what, "cache", "use cache=none")
    indices = sorted({len(fetcher) * k // 16 for k in range(16)})
    batch = dict(tree_leaves(fetcher.fetch(indices)))
    if not all(isinstance(values, Tensor) and values.ndim for values in batch.values()):
        what += " gives more than tensors with the batch as their leading axis"
        raise _Uncacheable(what, "cache", "use cache=none")
    for row, index in enumerate(indices):
        alone = dict(tree_leaves(fetcher.fetch([index])))
        if not all(same_bits(values[row], alone[name][0]) for name, values in batch.items()):
            raise _Uncacheable(
                f"{what} gives a sample that changes each time, or with the others of its batch",
                "cache",
                "draw from batch['lockstep'].seed in the task's prepare, pad to one length, "
                "or use cache=none",
            )
    return sum(values.nbytes for values in batch.values()) // len(indices)


def _free_bytes(device: torch.device) -> int:
    """Return the free bytes of a GPU or of the machine; sys.maxsize if they are unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    text = ""
    with contextlib.suppress(OSError):  # not Linux
        text = Path("/proc/meminfo").read_text(errors="replace")
    available_kb = re.search(r"^MemAvailable: *(\d+)", text, re.MULTILINE)
    return int(available_kb[1]) * 1024 if available_kb else sys.maxsize
