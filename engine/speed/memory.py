"""Memory: an allocator that keeps freed blocks, and the layout that is fastest for convolutions."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from engine.private import CONVOLUTIONS

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGE = (1 << 31) - 1

# 1-D ones as 2-D ones of height 1, which is how torch itself runs them
_FORMATS: dict[Any, torch.memory_format] = dict.fromkeys(CONVOLUTIONS, torch.channels_last)
_FORMATS |= dict.fromkeys((nn.Conv3d, nn.ConvTranspose3d), torch.channels_last_3d)


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory for the next step; returns whether there is a glibc, and it
    agreed.

    By default a large block goes back to the system when it is freed, and the next step pays for
    each of its pages: a tenth to a half of the time of a convolutional network on the CPU.
    """
    mallopt: Any = getattr(ctypes.CDLL(None), "mallopt", None)
    # It returns 1 if it agrees. An older glibc takes no mmap threshold above 32 MB. The trim
    # threshold alone would do harm: setting it ends the adaptation of the mmap threshold.
    return bool(mallopt) and bool(
        (mallopt(_M_MMAP_THRESHOLD, _LARGE) or mallopt(_M_MMAP_THRESHOLD, 1 << 25))
        and mallopt(_M_TRIM_THRESHOLD, _LARGE)
    )


class BatchNorm1dLast(nn.BatchNorm1d):
    """A BatchNorm1d that keeps the memory order of (N, C, L); torch's returns the usual one."""

    def forward(self, x: Tensor) -> Tensor:
        super()._check_input_dim(x)
        return super().forward(x.unsqueeze(2)).squeeze(2) if x.ndim == 3 else super().forward(x)

    def _check_input_dim(self, x: Tensor) -> None:
        """Accept the four axes that `forward` gives."""


def convolutions(model: nn.Module) -> list[nn.Module]:
    """Return the convolutions that have a choice of order: 1-D ones on CPUs only, where the gain
    was measured."""
    return [
        module
        for module in model.modules()
        if type(module) in _FORMATS
        and (
            not isinstance(module, (nn.Conv1d, nn.ConvTranspose1d))
            or module.weight.device.type == "cpu"
        )
    ]


def faster_order(model: nn.Module, device: torch.device, precision: str) -> str:
    """Choose channels_last or contiguous. By rule, not by timing, so that all ranks and all runs
    agree.

    On CPUs GroupNorm takes 2 to 5 times as long in channels-last order as in the usual one, in bf16
    up to 20 times (`benchmarks/precision.py`): more than the convolutions gain. On GPUs it copies
    its input to the usual order (pytorch#111824), and cuDNN's fast float32 kernels take that order.
    """
    usual = any(isinstance(module, nn.GroupNorm) for module in model.modules())
    return (
        "contiguous" if usual or (device.type != "cpu" and precision == "off") else "channels_last"
    )


def set_memory_format(model: nn.Module, order: str) -> nn.Module:
    """Put the kernels of convolutions into `order`; outputs follow. Checkpoints do not change,
    results by rounding."""
    last = order == "channels_last"
    for module in (chosen := convolutions(model)):
        layout = _FORMATS[type(module)] if last else torch.contiguous_format
        for p in module.parameters(recurse=False):
            # copied: `contiguous` returns a kernel of one channel, or one pixel, as it is
            if p.ndim > 3:
                p.data = torch.empty_like(p.data, memory_format=layout).copy_(p.data)
            elif p.ndim == 3:
                p.data = (
                    torch.empty_like(p.data.unsqueeze(2), memory_format=layout)
                    .squeeze(2)
                    .copy_(p.data)
                )
    if any(module.weight.ndim == 3 for module in chosen):
        for module in model.modules():
            if type(module) in (nn.BatchNorm1d, BatchNorm1dLast):
                module.__class__ = BatchNorm1dLast if last else nn.BatchNorm1d
    return model
