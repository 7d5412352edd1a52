"""Sharded tensors (torch's DTensor, by FSDP2): a rank holds some rows. A plain tensor has all rows.

This module does not load torch.distributed.tensor. The import takes a second, and without FSDP2
there is no DTensor.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from engine.phases import phase


def is_sharded(value: Any) -> bool:
    """Return whether a value is a sharded tensor."""
    return hasattr(value, "full_tensor")


def to_local(value: Any) -> Tensor:
    """Return the rows of this rank, perhaps none. The memory is shared with `value`."""
    return value.to_local() if is_sharded(value) else value


def to_full(value: Any) -> Tensor:
    """(all ranks that hold rows) Return all rows. On GPUs NCCL gathers a tensor at a time."""
    if not is_sharded(value):
        return value
    with phase.during("all_gather", waits=True):
        full: Tensor = value.full_tensor()
    return full


def row_range(value: Any) -> slice:
    """Return the range of the rows that this rank holds.

    A rank holds ceil(rows / ranks) rows; the last ranks may hold fewer rows, or no row.
    """
    if not is_sharded(value):
        return slice(0, len(value) if value.ndim else 1)
    mesh = value.device_mesh
    share = math.ceil(len(value) / mesh.size(-1))
    first = min(mesh.get_coordinate()[-1] * share, len(value))
    return slice(first, min(first + share, len(value)))


def shard_like(value: Any, sharded: Any) -> Any:
    """Return a whole `value` as a shard with the rows of `sharded`. No collective.

    Returns `value` itself if `sharded` is a plain tensor or the shapes differ.
    """
    if (
        not is_sharded(sharded)
        or not isinstance(value, Tensor)
        or is_sharded(value)
        or value.shape != sharded.shape
    ):
        return value
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        value[row_range(sharded)].to(sharded.device),
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        # Without the shape torch would assume rows x ranks.
        shape=sharded.shape,
        stride=sharded.stride(),
    )
