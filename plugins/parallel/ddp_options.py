"""The options of DDP: SyncBatchNorm, a hook for its sums, no broadcasts of buffers."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from engine import hooks
from engine.comm.world import World
from engine.errors import LockstepError, console

MIB = 1 << 20
"""The unit of DDP's bucket sizes. Its small first bucket exists only where no bucket size was
set."""


def sync_batch_norm(model: nn.Module, world: World) -> nn.Module:
    if world.device.type == "cpu":
        what = "ddp.sync_bn=true, but torch's SyncBatchNorm runs on GPUs only"
        todo = "drop it, or use GroupNorm, which needs no synchronising"
        raise LockstepError(what, "ddp.sync_bn", todo, everywhere=True)
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


def add_comm_hook(net: DistributedDataParallel, kind: str, workers: Any) -> DistributedDataParallel:
    """Register the hook by which DDP sums gradients: that of virtual `workers`; or torch's own of
    that `kind`, which send fewer bytes; or that of shared memory."""
    backend, several = dist.get_backend(), dist.get_world_size() > 1
    if kind == "bf16" and "nccl" not in backend:  # torch itself asks what it was built with
        known = "gloo" if backend == "shm" else backend
        console.warning(
            f"ddp.comm_hook=bf16 is for NCCL, not for {known}: gradients are sent as they are"
        )
        kind = "none"
    if workers.hook is not None:
        net.register_comm_hook(workers, workers.hook)
        workers.in_ddp = True
    elif several and kind != "none":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        net.register_comm_hook(None, getattr(default_hooks, f"{kind}_compress_hook"))
    elif several:
        sums = hooks.shared_memory_hooks.first()
        if sums is not None:
            net.register_comm_hook([], sums)
    return net
