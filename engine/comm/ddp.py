"""The options of DDP: SyncBatchNorm, a hook for its sums, no broadcasts of buffers."""

from __future__ import annotations

import inspect
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from engine.comm import sealed, shm_backend
from engine.comm.world import World
from engine.errors import LockstepError, console

MIB = 1 << 20
"""The unit of DDP's bucket sizes. Its small first bucket exists only where no bucket size was set."""

NO_BUFFER_SYNC: dict[str, Any] = {
    name: False
    for name in ("forward_sync_buffers", "broadcast_buffers")  # torch 2.13 renamed it
    if name in inspect.signature(DistributedDataParallel).parameters
}
if len(NO_BUFFER_SYNC) > 1:
    del NO_BUFFER_SYNC["broadcast_buffers"]


def sync_batch_norm(model: nn.Module, world: World) -> nn.Module:
    if world.device.type == "cpu":
        raise LockstepError(
            "ddp.sync_bn=true, but torch's SyncBatchNorm runs on GPUs only",
            "ddp.sync_bn",
            "drop it, or use GroupNorm, which needs no synchronising",
            everywhere=True,
        )
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


def add_comm_hook(net: DistributedDataParallel, kind: str, workers: Any) -> DistributedDataParallel:
    """Let DDP send gradients in fewer bytes, by torch's own hooks; through shared memory sum them before dividing.

    kind     of ddp.comm_hook
    workers  virtual ones bring a hook of their own
    """
    sealed.meeting.wrapped = True
    if workers.hook is not None:
        net.register_comm_hook(workers, workers.hook)
        return net
    if kind == "bf16" and "nccl" not in dist.get_backend():  # torch itself asks what it was built with
        console.warning(f"ddp.comm_hook=bf16 is for NCCL, not for {_backend()}: gradients are sent as they are")
        kind = "none"
    if dist.get_world_size() == 1:
        return net
    if kind == "none":
        if shm_backend.in_use():
            net.register_comm_hook([], shm_backend.sum_then_divide)
        return net
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    # Without memory between steps: it would not be in a checkpoint, and a gradient that is not finite would stay in it
    # for ever.
    low_rank: dict[str, Any] = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2}
    low_rank |= {"use_error_feedback": False, "warm_start": False}
    hooks: dict[str, Any] = {
        "fp16": (None, default_hooks.fp16_compress_hook),
        "bf16": (None, default_hooks.bf16_compress_hook),
        "powersgd": (powerSGD_hook.PowerSGDState(None, **low_rank), powerSGD_hook.powerSGD_hook),
    }
    net.register_comm_hook(*hooks[kind])
    return net


def _backend() -> str:
    return "gloo" if dist.get_backend() == "shm" else dist.get_backend()
