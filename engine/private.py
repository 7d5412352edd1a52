"""Private names of torch that the engine uses, read in torch 2.13; `tests/test_private.py` says when one is gone.

Those of the optimizer, the compiler and the backend are fenced in beside this file: `adamw`, `compiler`, `shm_backend`.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

DROPOUT: Any = nn.modules.dropout._DropoutNd
BATCH_NORM: Any = nn.modules.batchnorm._BatchNorm
INSTANCE_NORM: Any = nn.modules.instancenorm._InstanceNorm
NORM_WITH_STATISTICS: Any = nn.modules.batchnorm._NormBase
"""Base classes of layers, which have no public name; the last is that of the two before it."""


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's own buffers that its state dict leaves out."""
    return module._non_persistent_buffers_set


def own_buffers(module: nn.Module) -> dict[str, Any]:
    """Return a module's own buffers by name, as they are now and will be: its attributes are looked up in there."""
    return module._buffers


def forward_pre_hooks(module: nn.Module) -> list[Any]:
    return [*module._forward_pre_hooks.values()]


def check_all_gradients_reduced(net: DistributedDataParallel) -> None:
    """Raise RuntimeError where a bucket of the last backward pass has not been all-reduced; DDP itself would say so in
    the next forward pass."""
    net._check_reducer_finalized()


def ddp_record(net: DistributedDataParallel) -> dict[str, Any]:
    """Return what DDP has recorded of itself: backend, number of tensors, bytes."""
    return net._get_ddp_logging_data()


def cpu_has_bf16() -> bool:
    """Return whether torch and oneDNN use bf16 instructions: they are there, and no variable hides them."""
    most = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA", "")
    return (
        torch.cpu._is_avx512_bf16_supported()
        and torch.backends.cpu.get_cpu_capability().startswith("AVX512")  # ATEN_CPU_CAPABILITY
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # which is true also where it would only emulate them
        and most.upper() not in ("AVX512_CORE", "AVX512_CORE_VNNI")
    )
