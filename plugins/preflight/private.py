"""Private names of torch for the checks, read in torch 2.13.

`tests/repository/test_private.py` fails when a name is gone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

BATCH_NORM: Any = nn.modules.batchnorm._BatchNorm
INSTANCE_NORM: Any = nn.modules.instancenorm._InstanceNorm
"""Base classes of layers; `engine.private.NORM_WITH_STATISTICS` is the base of both."""


def closed_form(scheduler: LRScheduler) -> list[Any]:
    """Return the rates of the groups by a scheduler's closed form; empty without one."""
    if not hasattr(scheduler, "_get_closed_form_lr"):
        return []
    return [*scheduler._get_closed_form_lr()]


def forward_pre_hooks(module: nn.Module) -> list[Any]:
    """Return the functions that a module calls before its forward pass."""
    return [*module._forward_pre_hooks.values()]


def release_device_cache() -> None:
    """Return the device memory that no tensor uses to the driver, on all GPUs. The call waits for
    the device.

    A workspace of cuBLAS is a piece of whatever block was free when cuBLAS allocated the workspace,
    32 MiB on a Hopper GPU. The allocator cannot return a block of which a piece is in use. So the
    workspaces go first; cuBLAS allocates new workspaces later.
    """
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
