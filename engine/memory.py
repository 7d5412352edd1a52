"""Memory: an allocator that keeps what is freed, and the layout that convolutions like best."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch
from torch import nn

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGE = (1 << 31) - 1

_FORMATS: dict[type[nn.Module], torch.memory_format] = {
    nn.Conv2d: torch.channels_last,
    nn.ConvTranspose2d: torch.channels_last,
    nn.Conv3d: torch.channels_last_3d,
    nn.ConvTranspose3d: torch.channels_last_3d,
}


def keep_freed() -> bool:
    """Make glibc keep freed memory for the next step; whether there is glibc, and it agreed.

    By default a large block goes back to the system as soon as it is free, and the next step pays for every page of it
    again: a tenth to a half of the time of a convolutional network on the CPU.
    """
    if sys.platform != "linux":
        return False
    mallopt: Any = getattr(ctypes.CDLL(None), "mallopt", None)
    # It returns 1 if it agrees. An older glibc takes no threshold above 32 MB; and without that one the other does
    # harm, for it ends the adaptation of the first.
    return bool(mallopt) and bool(
        (mallopt(_M_MMAP_THRESHOLD, _LARGE) or mallopt(_M_MMAP_THRESHOLD, 1 << 25))
        and mallopt(_M_TRIM_THRESHOLD, _LARGE)
    )


def lay_out(model: nn.Module, wanted: str, on_cpu: bool, mixed: bool) -> str:
    """Put the kernels of 2-D and 3-D convolutions into the `wanted` order, and say in words what was done. The numbers
    stay the same, and so does what a checkpoint holds."""
    convolutions = [module for module in model.modules() if type(module) in _FORMATS]
    # In float32 cuDNN has its fast kernels for the usual order.
    if not convolutions or wanted == "contiguous" or (wanted == "auto" and not (on_cpu or mixed)):
        return "the usual" if convolutions else ""
    for module in convolutions:
        for p in module.parameters(recurse=False):
            if p.ndim > 1:
                p.data = p.data.contiguous(memory_format=_FORMATS[type(module)])
    return "channels-last"
