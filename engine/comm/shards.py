"""Tensors of which each rank holds some rows: torch's DTensor, as FSDP2 makes it. A plain tensor
holds all of its own.

torch.distributed.tensor is not loaded by this module: that takes a second, and without FSDP2 nobody
has a DTensor.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from engine.phases import phase


def is_sharded(value: Any) -> bool:
    return hasattr(value, "full_tensor")


def to_local(value: Tensor) -> Tensor:
    """Return this rank's rows, perhaps none, in the memory of `value`."""
    rows: Any = value
    return rows.to_local() if is_sharded(value) else value


def to_full(value: Tensor) -> Tensor:
    """(all ranks that hold rows) Return all rows. From a GPU NCCL gathers them there, one tensor at
    a time."""
    rows: Any = value
    if not is_sharded(value):
        return value
    with phase.during("all_gather", waits=True):
        found: Tensor = rows.full_tensor()
    return found


def row_range(value: Tensor) -> slice:
    """Return the rows that this rank holds: ceil(rows / ranks) each, so the last ranks may hold
    fewer, or none."""
    if not is_sharded(value):
        return slice(0, len(value) if value.ndim else 1)
    mesh: Any = value.device_mesh  # type: ignore[attr-defined]
    share = math.ceil(len(value) / mesh.size(-1))
    first = min(mesh.get_coordinate()[-1] * share, len(value))
    return slice(first, min(first + share, len(value)))


def shard_like(value: Any, sharded: Any) -> Any:
    """Return the rows of a whole `value` that this rank holds of `sharded`, in the same form; no
    collective."""
    if (
        not is_sharded(sharded)
        or not isinstance(value, Tensor)
        or is_sharded(value)
        or value.shape != sharded.shape
    ):
        return value
    from torch.distributed.tensor import DTensor

    rows = value[row_range(sharded)].to(sharded.device)
    # With its shape: torch would take it to be rows x ranks.
    about = {"shape": sharded.shape, "stride": sharded.stride()}
    return DTensor.from_local(
        rows, sharded.device_mesh, sharded.placements, run_check=False, **about
    )
