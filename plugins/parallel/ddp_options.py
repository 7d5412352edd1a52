"""The options of DDP: SyncBatchNorm, and a communication hook for its sums."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from engine import hooks
from engine.comm.world import World
from engine.errors import LockstepError, console


def sync_batch_norm(model: nn.Module, world: World) -> nn.Module:
    """Return the model with SyncBatchNorm in place of BatchNorm. Raises LockstepError on CPUs."""
    if world.device.type == "cpu":
        raise LockstepError(
            "ddp.sync_bn=true, but torch's SyncBatchNorm runs on GPUs only",
            "ddp.sync_bn",
            "drop it, or use GroupNorm, which needs no synchronising",
            everywhere=True,
        )
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


def add_comm_hook(net: DistributedDataParallel, kind: str, workers: Any) -> DistributedDataParallel:
    """Register the hook by which DDP sums gradients, and return the net. The hook is, in this
    order: the hook of virtual workers; torch's hook of the kind, which sends fewer bytes; the hook
    of shared memory.

    workers  the reducer of the run
    """
    backend = dist.get_backend()
    if kind == "bf16" and "nccl" not in backend:  # torch checks its build only
        shown = "gloo" if backend == "shm" else backend
        console.warning(
            f"ddp.comm_hook=bf16 is for NCCL, not for {shown}: gradients are sent as they are"
        )
        kind = "none"
    if workers.hook is not None:
        net.register_comm_hook(workers, workers.hook)
        workers.in_ddp = True
    elif dist.get_world_size() == 1:
        return net
    elif kind != "none":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        net.register_comm_hook(None, getattr(default_hooks, f"{kind}_compress_hook"))
    else:
        channel = hooks.shared_memory.first(None)
        if channel is not None:
            net.register_comm_hook([], channel.sum_then_divide)
    return net
