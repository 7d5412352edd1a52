"""Private names of torch that plugins/performance uses, read in torch 2.13."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

ALLOCATOR: Any = torch._C


def forget_record(pool: Any) -> None:
    """Let the allocator and the generator of the current GPU forget a record that CUDA has refused.

    `CUDAGraph::capture_end` raises CUDA's error before it ends the pool's allocation. While an
    allocation has not ended, the allocator gives back no block that a second stream has used, and
    `empty_cache` fails. Versions without a generator's state for each record (2.13 has it) would
    refuse every random number: "Offset increment outside graph capture encountered unexpectedly".

    pool  of the records
    """
    device = torch.cuda.current_device()
    # the second name is that of torch 2.7
    end = getattr(ALLOCATOR, "_cuda_endAllocateToPool", None)
    end = end or ALLOCATOR._cuda_endAllocateCurrentStreamToPool
    with suppress(RuntimeError):  # torch has ended the allocation itself
        end(device, pool)
        ALLOCATOR._cuda_releasePool(device, pool)
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())
