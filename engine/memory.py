"""The CPU's memory: an allocator that keeps what is freed, and the layout that convolutions like best."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch
from torch import nn

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGE = (1 << 31) - 1


def keep_freed() -> bool:
    """Make glibc keep freed memory for the next step; whether it is glibc, and agreed.

    By default a large block goes back to the system as soon as it is free, and the next step pays for every page of it
    again: up to half of the time of a convolutional network. The peak stays what it is: what is kept was in use before.
    """
    if sys.platform != "linux":
        return False
    mallopt: Any = getattr(ctypes.CDLL(None), "mallopt", None)
    # Each for itself: mallopt returns 1 if it has understood.
    return bool(mallopt) and all(mallopt(what, _LARGE) == 1 for what in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD))


def channels_last(model: nn.Module) -> None:
    """Put the kernels of 2-D and 3-D convolutions into channels-last order; the numbers stay the same."""
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        elif isinstance(module, (nn.Conv3d, nn.ConvTranspose3d)):
            module.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
