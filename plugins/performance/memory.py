"""Memory: an allocator that keeps freed blocks."""

from __future__ import annotations

import ctypes
from typing import Any

_M_TRIM_THRESHOLD = -1  # malloc.h
_M_MMAP_THRESHOLD = -3
_LARGEST = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory for the next step; return whether glibc is there and agreed.

    By default a large block returns to the system when the block is freed, and the next step pays
    for each page: a tenth to a half of the time of a convolutional network on the CPU.
    """
    mallopt: Any = getattr(ctypes.CDLL(None), "mallopt", None)  # 1 on success
    if mallopt is None:
        return False
    # an older glibc accepts no mmap threshold above 32 MB
    accepted = mallopt(_M_MMAP_THRESHOLD, _LARGEST) or mallopt(_M_MMAP_THRESHOLD, 1 << 25)
    # The trim threshold alone would do harm: glibc then adapts the mmap threshold no longer.
    return bool(accepted and mallopt(_M_TRIM_THRESHOLD, _LARGEST))
